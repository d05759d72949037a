"""A Tab: commands, options, and the names that come with capsim."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from capsim.cli import app
from capsim.completion import complete_gpu, complete_model
from simulator.hardware.gpus import find_gpu, read_gpus
from simulator.hardware.model_config import find_model

ROOT = Path(__file__).resolve().parents[2]


def completed(line: str) -> list[str]:
    """What bash offers for the last word of a line."""
    environment = {
        "_CAPSIM_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }
    return CliRunner().invoke(app, [], prog_name="capsim", env=environment).output.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("capsim wha", ["what-if"]),
        ("capsim simulate rtx4090-q", ["rtx4090-qwen2.5-7b"]),
        ("capsim explain rtx4090-q", ["rtx4090-qwen2.5-7b"]),
        ("capsim predict --profile rtx", ["rtx4090-qwen2.5-7b"]),
        ("capsim predict --gpu rtx-40", ["rtx-4090"]),
        ("capsim optimize --gpu RTX-4090,L40", ["RTX-4090,L40S"]),
        ("capsim memory --model meta-llama/llama-3.2-1", ["meta-llama/llama-3.2-1B"]),
        ("capsim predict --max-num-s", ["--max-num-seqs"]),
        ("capsim predict --profile my-", []),  # then the shell completes files
    ],
)
def test_names_are_completed(line: str, expected: list[str]) -> None:
    assert completed(line) == expected


def test_every_completed_gpu_is_the_one_that_is_meant() -> None:
    names = complete_gpu("")
    assert [find_gpu(name) for name in names] == read_gpus()
    assert not any(" " in name for name in names)


def test_every_completed_model_is_known() -> None:
    names = complete_model("")
    assert len(names) > 10
    for name in names:
        find_model(name)


def test_the_shell_is_answered_without_anything_heavy() -> None:
    heavy = ("numpy", "pandas", "scipy", "pydantic", "aiohttp", "simpy")
    code = (
        "import sys; from capsim.completion import *; complete_gpu(''), complete_profile(''), complete_model('');"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "[]\n"


def test_installing_it_is_offered_in_one_line_of_the_help() -> None:
    text = CliRunner().invoke(app, ["--help"]).output
    assert "--install-completion" in text
    assert "--show-completion" not in text
    script = CliRunner().invoke(app, ["--show-completion", "bash"], prog_name="capsim")
    assert "_CAPSIM_COMPLETE" in script.output
