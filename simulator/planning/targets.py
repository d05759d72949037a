"""Targets (SLO), such as a ``p99_ttft`` of at most 2,000 ms, and whether a level meets them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from simulator.results.summary import LATENCIES, STATISTICS, Summary
from simulator.yaml_file import KeyProblem, suggestion

STEADY_STATE = "steady state"  # what is missed without one
ERROR_RATE = "error_rate"  # share of the requests that fail
TARGET_NAMES = [f"{statistic}_{latency}" for latency in LATENCIES for statistic in STATISTICS] + [ERROR_RATE]


def check_targets(targets: dict[str, float]) -> dict[str, float]:
    """`targets` by name, if all make sense: milliseconds, and a share for `ERROR_RATE`. Raises `KeyProblem`."""
    for name, target in targets.items():
        if name not in TARGET_NAMES:
            raise KeyProblem(name, f"not a latency with a target; {suggestion(name, TARGET_NAMES)}")
        if name == ERROR_RATE:
            if not 0 <= target < 1:
                raise KeyProblem(name, f"a share of the requests from 0 to 1, 0.01 for 1 %; got {target:g}")
        elif not 0 < target < math.inf:
            raise KeyProblem(name, f"a target must be a positive number of milliseconds, got {target:g}")
    return targets


def parse_targets(text: str) -> dict[str, float]:
    """Targets written ``p99_ttft:2000,p99_itl:100``, in milliseconds. Raises `KeyProblem`."""
    targets: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition(":")
        name = name.strip().lower().replace("-", "_")
        if name in targets:
            raise KeyProblem(name, "has a target already; give it once")
        try:
            targets[name] = float(value)
        except ValueError:
            raise KeyProblem(part.strip(), "a target is written p99_ttft:2000, in milliseconds") from None
    return check_targets(targets)


def join_targets(texts: Iterable[str]) -> dict[str, float]:
    """The targets of several texts, all of which hold together. Raises `KeyProblem`."""
    return parse_targets(",".join(texts))


def target_label(name: str, target: float) -> str:
    """A target as people read it: ``p99_ttft <= 2000 ms``."""
    return f"{name} <= {target:g}{'' if name == ERROR_RATE else ' ms'}"


def targets_label(targets: Mapping[str, float]) -> str:
    """Targets as people read them, in one line."""
    return ", ".join(target_label(name, target) for name, target in targets.items())


def figures(summary: Summary) -> dict[str, float]:
    """Every number that may have a target, in a target's unit: milliseconds, or a share; NaN if it was not seen."""
    return figures_of(summary.flat())


def figures_of(numbers: Mapping[str, float | int | None]) -> dict[str, float]:
    """The same of the numbers of `Summary.flat`."""
    found = {}
    for name in TARGET_NAMES:
        if name != ERROR_RATE:
            seen = numbers[name]
            found[name] = math.nan if seen is None else seen * 1000
    requests = numbers["requests"]
    found[ERROR_RATE] = (numbers["errors"] or 0) / requests if requests else math.nan
    return found


def missed_targets(summary: Summary, targets: Mapping[str, float]) -> list[str]:
    """The names of the targets that a level does not meet; one that was not seen is not met.

    Without a steady state, no level meets any for long: `STEADY_STATE` is then among them.
    """
    missed = missed_of(summary.flat(), targets)
    return [*missed, STEADY_STATE] if targets and summary.state == "no steady state" else missed


def missed_of(numbers: Mapping[str, float | int | None], targets: Mapping[str, float]) -> list[str]:
    """The same of the numbers of `Summary.flat`."""
    found = figures_of(numbers)
    return [name for name, target in targets.items() if not found[name] <= target]


def tightened(targets: Mapping[str, float], factor: float) -> dict[str, float]:
    """The same targets with every bound of time multiplied by `factor`, below 1; an error rate stays as it is."""
    return {name: target * (1.0 if name == ERROR_RATE else factor) for name, target in targets.items()}


def request_bounds(targets: Mapping[str, float]) -> dict[str, float]:
    """What a single request must keep to be served well, in seconds by latency: "ttft", "tpot", "e2el".

    Of several percentiles of one latency the loosest counts, since most requests may lie between the others. Token gaps
    are no property of a request, and a mean bounds none: as for ``vllm bench serve --goodput`` they do not count.
    """
    bounds: dict[str, float] = {}
    for name, target in targets.items():
        statistic, _, latency = name.partition("_")
        if latency in ("ttft", "tpot", "e2el") and statistic != "mean":
            bounds[latency] = max(bounds.get(latency, 0.0), target / 1000)
    return bounds
