"""What a report says of the server, of its memory, of the words it uses, and of how far to trust it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from capsim.curves import SOURCES, Family
from capsim.doubts import too_few_samples, unsteady_levels
from capsim.report.server import Server
from simulator.profile import Profile
from simulator.results.run import Run

GIB = 2**30
MEMORY = ("kv_tokens", "num_gpu_blocks", "block_size", "gpu_memory_utilization", "kv_cache_memory_bytes",
          "kv_bytes_per_token", "cache_dtype", "swap_space", "num_cpu_blocks")  # fmt: skip
FIRST = ("model", "gpu", "engine", "engine_version", "profile", "max_num_seqs", "max_num_batched_tokens",
         "max_model_len")  # fmt: skip


class Fact(NamedTuple):
    """A name and what it is."""

    name: str
    text: str


def server_facts(server: Server) -> list[Fact]:
    """All that the runs say of the server but its memory, what matters most first."""
    names = [name for name in FIRST if name in server.facts]
    names += [name for name in server.facts if name not in FIRST and name not in MEMORY]
    return [Fact(name, _text(server.facts[name])) for name in names]


def memory_facts(server: Server, main: Family) -> list[Fact]:
    """The KV pool and the ceilings it makes."""
    found = [Fact(name, _text(server.facts[name])) for name in MEMORY if name in server.facts]
    per_token = server.profile.kv_bytes_per_token if server.profile else server.facts.get("kv_bytes_per_token")
    if server.pool and isinstance(per_token, int):
        found.append(Fact("KV pool", f"{server.pool * per_token / GIB:.2f} GiB, {per_token:,} bytes a token"))
    ceilings = server.ceilings(main)
    if ceilings is not None:
        found += [
            Fact("ceiling by slots", f"{ceilings.slots} requests (--max-num-seqs)"),
            Fact("ceiling by KV pool, full length", f"{ceilings.kv_full_length} requests"),
            Fact("ceiling by KV pool, on average", f"{ceilings.kv_average} requests at a steady mix of ages"),
            Fact(
                "tokens of a request", f"{ceilings.full_tokens:,.0f} at its end, {ceilings.held_tokens:,.0f} on average"
            ),
        ]
    return found


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items())
    return str(value)


def definitions() -> list[Fact]:
    """The words of the page."""
    return [
        Fact("TTFT", "time to first token: first token minus send"),
        Fact("ITL", "inter-token latency: the gap between two tokens of a request, pooled over all requests"),
        Fact("TPOT", "time per output token: (E2EL - TTFT) / (output tokens - 1), one value a request"),
        Fact("E2EL", "end-to-end latency: last token minus send"),
        Fact("output tok/s", "output tokens of completed requests over the duration of the level"),
        Fact("requests in flight", "requests between send and last token, mean over time"),
        Fact("tokens in flight", "prompt and generated tokens of all running requests, mean over time"),
        Fact("p50, p90, p99", "percentiles, linearly interpolated as vllm bench serve's"),
        Fact("scaling efficiency", "output tok/s over what the lowest level would give if it scaled with the load"),
        Fact("knee", "the level where output tok/s over mean E2EL is highest (Kleinrock's power)"),
        Fact("C=8", "a closed loop of 8 clients, each of which sends its next request when it has its answer"),
        Fact("2.5/s", "an open loop: requests arrive at 2.5 a second, whatever the server does"),
        Fact("90 % interval", "where 9 of 10 measurements should lie, by the profile's own errors and by chance"),
        Fact("ceiling", "requests that fit at once: by slots, and by the KV pool if all are at their full length"),
    ]


def trust(runs: Sequence[Run], server: Server, found: Sequence[Family], names: Mapping[str, str]) -> list[str]:
    """Where the numbers come from, and what a reader must know before relying on them."""
    return [
        *_origins(runs, names),
        *_repeats(found),
        *_left_out(server, found),
        *_of_profile(server, runs),
        *_doubts(found),
        *_notes(found),
    ]


def _origins(runs: Sequence[Run], names: Mapping[str, str]) -> Iterator[str]:
    for run in runs:
        source = SOURCES[run.source]
        sent = sum(len(level.requests) for level in run.levels)
        failed = sent - sum(len(level.completed) for level in run.levels)
        when = f", started {run.started_at}" if run.started_at else ""
        name = f" ({names[source]})" if source in names else ""
        levels = f"{len(run.levels)} level{'s' if len(run.levels) != 1 else ''}"
        yield f"{source.capitalize()}{name}: {levels}, {sent:,} requests, {failed:,} failed{when}."


def _repeats(found: Sequence[Family]) -> Iterator[str]:
    if any(point.repeats for family in found for curve in family.curves for point in curve.points):
        yield "Levels that were measured several times are shown as one, all their requests taken together."
    if len(found) > 1:
        yield f"The conclusion and the SLO table are about one kind of load: {found[0].name}."


def _left_out(server: Server, found: Sequence[Family]) -> Iterator[str]:
    seen = (point.summary.peak_kv_tokens for family in found for curve in family.curves for point in curve.points)
    if server.pool is None and all(math.isnan(peak) for peak in seen):
        yield "The run tells neither the KV pool's size nor its use, so the figure of it is left out."


def _of_profile(server: Server, runs: Sequence[Run]) -> Iterator[str]:
    profile = server.profile
    if profile is None:
        if any(run.source == "simulated" for run in runs):
            yield "The profile behind the prediction was not given: what it assumes and how it errs is not said here."
        return
    origin = profile.provenance
    made = ", ".join(part for part in (origin.source, origin.created) if part)
    yield f"Profile {profile.name}{f': {made}' if made else ''}."
    yield from _errors(profile)
    yield from (f"Assumed: {sentence}" for sentence in profile.assumed)


def _errors(profile: Profile) -> Iterator[str]:
    for title, levels in (("levels that were fitted", profile.fit), ("levels kept out of the fit", profile.hold_out)):
        errors = [(abs(value), name, one.level) for one in levels for name, value in one.errors.items()]
        known = sorted(one for one in errors if math.isfinite(one[0]))
        if known:
            size, name, level = known[-1]
            yield f"Its error on {title}: median {known[len(known) // 2][0]:.1%}, largest {size:.1%} ({name}, {level})."


def _doubts(found: Sequence[Family]) -> Iterator[str]:
    """Of which part of a level its figures are, which percentiles are of too few requests, what has no steady state."""
    yield "Figures are of whole levels, start and end included, as vllm bench serve counts them."
    for family in found:
        for curve in family.curves:
            labels, summaries = [point.label for point in curve.points], [point.summary for point in curve.points]
            loads = [point.level.workload for point in curve.points]
            for sentence in (too_few_samples(labels, summaries), *unsteady_levels(labels, loads, summaries)):
                if sentence:
                    yield f"{curve.source.capitalize()}: {sentence.removesuffix('.')}."


def _notes(found: Sequence[Family]) -> Iterator[str]:
    """What levels say against themselves; levels that say the same share a sentence."""
    said: dict[tuple[str, str], list[str]] = {}
    for family in found:
        for curve in family.curves:
            for point in curve.points:
                if point.level.notes:
                    said.setdefault((curve.source, "; ".join(point.level.notes)), []).append(point.label)
    for (source, notes), levels in said.items():
        outside = "outside the measured range: " if source == "predicted" else ""
        yield f"* {', '.join(dict.fromkeys(levels))}, {source}: {outside}{notes}."
