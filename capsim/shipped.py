"""The scenarios and profiles that come with capsim."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from capsim.errors import CommandError

if TYPE_CHECKING:
    from simulator.profile import Profile
    from simulator.scenario import Scenario

_PACKAGE = Path(__file__).resolve().parent
# Inside the package in a wheel, beside it in a clone.
SCENARIOS = next(
    (place for place in (_PACKAGE / "scenarios", _PACKAGE.parent / "scenarios") if place.is_dir()), _PACKAGE
)
PROFILES = SCENARIOS / "profiles"


def find_scenario(name: str) -> Scenario:
    """The scenario of a file or a shipped name. Raises `CommandError`, `simulator.scenario.ScenarioError`."""
    from simulator.scenario import Scenario

    return Scenario.read(_find("scenario", name, SCENARIOS))


def find_profile(name: str) -> Profile:
    """The profile of a file or a shipped name. Raises `CommandError`, `simulator.profile.ProfileError`."""
    from simulator.profile import Profile

    return Profile.load(_find("profile", name, PROFILES))


def shipped_names(folder: Path) -> list[str]:
    """Names of the files in one of the folders above, in order."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _find(kind: str, name: str, folder: Path) -> Path:
    if Path(name).is_file():
        return Path(name)
    if Path(name).name == name and (folder / f"{name}.yaml").is_file():
        return folder / f"{name}.yaml"
    shipped = ", ".join(shipped_names(folder))
    hint = f"shipped are {shipped}" if shipped else "give the path of a file"
    raise CommandError(f"{name}: no such {kind}; {hint}")
