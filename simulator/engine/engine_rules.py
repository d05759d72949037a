"""Scheduler rules that differ between versions of vLLM.

Sources: vLLM 0.11.0, 0.27.1 and 0.32.0, `v1/core/sched/scheduler.py`, `async_scheduler.py` and `v1/core/block_pool.py`.
Not modelled: in 0.11 a priority victim that was scheduled already in the same step stays in that step.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineRules:
    """What a version does; each is a rule that newer versions follow unless said otherwise.

    Attributes
        reserves_full_sequence: a request is admitted only if its whole known sequence fits the free blocks, less a
            watermark
        oversized_prompt_blocks: without chunked prefill, a prompt over the step's budget blocks the queue, which 0.11
            skips
        lone_request_is_exempt: the long-prefill threshold does not hold for a request alone in the engine
        corrects_index_always: a priority victim ahead in the running list moves the loop back even if it had no tokens
        stops_in_time: asynchronous scheduling schedules nobody whose last token is in flight
        reuses_plain_blocks_first: freed blocks without findable content go to the head of the free list
    """

    reserves_full_sequence: bool = True
    oversized_prompt_blocks: bool = True
    lone_request_is_exempt: bool = True
    corrects_index_always: bool = True
    stops_in_time: bool = True
    reuses_plain_blocks_first: bool = True


KNOWN = {
    (0, 11): EngineRules(
        reserves_full_sequence=False,
        oversized_prompt_blocks=False,
        lone_request_is_exempt=False,
        corrects_index_always=False,
        stops_in_time=False,
        reuses_plain_blocks_first=False,
    ),
    (0, 27): EngineRules(lone_request_is_exempt=False, corrects_index_always=False),
    (0, 32): EngineRules(),
}


def rules_of(engine_version: str) -> EngineRules:
    """The rules of a version such as "0.32.0"; those of the newest known one where it is not known."""
    return KNOWN[_stand_in(engine_version)]


def version_note(engine_version: str) -> str:
    """A sentence where a version is not known, else empty."""
    asked, taken = _parse(engine_version), _stand_in(engine_version)
    if asked == taken:
        return ""
    return f"the scheduler of vLLM {engine_version} is not known; simulated with the rules of {taken[0]}.{taken[1]}"


def _stand_in(engine_version: str) -> tuple[int, int]:
    asked = _parse(engine_version)
    if asked in KNOWN:
        return asked
    return min(KNOWN) if asked < min(KNOWN) else max(KNOWN)


def _parse(engine_version: str) -> tuple[int, int]:
    parts = engine_version.split(".")[:2]
    try:
        return int(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        return max(KNOWN)
