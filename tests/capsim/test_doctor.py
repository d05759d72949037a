"""`capsim doctor`: what is installed, what a server offers, and a remedy for whatever is missing."""

from __future__ import annotations

import json
import socket
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from twin_server import TwinServer, make_profile, serve_twin
from typer.testing import CliRunner, Result

from capsim.cli import app
from capsim.installation import EXTRAS
from simulator.engine.engine_flags import EngineFlags

ROOT = Path(__file__).resolve().parents[2]
FLAGS = EngineFlags(max_num_seqs=16, max_num_batched_tokens=1024, max_model_len=2048, num_gpu_blocks=1001)
PROFILE = make_profile(FLAGS, constant=5e-4, per_prefill_token=1e-6)


def doctor(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)], env={"COLUMNS": "80"})


def findings(*arguments: object) -> dict[str, Any]:
    """By what was looked at."""
    return {one["what"]: one for one in json.loads(doctor(*arguments, "--json").stdout)["findings"]}


@pytest.fixture(scope="module")
def twin() -> Iterator[TwinServer]:
    with serve_twin(PROFILE) as running:
        yield running


def project() -> dict[str, Any]:
    content: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return content


# --- what is installed


def test_every_package_that_capsim_needs_is_there() -> None:
    result = doctor()
    assert result.exit_code == 0, result.output
    found = findings()
    for requirement in project()["dependencies"]:
        name = requirement.partition(">")[0]
        assert found[name] | {"state": "ok", "value": metadata.version(name)} == found[name]
    assert max(len(line) for line in result.stdout.splitlines()) <= 80


@pytest.mark.parametrize(
    ("version", "told"),
    [(None, "error: simpy not installed: "), ("3.0", "error: simpy 3.0, needs >=4.1.1: ")],
)
def test_a_package_that_is_missing_or_old_fails_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, version: str | None, told: str
) -> None:
    known = metadata.version

    def pretend(name: str) -> str:
        if name != "simpy":
            return known(name)
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr("importlib.metadata.version", pretend)
    result = doctor()
    assert result.exit_code == 1
    assert result.stderr == f"{told}pip install 'simpy>=4.1.1'\n"


def test_an_absent_extra_is_no_fault_and_names_what_it_would_give(monkeypatch: pytest.MonkeyPatch) -> None:
    known = metadata.version

    def pretend(name: str) -> str:
        if name in ("distributed", "nvidia-ml-py"):
            raise metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr("importlib.metadata.version", pretend)
    extra = findings()["extra dask"]
    assert (extra["state"], extra["remedy"]) == ("optional", "pip install 'capsim[dask]'")
    assert "optimize --backend dask" in extra["value"]
    assert doctor().exit_code == 0


def test_the_extras_exist() -> None:
    assert set(EXTRAS) <= set(project()["optional-dependencies"])


# --- what a server offers


def test_a_server_tells_what_it_can_and_what_is_yours_to_give(twin: TwinServer) -> None:
    found = findings("--endpoint", twin.url)
    assert found["model"]["value"] == "quick-7b"
    assert found["engine"]["value"] == "vllm 0.32.0"
    assert found["prompts"]["value"].startswith("token ids")
    assert found["token counts"]["value"] == "in every event of a stream"
    assert found["KV pool"]["value"] == "16,000 tokens"
    assert found["/metrics"]["value"] == "shown"
    assert found["round trip"]["value"].endswith(" ms")
    assert found["--max-model-len"]["value"] == "2048, from the server"
    assert found["--max-num-seqs"]["state"] == "unknown"
    assert "assumed" in found["--max-num-seqs"]["value"]
    assert found["--max-num-seqs"]["remedy"]
    assert "VLLM_SERVER_DEV_MODE=1" in found["/server_info"]["remedy"]


def test_what_is_unknown_can_be_given(twin: TwinServer) -> None:
    given = findings("--endpoint", twin.url, "--max-num-seqs", 16)["--max-num-seqs"]
    assert (given["state"], given["value"], given["remedy"]) == ("ok", "16, from you", "")


def test_a_server_in_development_mode_tells_its_flags() -> None:
    with serve_twin(PROFILE, dev_mode=True) as twin:
        found = findings("--endpoint", twin.url)
    assert found["--max-num-seqs"]["value"] == "16, from the server"
    assert found["--max-num-batched-tokens"]["value"] == "1024, from the server"


def test_people_get_80_columns_and_programs_csv(twin: TwinServer) -> None:
    result = doctor("--endpoint", twin.url)
    assert result.exit_code == 0, result.output
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    assert "…" not in result.stdout
    header, *rows = doctor("--endpoint", twin.url, "--csv").stdout.splitlines()
    assert header == "section,what,state,value,remedy"
    assert len(rows) > 20


def test_a_gateway_that_hides_things_is_told_apart() -> None:
    sys.path.insert(0, str(ROOT / "tests" / "calibration"))
    from fake_server import Manners, serve

    with serve(Manners(takes_token_ids=False, shows_metrics=False, knows_continuous_usage=False)) as running:
        found = findings("--endpoint", running.url)
    sys.path.pop(0)
    assert found["prompts"]["value"].startswith("chat only")
    assert found["/metrics"]["remedy"] == "measure the server itself, not its gateway"
    assert found["token counts"]["state"] == "unknown"
    assert found["KV pool"]["remedy"] == "give --num-gpu-blocks-override and --block-size"


def test_a_server_that_is_not_there_fails_with_the_remedy() -> None:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{place.getsockname()[1]}"
        result = doctor("--endpoint", url)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: server cannot be measured: nothing listens at")
    assert result.stderr.count("\n") == 1
    assert "simpy" in result.stdout  # what is installed is told all the same
