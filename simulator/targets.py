"""Latency targets (SLO), such as ``p99_ttft`` of at most 2,000 ms, and whether a level meets them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from simulator.summary import LATENCIES, PERCENTILES, Summary
from simulator.yaml_file import KeyProblem, suggestion

TARGET_NAMES = [
    f"{statistic}_{latency}" for latency in LATENCIES for statistic in ("mean", *(f"p{rank}" for rank in PERCENTILES))
]


def check_targets(targets: dict[str, float]) -> dict[str, float]:
    """`targets`, in milliseconds by name, if all make sense. Raises `KeyProblem`."""
    for name, target in targets.items():
        if name not in TARGET_NAMES:
            raise KeyProblem(name, f"not a latency with a target; {suggestion(name, TARGET_NAMES)}")
        if not 0 < target < math.inf:
            raise KeyProblem(name, f"a target must be a positive number of milliseconds, got {target:g}")
    return targets


def parse_targets(text: str) -> dict[str, float]:
    """Targets written ``p99_ttft:2000,p99_itl:100``, in milliseconds. Raises `KeyProblem`."""
    targets = {}
    for part in text.split(","):
        name, _, value = part.partition(":")
        try:
            targets[name.strip()] = float(value)
        except ValueError:
            raise KeyProblem(part.strip(), "a target is written p99_ttft:2000, in milliseconds") from None
    return check_targets(targets)


def missed_targets(summary: Summary, targets: Mapping[str, float]) -> list[str]:
    """The names of the targets that a level does not meet; one that was not seen is not met."""
    numbers = summary.flat()
    return [name for name, target in targets.items() if not (numbers[name] or math.nan) * 1000 <= target]
