"""Levels of load from the few words in which people state them: ``1,2,4,8`` clients, ``512/128:0.7`` tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence

from simulator.workload import ClosedLoop, Length, OpenLoop, Shape, Workload

NUM_PROMPTS = 1000  # vLLM bench's default


class LoadError(ValueError):
    """A load that makes no sense. The message is one line."""


def plan_levels(
    shapes: Sequence[Shape],
    *,
    concurrency: Sequence[int] | None = None,
    request_rate: Sequence[float] | None = None,
    burstiness: float = 1.0,
    num_prompts: int | None = None,
    requests_per_client: int | None = None,
    seed: int = 0,
) -> list[Workload]:
    """One workload for each of `concurrency` (closed loop) or of `request_rate` (open loop, requests a second).

    Every level has `num_prompts` requests, or in a closed loop `requests_per_client` times its clients.
    Raises `LoadError`.
    """
    if (concurrency is None) == (request_rate is None):
        raise LoadError("a load needs either concurrency or request_rate, and not both")
    if requests_per_client is not None and (num_prompts is not None or concurrency is None):
        raise LoadError("requests_per_client goes with concurrency, and not with num_prompts")
    try:
        arrivals = [ClosedLoop(clients) for clients in concurrency or ()] + [
            OpenLoop(rate, burstiness) for rate in request_rate or ()
        ]
        if not arrivals:
            raise LoadError("the list of levels is empty")
        return [
            Workload(kind, tuple(shapes), _requests(kind, num_prompts, requests_per_client), seed) for kind in arrivals
        ]
    except ValueError as problem:
        raise LoadError(str(problem)) from None


def uniform_shape(input_len: Length, output_len: Length, range_ratio: float = 0.0) -> Shape:
    """One kind of request. `range_ratio` spreads fixed lengths as vLLM bench's ``--random-range-ratio`` does."""
    if not range_ratio:
        return Shape(input_len, output_len)
    if input_len.low != input_len.high or output_len.low != output_len.high:
        raise LoadError("range_ratio spreads a fixed length; give either it or low and high")
    try:
        return Shape(Length.jittered(input_len.low, range_ratio), Length.jittered(output_len.low, range_ratio))
    except ValueError as problem:
        raise LoadError(str(problem)) from None


def parse_shape(text: str) -> Shape:
    """A shape written INPUT/OUTPUT or INPUT/OUTPUT:WEIGHT, lengths as 512 or 512-1024. Raises `LoadError`."""
    found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*/\s*(\d+)(?:-(\d+))?\s*(?::\s*([0-9.eE+-]+)\s*)?", text)
    try:
        if not found:
            raise ValueError("not of the form")
        low_in, high_in, low_out, high_out, weight = found.groups()
        return Shape(
            Length(int(low_in), int(high_in or low_in)),
            Length(int(low_out), int(high_out or low_out)),
            float(weight) if weight else 1.0,
        )
    except ValueError as problem:
        reason = f": {problem}" if found else ""
        raise LoadError(f"{text!r} is not a shape such as 512/128 or 512-1024/128:0.7{reason}") from None


def _requests(arrivals: ClosedLoop | OpenLoop, num_prompts: int | None, requests_per_client: int | None) -> int:
    if requests_per_client is not None and isinstance(arrivals, ClosedLoop):
        return requests_per_client * arrivals.concurrency
    return NUM_PROMPTS if num_prompts is None else num_prompts
