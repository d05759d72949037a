"""The lock file holds what pyproject.toml asks for, each with its hashes, and the code calls nothing that runs data."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCK = (ROOT / "requirements-ci.lock").read_text("utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PACKAGES = ("capsim", "calibration", "simulator")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


# --- the lock file


def pins() -> Iterator[tuple[Requirement, list[str]]]:
    """Every package of the lock file with its hashes."""
    for entry in re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", LOCK, flags=re.MULTILINE)).splitlines():
        requirement, *hashes = entry.split(" --hash=")
        yield Requirement(requirement), [one.strip() for one in hashes]


def asked_for(extra: str) -> Iterator[Requirement]:
    """What an extra asks for, through the extras that it names."""
    for text in PROJECT["optional-dependencies"][extra]:
        requirement = Requirement(text)
        if requirement.name == "capsim":
            for other in requirement.extras:
                yield from asked_for(other)
        else:
            yield requirement


def test_every_package_is_pinned_with_hashes() -> None:
    found = list(pins())
    assert len(found) > 100
    for requirement, hashes in found:
        assert re.fullmatch(r"==[\w.!+-]+", str(requirement.specifier)), requirement
        assert hashes, requirement
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in hashes), requirement


def test_it_names_no_place_to_fetch_from() -> None:
    assert not re.search(r"://|--(extra-)?index|--find-links|--trusted-host|^-e|@ ", LOCK, re.MULTILINE)


@pytest.mark.parametrize("minor", [11, 12, 13])
def test_it_holds_what_the_project_asks_for(minor: int) -> None:
    here = {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.9", "extra": ""}
    known = {}
    for requirement, _ in pins():
        if requirement.marker is None or requirement.marker.evaluate(here):
            assert canonicalize_name(requirement.name) not in known, "one version of each"
            known[canonicalize_name(requirement.name)] = str(requirement.specifier).removeprefix("==")
    for wanted in [*map(Requirement, PROJECT["dependencies"]), *asked_for("ci")]:
        assert wanted.specifier.contains(known[canonicalize_name(wanted.name)]), wanted


@pytest.mark.parametrize(
    ("found", "code", "words"),
    [
        ([{"name": "a", "skip_reason": "unknown"}], 0, "not audited: the index tells of none of 1 packages"),
        ([{"name": "a", "version": "1", "vulns": []}], 0, "1 of 1 packages audited: 0 known"),
        ([{"name": "a", "version": "1", "vulns": [{"id": "X-1", "fix_versions": []}]}], 0, "a 1: X-1, no fix yet"),
        ([{"name": "a", "version": "1", "vulns": [{"id": "X-1", "fix_versions": ["2"]}]}], 1, "X-1, fixed in 2"),
    ],
)
def test_the_audit_fails_for_what_an_upgrade_mends(
    found: list[dict[str, Any]], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("audit", ROOT / ".ci" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    audit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(audit)
    assert audit.judged(found) == code
    assert words in capsys.readouterr().out


# --- the code

# what runs data or text as code, or trusts its form: by the name that is called
FORBIDDEN = {
    *("eval", "exec", "compile", "__import__", "execfile", "breakpoint"),
    *("os.system", "os.popen", "os.execv", "os.execvp", "os.spawnv", "pty.spawn"),
    *("tempfile.mktemp", "yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all", "yaml.full_load_all"),
    *("pd.read_pickle", "pd.read_hdf", "joblib.load", "np.fromregex", "marshal.loads", "shelve.open"),
}
PICKLE = {"calibration/clients.py", "calibration/client_processes.py"}  # between our own processes, by pipe
XML = {"capsim/figures/style.py"}  # of what matplotlib has just written
SUBPROCESS = {"calibration/client_processes.py"}
IMPORTERS = {"pickle": PICKLE, "xml": XML, "subprocess": SUBPROCESS}
NEVER = {"marshal", "shelve", "dill", "cloudpickle", "tarfile", "zipfile", "telnetlib", "ftplib", "ctypes", "code"}


def called(node: ast.Call) -> str:
    """The name that is called: ``yaml.load``."""
    parts = []
    target: ast.expr = node.func
    while isinstance(target, ast.Attribute):
        parts.append(target.attr)
        target = target.value
    return ".".join([target.id, *reversed(parts)]) if isinstance(target, ast.Name) else ".".join(reversed(parts))


def safe_loaders(tree: ast.AST) -> set[str]:
    """Loaders of YAML that make plain values only."""
    own = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {node.name for node in own if [ast.unparse(base) for base in node.bases] == ["yaml.SafeLoader"]}


def imported(tree: ast.AST) -> set[str]:
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_runs_data_as_code(path: Path) -> None:
    name, tree = path.relative_to(ROOT).as_posix(), ast.parse(path.read_text("utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not {called(node) for node in calls} & FORBIDDEN
    loaders = {ast.unparse(node.args[1]) for node in calls if called(node) in ("yaml.load", "yaml.load_all")}
    assert loaders <= safe_loaders(tree)
    options = {(keyword.arg, ast.unparse(keyword.value)) for node in calls for keyword in node.keywords}
    assert not [option for option in options if option[0] in ("shell", "allow_pickle")]
    assert not imported(tree) & NEVER
    for module, allowed in IMPORTERS.items():
        assert module not in imported(tree) or name in allowed, module
    modules = [ast.unparse(node.args[0]) for node in calls if called(node) == "importlib.import_module"]
    assert all(text.startswith("'") for text in modules), "modules are named in the code"


def test_these_rules_find_what_they_forbid() -> None:
    tree = ast.parse("import pickle as p, os\nfrom xml import sax\nyaml.full_load(x)\nos.system('a')\neval('1')")
    assert imported(tree) == {"pickle", "os", "xml"}
    assert {called(node) for node in ast.walk(tree) if isinstance(node, ast.Call)} <= FORBIDDEN
