"""The README: every block of it runs, in an empty folder, and prints what it shows.

A comment before a block says how: `run: with OPTIONS` adds them to each command that has such options, so that a load
is short; `run: server OPTIONS` starts a server that the later blocks ask; `output of: COMMAND` compares; `not run: WHY`
is for what installs things.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from capsim.cli import app
from capsim.exit_codes import ExitCode

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
SERVER = "http://localhost:8000"  # in the README
SUBCOMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Block:
    """A code block, and the comment before it."""

    note: str
    language: str
    text: str

    @property
    def commands(self) -> list[list[str]]:
        """Words of each command, as a shell splits them."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]

    def told(self, kind: str) -> list[str] | None:
        """The words after the note's `kind`, None where it is none of these."""
        return shlex.split(self.note.removeprefix(kind)) if self.note.startswith(kind) else None


BLOCKS = [
    Block(note or "", language, text)
    for note, language, text in re.findall(r"(?:<!-- ([^\n]*) -->\n)?```(\w*)\n(.*?)```", TEXT, re.DOTALL)
]
INSTALLING = [block for block in BLOCKS if block.note.startswith(("not run:", "test command"))]
STARTING = [block for block in BLOCKS if block.told("run: server") is not None]
SHOWN = [block for block in BLOCKS if block.told("output of:") is not None]
RUN = [block for block in BLOCKS if block not in INSTALLING + STARTING + SHOWN]


@lru_cache  # what is shown has run already
def run(*words: str) -> Result:
    return CliRunner().invoke(app, words[1:], env={"COLUMNS": "80"})


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The server that a block starts, at a free port and with what its note adds."""
    (block,) = STARTING
    (words,) = block.commands
    assert words[0] == "capsim"
    command = [sys.executable, "-m", *words, *(block.told("run: server") or ()), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        yield re.search(r"http://[\d.:]+", running.stdout.readline())[0]  # type: ignore[index]
        running.send_signal(signal.SIGINT)
    assert running.returncode == 0


@pytest.mark.parametrize("block", RUN, ids=lambda block: block.commands[0][1])
def test_a_block_runs_as_it_is(
    block: Block, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert block.language == "sh"
    monkeypatch.chdir(tmp_path)
    # they would take minutes: prompts to 8,192 tokens, and a start of the server that is warm
    monkeypatch.setattr("calibration.sweep_plan.probe_levels", lambda *_: ([], []))
    monkeypatch.setattr("calibration.sweep_plan.warm_up_of", lambda _: ())
    for words in block.commands:
        assert words[0] == "capsim"
        added = _those_it_has(words[1], block.told("run: with") or [])
        asked = request.getfixturevalue("server") if SERVER in words else ""
        result = run(*(word.replace(SERVER, asked) for word in words), *added)
        assert result.exit_code == 0, f"{shlex.join(words)}\n{result.output}"


def _those_it_has(command: str, options: list[str]) -> list[str]:
    """The options, each with its value, that a command takes."""
    known = {name for option in SUBCOMMANDS[command].params for name in option.opts}
    groups: list[list[str]] = []
    for word in options:
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    return [word for group in groups if group[0] in known for word in group]


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: block.note)
def test_what_is_shown_is_what_is_printed(block: Block) -> None:
    """Dots stand for lines that are left out."""
    printed = [line.rstrip() for line in run(*(block.told("output of:") or ())).stdout.splitlines()]
    for piece in block.text.split("...\n"):
        lines = piece.splitlines()
        starts = [place for place in range(len(printed)) if printed[place : place + len(lines)] == lines]
        assert starts, piece
        printed = printed[starts[0] + len(lines) :]


def test_only_what_installs_is_not_run() -> None:
    assert [words[0] for block in INSTALLING for words in block.commands] == ["pip", "pip"]
    assert len(RUN) >= 6


def test_every_command_is_shown_or_named() -> None:
    shown = {words[1] for block in RUN + STARTING for words in block.commands}
    assert set(SUBCOMMANDS) - shown == {"import"}
    assert "`capsim import`" in TEXT


def test_exit_codes_are_those_of_the_program() -> None:
    table = re.search(r"## Exit codes\n\n.*?\n.*?\n(.*?)\n\n", TEXT, re.DOTALL)
    assert table is not None
    assert table[1].splitlines() == [f"| {code:d} | {code.meaning} |" for code in ExitCode]


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", TEXT):
        assert target.startswith("https://") or (ROOT / target).exists(), target
