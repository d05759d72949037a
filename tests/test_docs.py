"""The documentation names only what exists: commands, options, scenarios, modules, paths, links; and its code runs."""

from __future__ import annotations

import importlib.util
import re
import shlex
from dataclasses import fields
from functools import cache
from pathlib import Path
from pydoc import locate
from typing import Any

import pytest
import typer
import yaml

from capsim.cli import app, canonical_name
from capsim.shipped import PROFILES, SCENARIOS, find_scenario
from simulator.engine.engine_rules import KNOWN, EngineRules
from simulator.engine.step_time import HostTime, StepTime
from simulator.flags.serve_flags import find_flag
from simulator.hardware.other_gpu import DOUBT
from simulator.loads.levels import parse_shapes
from simulator.planning.targets import parse_targets

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(ROOT)): path for path in [*sorted(DOCS.rglob("*.md")), ROOT / "CONTRIBUTING.md"]}
FOLDERS = ("capsim", "simulator", "calibration", "tests", "docs", "benchmarks", "scenarios", "notebooks", ".ci")
OF_OTHER_TOOLS = {"--strict", "--save-detailed", "--save-result"}  # of mkdocs and vllm bench

every_page = pytest.mark.parametrize("page", PAGES)


@cache
def text_of(path: Path) -> str:
    """A page with what it includes."""
    return re.sub(r'--8<-- "(.+)"', lambda found: (ROOT / found[1]).read_text("utf-8"), path.read_text("utf-8"))


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page].read_text("utf-8"), re.DOTALL | re.MULTILINE)


def prose(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", PAGES[page].read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def inline_code(page: str) -> list[str]:
    return re.findall(r"(?<![`$])`([^`\n]+)`(?![`$])", prose(page))


def shell_lines(page: str) -> list[list[str]]:
    whole = "\n".join(blocks(page, "sh")).replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in whole.splitlines() if line.strip()]


@cache
def group() -> Any:
    return typer.main.get_command(app)


def parsed(words: list[str]) -> Any:
    """What the command line makes of `words`, without running it. Raises what it raises for wrong usage."""
    commands = group()
    parent = commands.context_class(commands, info_name="capsim", **commands.context_settings)
    name, *arguments = words
    assert name in commands.commands, f"capsim has no command {name}"
    return commands.commands[name].make_context(name, arguments, parent=parent)


# --- what a reader types


@every_page
def test_every_command_line_is_one_that_capsim_takes(page: str) -> None:
    for words in shell_lines(page):
        if words[0] != "capsim":
            continue
        given = parsed(words[1:]).params
        named = given.get("profile")
        assert named is None or str(named).endswith(".yaml") or (PROFILES / f"{named}.yaml").is_file()
        scenario = given.get("scenario") if words[1] == "simulate" else None
        assert scenario is None or (SCENARIOS / f"{scenario}.yaml").is_file()
        for targets in [given["slo"]] if isinstance(given.get("slo"), str) else given.get("slo") or ():
            assert parse_targets(targets)
        assert given.get("shapes") is None or parse_shapes(given["shapes"])


@every_page
def test_modules_and_scripts_in_command_lines_exist(page: str) -> None:
    for words in shell_lines(page):
        if words[:2] == ["python", "-m"] and words[2] != "venv":
            assert importlib.util.find_spec(words[2]), words
        assert "/" not in words[0] or (ROOT / words[0]).is_file(), words


@every_page
def test_commands_and_options_in_the_text_exist(page: str) -> None:
    commands = group().commands
    options = {name for command in commands.values() for param in command.params for name in param.opts} | {"--help"}
    for code in inline_code(page):
        if code.startswith("capsim "):
            name, *arguments = shlex.split(code)[1:]
            assert name.startswith("--") or name in commands, code
            own = {option for param in commands[name].params for option in param.opts} if name in commands else options
            assert all(word in own for word in arguments if word.startswith("--")), code
        if code.startswith("--"):
            option = code.split()[0].split("=")[0]
            canonical = "--" + canonical_name(option.removeprefix("--"))
            assert canonical in options | OF_OTHER_TOOLS or find_flag(option) is not None, code


def test_the_first_page_leads_to_every_command() -> None:
    first = PAGES["docs/index.md"].read_text("utf-8")
    missing = [name for name in group().commands if f"`capsim {name}`" not in first]
    assert not missing


# --- code


@every_page
def test_python_in_the_pages_runs(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for code in blocks(page, "python"):
        exec(compile(code, page, "exec"), {})


@every_page
def test_yaml_in_the_pages_is_a_scenario(page: str, tmp_path: Path) -> None:
    for code in blocks(page, "yaml"):
        file = tmp_path / "scenario.yaml"
        file.write_text(code, "utf-8")
        scenario = find_scenario(str(file))
        assert scenario.workloads()


@every_page
def test_documented_names_exist(page: str) -> None:
    for name in re.findall(r"^::: ([\w.]+)$", PAGES[page].read_text("utf-8"), re.MULTILINE):
        found: Any = locate(name)
        assert found is not None, name
        assert found.__doc__, name


@every_page
def test_paths_in_the_text_exist(page: str) -> None:
    for code in inline_code(page):
        if re.fullmatch(rf"({'|'.join(map(re.escape, FOLDERS))})/[\w./-]*", code):
            assert (ROOT / code).exists(), code


# --- links


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as Python-Markdown names them, and those of documented names."""
    text = re.sub(r"^```.*?^```$", "", text_of(path), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}
    return slugs | set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))


@every_page
def test_links_within_the_documentation_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        path = (PAGES[page].parent / name).resolve() if name else PAGES[page]
        assert path.is_file(), target
        assert not anchor or anchor in anchors(path), target


def test_every_page_is_in_the_navigation_once() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    listed: list[str] = []

    def collect(entry: object) -> None:
        if isinstance(entry, str):
            listed.append(entry)
        else:
            for part in entry if isinstance(entry, list) else entry.values():  # type: ignore[attr-defined]
                collect(part)

    collect(site["nav"])
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


# --- what the pages repeat of the code


def test_the_model_page_names_every_coefficient() -> None:
    page = PAGES["docs/model.md"].read_text("utf-8")
    missing = [field.name for kind in (StepTime, HostTime) for field in fields(kind) if f"`{field.name}`" not in page]
    assert not missing


def test_the_rules_by_version_are_those_of_the_code() -> None:
    page = PAGES["docs/model.md"].read_text("utf-8")
    table = page[page.index("### Rules by version") :].split("\n\n")[1].splitlines()
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
    assert rows[0][1:] == [f"{major}.{minor}" for major, minor in KNOWN]
    told = sorted(tuple(cell == "yes" for cell in row[1:]) for row in rows[2:])
    known = sorted(tuple(getattr(rules, field.name) for rules in KNOWN.values()) for field in fields(EngineRules))
    assert told == known


def test_the_doubts_of_another_gpu_are_those_of_the_code() -> None:
    page = PAGES["docs/model.md"].read_text("utf-8")
    told = re.findall(r"^\| (`\w+`|host).* \| (\d+) % \|$", page, re.MULTILINE)
    names = {"host": "per_request"}
    assert len(told) == 6
    for name, percent in told:
        assert int(percent) == round(100 * DOUBT[names.get(name, name.strip("`"))])
