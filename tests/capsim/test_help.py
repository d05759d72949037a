"""Help: short, grouped, 80 columns, and an example for every command that its own parser takes."""

from __future__ import annotations

import shlex
from functools import lru_cache
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from capsim.cli import COMMANDS, app
from capsim.exit_codes import ExitCode

EXAMPLES = {example.split()[1]: example for commands in COMMANDS.values() for _, example in commands}
SUBCOMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
WITHOUT_TABLES = {"report", "emulate"}


@lru_cache
def help_of(*command: str) -> Result:
    return CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})


def test_commands_stand_in_groups_and_none_is_left_out() -> None:
    text = help_of().output
    assert all(f" {group} " in text for group in COMMANDS)
    assert "─ Commands ─" not in text
    assert sorted(EXAMPLES) == sorted(SUBCOMMANDS)


def test_exit_codes_are_told() -> None:
    lines = [line.strip() for line in help_of().output.splitlines()]
    for code in ExitCode:
        assert f"{code:d} {code.meaning.replace('`', '')}" in lines


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_shown_whole_and_can_be_run(name: str) -> None:
    lines = EXAMPLES[name].splitlines()
    shown = [line.rstrip()[1:] for line in help_of(name).output.splitlines() if line.startswith(" ")]
    place = shown.index("Example:")
    assert shown[place + 1 : place + 1 + len(lines)] == lines
    program, command, *arguments = shlex.split(EXAMPLES[name].replace("\\\n", " "))  # as a shell joins lines
    assert (program, command) == ("capsim", name)
    SUBCOMMANDS[name].make_context(name, arguments)  # refuses an option that does not exist


@pytest.mark.parametrize("name", EXAMPLES)
def test_help_fits_80_columns(name: str) -> None:
    text = help_of(name).output
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_prints_a_table_prints_json_and_csv_too(name: str) -> None:
    options = [option for command in SUBCOMMANDS[name].params for option in command.opts]
    assert ({"--json", "--csv"} <= set(options)) == (name not in WITHOUT_TABLES)
