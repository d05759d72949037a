"""What a Tab completes: names that come with capsim. Where none fits, the shell completes files.

Nothing heavy is imported, so that the shell is answered at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from capsim.shipped import PROFILES, SCENARIOS, shipped_names

_HARDWARE = Path(__file__).resolve().parent.parent / "simulator" / "hardware"


def complete_profile(incomplete: str) -> list[str]:
    """Shipped profiles."""
    return _beginning(incomplete, shipped_names(PROFILES))


def complete_scenario(incomplete: str) -> list[str]:
    """Shipped scenarios."""
    return _beginning(incomplete, shipped_names(SCENARIOS))


def complete_gpu(incomplete: str) -> list[str]:
    """Known GPUs, spelt without spaces; of a list with commas the last."""
    before, comma, last = incomplete.rpartition(",")
    names = (gpu["name"].replace(" ", "-") for gpu in _table("gpus"))
    return [f"{before}{comma}{name}" for name in _in_any_case(last, names)]


def complete_model(incomplete: str) -> list[str]:
    """Models whose architecture is known."""
    return _in_any_case(incomplete, _table("models"))


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _in_any_case(incomplete: str, names: Iterable[str]) -> list[str]:
    """Names that are found whatever their case, going on from what was typed: the shell drops others."""
    typed = incomplete.lower()
    return [incomplete + name[len(incomplete) :] for name in names if name.lower().startswith(typed)]


def _table(name: str) -> Any:
    import yaml

    return yaml.safe_load((_HARDWARE / f"{name}.yaml").read_text(encoding="utf-8"))[name]
