"""How sure a prediction is: 90 % intervals of its figures.

An interval has three parts, taken as independent:

- the coefficients' joint uncertainty. The level is simulated again with a few sets of coefficients, spread so evenly
  about the fitted ones (`even_draws`) that the variance of anything linear in them is exact.
- chance. Where arrivals or lengths are random each of these simulations has another seed, so the interval is that of a
  measurement of this many requests.
- the model's error: how far the profile is off on levels that were measured, or how far two measurements of one level
  differ where that is more. Outside the measured range it counts for more, see `widening`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.fleet import Fleet
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.workload import Load, Workload
from simulator.profile import LevelErrors, Profile
from simulator.results.run import Level
from simulator.results.summary import summarize

DRAWS = 8  # at least; one more than there are coefficients
CONFIDENCE = 0.9
NORMAL_90 = 1.645  # standard errors on either side that hold 90 %
RANGE_OF_TWO = 1.128  # mean range of two normal numbers, in standard deviations
SPREAD_OF_MEAN = 1.253  # standard deviations of a normal number for its mean size
LEAST_ERROR = 0.005  # relative; the model is no better than this, however well it met a few figures
# a closed loop with fixed lengths repeats itself: so many requests show how it depends on the coefficients
ENOUGH_PROMPTS, ENOUGH_ROUNDS = 240, 5
COUNTS = ("requests", "completed", "errors")
LEAST_CONSTANT = 0.05  # of the fitted constant, in any draw of a vague profile

Array = npt.NDArray[np.float64]
Numbers = Mapping[str, float | int | None]


def intervals(
    profile: Profile,
    workload: Load,
    flags: EngineFlags | None = None,
    level: Level | None = None,
    fleet: Fleet | None = None,
    on_draw: Callable[[float], None] | None = None,
) -> dict[str, tuple[float, float]]:
    """90 % intervals of every number of `simulator.results.summary.Summary.flat` but the counts of requests.

    `level` is the prediction itself where it has been simulated already. A number that the load alone decides has an
    interval without width. A profile that says nothing of its errors gives no intervals. `on_draw` is told the share
    of the simulations that is done.
    """
    if not knows_errors(profile):
        return {}
    flags, fleet = flags or profile.engine_flags, fleet or Fleet()
    level = level or fleet.simulate(workload, flags, profile.step_time, profile.host_time)
    predicted = summarize(level).flat()
    random, trial = is_random(workload), repeated(workload)
    base = predicted
    if trial != workload:
        base = summarize(fleet.simulate(trial, flags, profile.step_time, profile.host_time)).flat()
    drawn: list[Numbers] = []
    times = list(drawn_times(profile, at_least_one=random))
    for number, (step_time, host_time) in enumerate(times):
        if on_draw is not None:
            on_draw((2 + number) / (2 + len(times)))
        load = trial.redrawn(1 + number) if random else trial
        drawn.append(summarize(fleet.simulate(load, flags, step_time, host_time)).flat())
    wider = widening(profile, workload, flags, level, fleet)
    return intervals_from(profile, predicted, base, drawn, wider, reach_of(len(drawn), random))


def intervals_from(
    profile: Profile, predicted: Numbers, base: Numbers, drawn: Sequence[Numbers], wider: float, reach: float
) -> dict[str, tuple[float, float]]:
    """Intervals of the `predicted` numbers, from those of the draws about the fitted coefficients' `base`.

    `wider` is `widening`, `reach` is `reach_of` the draws.
    """
    found = {}
    for name, value in predicted.items():
        if value is not None and not math.isnan(value) and name not in COUNTS:
            model = wider * max(model_error(profile, name), LEAST_ERROR) if _kin(name) else 0.0
            found[name] = _interval(float(value), _deviations(name, base, drawn), model, reach)
    return found


def reach_of(draws: int, random: bool) -> float:
    """Standard deviations on either side that hold 90 %; more where few draws must tell what chance does."""
    return float(stdtrit(draws, (1 + CONFIDENCE) / 2)) if random else NORMAL_90


def knows_errors(profile: Profile) -> bool:
    terms = profile.coefficients.step_time | profile.coefficients.host_time
    return bool(profile.fit or profile.hold_out or profile.noise) or any(term.stderr for term in terms.values())


def is_random(load: Load) -> bool:
    """Whether chance decides when requests come or how long they are."""
    other = load.redrawn(1)
    same = zip(
        (*load.lengths(), load.arrival_times(), load.think_times()),
        (*other.lengths(), other.arrival_times(), other.think_times()),
        strict=True,
    )
    return not all(np.array_equal(one, two) for one, two in same if one is not None and two is not None)


def repeated(load: Load) -> Load:
    """The load that shows how a figure depends on the coefficients: shorter where a level only repeats itself."""
    if not isinstance(load, Workload) or load.concurrency is None or is_random(load):
        return load
    return replace(load, num_prompts=min(load.num_prompts, max(ENOUGH_PROMPTS, ENOUGH_ROUNDS * load.concurrency)))


def _deviations(name: str, base: Numbers, drawn: Sequence[Numbers]) -> Array:
    """How far the draws are from the centre, relative where a number is positive throughout, else absolute."""
    centre, values = base[name], np.array([numbers[name] for numbers in drawn], dtype=np.float64)
    if centre is None or not len(values):
        return np.zeros(1)
    if centre > 0 and (values > 0).all():
        return np.asarray(np.log(values / centre))
    return values - centre


def _interval(value: float, deviations: Array, model: float, reach: float) -> tuple[float, float]:
    """About the prediction and not about the mean of the draws: a percentile between two modes may be in either."""
    spread = min(reach * math.hypot(math.sqrt(float(np.mean(deviations**2))), model), MOST_SPREAD)
    if value > 0:
        return value * math.exp(-spread), value * math.exp(spread)
    return max(0.0, value - spread), value + spread


MOST_SPREAD = 300.0  # of a logarithm: beyond what a prediction could mean, and e^300 is still a number


def widening(profile: Profile, workload: Load, flags: EngineFlags, level: Level, fleet: Fleet | None = None) -> float:
    """The factor by which the model's error counts: 1 within the measured range, one more for every doubling beyond.

    The doublings of all conditions are added up: 32 clients where 8 were measured count 3, with requests of twice the
    tokens 4. It is a rule and no estimate, since nothing was measured there.
    """
    fleet = fleet or Fleet()
    peak = math.ceil(int(level.timeline["running"].max()) / fleet.engines)
    return 1.0 + profile.doublings_outside(fleet.share(workload), flags, peak)


def model_error(profile: Profile, metric: str) -> float:
    """Relative standard error of the model itself in a metric; 0 where the profile says nothing of it or its kin."""
    for kin in _kin(metric):
        error = max(_mean_error([*profile.fit, *profile.hold_out], kin), profile.noise.get(kin, 0.0) / RANGE_OF_TWO)
        if error > 0:
            return error
    return 0.0


def _mean_error(levels: Sequence[LevelErrors], metric: str) -> float:
    """Standard deviation that a metric's mean absolute error stands for, levels weighted by their requests.

    The mean square would let a single percentile that jumped to another mode speak for all levels.
    """
    known = [(level.num_prompts, abs(level.errors[metric])) for level in levels if metric in level.errors]
    total = sum(count for count, _ in known)
    return SPREAD_OF_MEAN * sum(count * error for count, error in known) / total if total else 0.0


def _kin(metric: str) -> tuple[str, ...]:
    """Metrics whose errors tell of this one's, the closest first; none for a gauge."""
    if metric.endswith("_throughput") or metric == "duration":
        return metric, "output_throughput"
    statistic, _, latency = metric.partition("_")
    if latency not in ("ttft", "tpot", "itl", "e2el"):
        return ()
    nearest = {"mean": ("p50", "p90"), "p50": ("p90", "p99"), "p90": ("p99", "p50"), "p95": ("p99", "p90")}
    others = nearest.get(statistic, ("p90", "p50"))
    return metric, *(f"{other}_{latency}" for other in others), "output_throughput"


def drawn_times(profile: Profile, at_least_one: bool = False) -> Iterator[tuple[StepTime, HostTime]]:
    """Step and host times spread over the profile's joint uncertainty; always the same ones.

    Where no coefficient is uncertain there are none, or with `at_least_one` `DRAWS` times the fitted ones.
    """
    terms = profile.coefficients.step_time | profile.coefficients.host_time
    errors = {name: term.stderr for name, term in terms.items() if term.stderr}
    if not errors and not at_least_one:
        return
    values = np.array([terms[name].value for name in errors])
    root = covariance_root(errors, profile.coefficients.correlations)
    for point in even_draws(len(errors), max(DRAWS, len(errors) + 1)):
        drawn = dict(zip(errors, np.maximum(values + root @ point, 0.0).tolist(), strict=True))
        step = {name: value for name, value in drawn.items() if name in profile.coefficients.step_time}
        host = {name: value for name, value in drawn.items() if name in profile.coefficients.host_time}
        constant = profile.step_time.constant
        step["constant"] = max(LEAST_CONSTANT * constant, step.get("constant", constant))  # steps take time in any draw
        yield replace(profile.step_time, **step), replace(profile.host_time, **host)


def covariance_root(errors: Mapping[str, float], correlations: Sequence[tuple[str, str, float]]) -> Array:
    """A root of the covariance of numbers with these standard errors: root @ root.T is the covariance."""
    names = list(errors)
    correlation = np.eye(len(names))
    for one, other, value in correlations:
        if one in errors and other in errors:
            correlation[names.index(one), names.index(other)] = value
            correlation[names.index(other), names.index(one)] = value
    size = np.array([errors[name] for name in names])
    # rounded correlations, and terms that move together, leave no Cholesky root
    variances, directions = np.linalg.eigh(correlation)
    return np.asarray(size[:, None] * directions * np.sqrt(np.maximum(variances, 0.0)))


def even_draws(dimensions: int, count: int) -> Array:
    """`count` points (rows) in standard deviations, with mean 0 and covariance 1 exactly.

    So the mean square of a linear function over them is its variance. `count` must exceed `dimensions`.
    """
    drawn = np.random.default_rng(0).standard_normal((count, dimensions + 1))
    drawn[:, 0] = 1.0  # orthogonal to this, the others have mean 0
    return np.asarray(np.linalg.qr(drawn)[0][:, 1:] * math.sqrt(count))
