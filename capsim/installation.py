"""What is installed beside capsim, and what each optional extra would give."""

from __future__ import annotations

import os
import platform
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from capsim import __version__
from capsim.findings import Finding, State
from capsim.shipped import PROFILES, SCENARIOS, shipped_names

SECTION = "Installed here"
# Extras for users; the others are for those who work on capsim.
EXTRAS = {
    "nvml": "tells this machine's GPU",
    "dask": "optimize --backend dask",
    "ray": "optimize --backend ray",
}
_CLONE = Path(__file__).resolve().parent.parent / "pyproject.toml"


def installed() -> list[Finding]:
    """Python, packages, extras, and what this machine has."""
    needed, extras = _requirements()
    return [
        Finding(SECTION, "capsim", "ok", __version__),
        Finding(SECTION, "Python", "ok", platform.python_version()),
        *(_package(one) for one in needed),
        *(_extra(name, extras[name]) for name in EXTRAS if name in extras),
        Finding(SECTION, "processor cores", "ok", str(os.cpu_count() or 1)),
        _gpu(),
        Finding(SECTION, "shipped profiles", "ok", ", ".join(shipped_names(PROFILES))),
        Finding(SECTION, "shipped scenarios", "ok", ", ".join(shipped_names(SCENARIOS))),
    ]


def _requirements() -> tuple[list[Requirement], dict[str, list[Requirement]]]:
    """What capsim needs, and what each extra adds: from its installation or, in a clone, from its pyproject.toml."""
    try:
        known = metadata.metadata("capsim")
        stated = [Requirement(text) for text in metadata.requires("capsim") or ()]
        extras = known.get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        project = tomllib.loads(_CLONE.read_text(encoding="utf-8"))["project"]
        optional = project["optional-dependencies"]
        return _applying(project["dependencies"]), {name: _applying(texts) for name, texts in optional.items()}
    base = [one for one in stated if _applies(one, "")]
    return base, {name: [one for one in stated if one not in base and _applies(one, name)] for name in extras}


def _applying(texts: Sequence[str]) -> list[Requirement]:
    return [one for one in map(Requirement, texts) if _applies(one, "")]


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _package(needed: Requirement) -> Finding:
    version = _version(needed)
    if version is not None and needed.specifier.contains(version, prereleases=True):
        return Finding(SECTION, needed.name, "ok", version)
    value = "not installed" if version is None else f"{version}, needs {needed.specifier}"
    return Finding(SECTION, needed.name, "broken", value, f"pip install '{needed.name}{needed.specifier}'")


def _extra(name: str, packages: Sequence[Requirement]) -> Finding:
    what, gives = f"extra {name}", EXTRAS[name]
    versions = [f"{one.name} {version}" for one in packages if (version := _version(one))]
    if len(versions) == len(packages):
        return Finding(SECTION, what, "ok", ", ".join(versions))
    return Finding(SECTION, what, "optional", f"not installed; {gives}", f"pip install 'capsim[{name}]'")


def _version(needed: Requirement) -> str | None:
    try:
        return metadata.version(needed.name)
    except metadata.PackageNotFoundError:
        return None


def _gpu() -> Finding:
    from calibration.gpu import read_nvml

    reading = read_nvml()
    state: State = "ok" if reading.gpus else "optional"
    names = ", ".join(gpu.name or "a GPU" for gpu in reading.gpus or ())
    return Finding(SECTION, "NVIDIA GPU", state, names or f"none seen: {reading.reason}")
