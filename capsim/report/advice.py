"""What limits the levels of a report, and which flag to change next: by simulation where a profile is known."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from capsim.curves import Family, Point
from capsim.report.server import Server
from capsim.tables import digits
from capsim.terminal import printable
from simulator.engine.engine_flags import EngineFlags, FlagError
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.planning.ceilings import Ceilings
from simulator.planning.limits import Limits, Phase, phase_of, what_limits
from simulator.planning.operating_point import power
from simulator.planning.targets import figures, missed_targets
from simulator.results.run import Level
from simulator.results.summary import Summary, summarize

BUDGETS = (512, 1024, 2048, 4096, 8192, 16384)  # tokens of a step that are tried
WORTH = 0.97  # a change is worth it when it makes the worst figure at most this share of what it was
MUCH_WORSE = 1.25  # times a tail latency
FULL = 0.95  # of the KV pool
TAIL = 3.0  # p99 over p50 of the token gaps, from which on the tail is what people feel


@dataclass(frozen=True)
class Advice:
    """Sentences on what limits and what to change; `command` can be pasted into a terminal, empty for none."""

    limits: str
    change: str
    command: str


def advise(server: Server, family: Family, point: Point, targets: Mapping[str, float]) -> Advice:
    """What limits the level after the recommended one, or that one if it is the last, and how to get further."""
    points = family.first.points
    place = points.index(point)
    looked_at = points[min(place + 1, len(points) - 1)]
    if server.times is None or server.flags is None:
        return _without_times(server, family, looked_at)
    return _Simulated(server, server.flags, server.times, looked_at, targets).advice(point)


# --- by simulation


@dataclass(frozen=True)
class _Change:
    text: str
    flags: EngineFlags
    summary: Summary
    badness: float  # see `_badness`


class _Simulated:
    """One level, simulated under the server's flags and under others."""

    def __init__(
        self,
        server: Server,
        flags: EngineFlags,
        times: tuple[StepTime, HostTime],
        point: Point,
        targets: Mapping[str, float],
    ) -> None:
        self.server, self.flags, self.times, self.point = server, flags, times, point
        self.targets = targets
        self.level = self._play(flags)
        self.summary = summarize(self.level)
        self.limits = self._limits()

    def advice(self, recommended: Point) -> Advice:
        label = self.point.label
        limits = f"At {label}, {self.limits.sentence()}."
        harmless = (change for change in self._changes() if self._is_harmless(change.summary))
        best = min(harmless, key=lambda change: change.badness, default=None)
        if best is None or best.badness > WORTH * self._badness(self.summary):
            return Advice(limits, self._no_change(), self._capacity_line())
        return Advice(limits, self._sentence(best, recommended), serve_line(self.server, best.flags))

    def _play(self, flags: EngineFlags) -> Level:
        return simulate_level(self.point.level.workload, flags, *self.times)

    def _limits(self) -> Limits:
        missed = missed_targets(self.summary, self.targets)
        phase: Phase = phase_of(missed[0]) if missed else "e2el"
        return what_limits(self.level, self.flags, *self.times, phase)

    def _changes(self) -> Iterator[_Change]:
        """Other token budgets, and twice the slots where requests wait for one."""
        tried = [
            ("max_num_batched_tokens", budget) for budget in BUDGETS if budget != self.flags.max_num_batched_tokens
        ]
        if self.limits.name == "slots":
            tried.append(("max_num_seqs", 2 * self.flags.max_num_seqs))
        for name, value in tried:
            try:
                flags = self.flags.changed(**{name: value})
            except FlagError:
                continue
            summary = summarize(self._play(flags))
            yield _Change(f"--{name.replace('_', '-')} {value}", flags, summary, self._badness(summary))

    def _badness(self, summary: Summary) -> float:
        """The figure that is farthest off its target, over that target; without targets, latency over throughput."""
        if not self.targets:
            return 1 / (power(summary.flat()) or math.nan)
        seen = figures(summary)
        ratios = [seen[name] / target if target else math.inf * seen[name] for name, target in self.targets.items()]
        return max((0.0 if math.isnan(ratio) else ratio for ratio in ratios), default=0.0)

    def _is_harmless(self, changed: Summary) -> bool:
        """Whether the SLO is met, or no tail and no throughput gets much worse for it."""
        if self.targets and not missed_targets(changed, self.targets):
            return True
        now, then = self.summary, changed
        slower = ((now.ttft.p99, then.ttft.p99), (now.itl.p99, then.itl.p99))
        less = then.output_throughput * MUCH_WORSE < now.output_throughput
        return not less and not any(after > MUCH_WORSE * before for before, after in slower)

    def _sentence(self, change: _Change, recommended: Point) -> str:
        names = ["output_throughput", *(name for name in ("p99_ttft", "p99_itl") if name not in self.targets)]
        shown = [*(name for name in self.targets if name in self.summary.flat()), *names]
        told = ", ".join(self._from_to(name, change) for name in dict.fromkeys(shown))
        before = f"{self.flags.max_num_batched_tokens}" if "batched" in change.text else f"{self.flags.max_num_seqs}"
        met = ""
        if self.targets:
            missed = missed_targets(change.summary, self.targets)
            met = f" The SLO is then still missed: {', '.join(missed)}." if missed else " The SLO is then met."
            met = met if self.point is not recommended else ""
        known, load = self.server.profile, self.point.level.workload
        trust = known.outside_range(load, change.flags) if known else []
        warning = f" Outside the measured range: {'; '.join(trust)}." if trust else ""
        return f"Try {change.text} (now {before}). Predicted at {self.point.label}: {told}.{met}{warning}"

    def _from_to(self, name: str, change: _Change) -> str:
        factor, title = (1, "output tok/s") if name == "output_throughput" else (1000, _latency_name(name))
        one, two = (numbers[name] for numbers in (self.summary.flat(), change.summary.flat()))
        return f"{title} {digits(float(one or 0) * factor)} → {digits(float(two or 0) * factor)}"

    def _no_change(self) -> str:
        better = f"brings {self.point.label} closer to the SLO" if self.targets else f"makes {self.point.label} better"
        budgets = f"No step token budget from {BUDGETS[0]:,} to {BUDGETS[-1]:,} {better}"
        others = {
            "kv_pool": "a larger KV pool would: see capsim memory",
            "memory_bandwidth": "a GPU with more memory bandwidth, or a second replica, would",
            "compute": "a faster GPU, shorter prompts, cached prefixes, or a second replica would",
        }
        return f"{budgets}; {others.get(self.limits.name, 'a faster GPU or a second replica would')}."

    def _capacity_line(self) -> str:
        """How to find the highest level between those that were tried."""
        load = self.point.level.workload
        slo = ",".join(f"{name}:{value:g}" for name, value in self.targets.items()) or "p99_ttft:2000"
        shapes = shlex.quote(load.lengths_label.replace(" ", ","))
        profile = shlex.quote(self.server.profile_name or self.server.text("profile") or "FILE")
        by = " --by rate" if math.isfinite(load.request_rate or math.inf) else ""
        return f"capsim capacity --profile {profile} --slo {slo} --shapes {shapes}{by}"


def _latency_name(name: str) -> str:
    statistic, latency = name.split("_")
    return f"{statistic} {latency.upper()} ms"


def serve_line(server: Server, flags: EngineFlags) -> str:
    """How to start the server with `flags`; what the runs do not tell is left to vLLM."""
    model = server.text("model")
    model = model if model and printable(model) == model and "\n" not in model else "MODEL"  # it will be pasted
    parts = ["vllm serve", shlex.quote(model), f"--max-num-seqs {flags.max_num_seqs}"]
    parts.append(f"--max-num-batched-tokens {flags.max_num_batched_tokens}")
    parts.append(f"--max-model-len {flags.max_model_len}")
    for name in ("kv_cache_memory_bytes", "gpu_memory_utilization"):
        value = server.facts.get(name)
        if type(value) in (int, float):
            parts.append(f"--{name.replace('_', '-')} {value}")
            break
    return " \\\n    ".join([f"{parts[0]} {parts[1]}", *parts[2:]])


# --- from the tables alone


def _without_times(server: Server, family: Family, point: Point) -> Advice:
    if "fleet" in server.facts:
        change = "The run is of a fleet; which flag helps is told of one server with its share of the load."
        return Advice(f"At {point.label}, {_seen(server, None, point)}.", change, "")
    url = server.text("url") or "http://localhost:8000"
    command = (
        f"capsim calibrate --endpoint {shlex.quote(url)} -o profile.yaml\n"
        "capsim report RUN --profile profile.yaml -o report.html"
    )
    change = "With a profile of this server the report says which flag helps, and by how much."
    return Advice(f"At {point.label}, {_seen(server, server.ceilings(family), point)}.", change, command)


def _seen(server: Server, ceilings: Ceilings | None, point: Point) -> str:
    """What the tables of a level show to be full."""
    summary, running = point.summary, point.level.timeline["running"]
    used = summary.peak_kv_tokens / server.pool if server.pool else math.nan
    if summary.preemptions:
        return f"the KV pool is full: {summary.preemptions:,} requests were preempted"
    if used >= FULL:
        return f"the KV pool is full: {used:.0%} were in use"
    if ceilings is not None and len(running) and int(running.max()) >= ceilings.slots:
        return f"all slots are taken: --max-num-seqs {ceilings.slots}"
    slots = "slots are free" if ceilings is not None and len(running) else ""
    pool = "" if math.isnan(used) else f"the KV pool is at most {used:.0%} used"
    free = ", ".join(filter(None, (slots, pool)))
    ratio = summary.itl.p99 / summary.itl.p50
    if ratio >= TAIL:
        steps = "some steps take much longer than a decode step, as those with a prompt chunk do"
        return "; ".join(filter(None, (f"p99 ITL is {ratio:.1f} times p50: {steps}", free)))
    return f"{free}: what limits is the duration of the engine's steps" if free else "the run does not tell what limits"
