"""Fits the step-time model to measured steps and to prompts that ran alone.

Every observation is linear in the coefficients, see `calibration.step_rows`, so this is least squares with non-negative
coefficients, made robust against the odd late packet, each kind of observation weighed by its own noise. A rare term
that the data do not tell from zero is dropped; one of which they tell less than a prior does is held at that prior.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from calibration.robust_fit import Belief, Solution, covariance, solve, weighted
from calibration.roofline import Prior
from calibration.step_rows import DECODE, HOST_TERMS, KINDS, LONE, TERMS, Observations, observations
from calibration.steps import reconstruct, stream_gaps
from calibration.sweep_plan import is_probe
from simulator.engine.cuda_graphs import DecodeGraphs
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.step_time import NOISE_PERCENTILES, HostTime, StepTime
from simulator.results.run import Level

# Terms that most servers do not show: dropped unless they are this many standard errors above zero. The others are
# never dropped, however vague: two of them may share what only their sum tells, and dropping one would give the other
# all of it and a small error.
RARE = {"mixed_per_sequence", "per_padded_sequence", "without_graph", "per_prompt_token"}
SIGNIFICANT = 3.0
OVERLAPPING = 2.0  # standard errors that `weights` must be above zero, besides what it improves
IMPROVEMENT = (
    10.0  # variances of the noise by which the squared misses must shrink for `weights`: a Bayes factor of 150
)
KNEES = np.geomspace(8.0, 4096.0, 28)  # tokens that take as long to compute as the weights to read
REFINEMENTS = 10  # of the best knee
SERIAL_SHARE = 0.5  # of the 8 ms for 1,024 token ids on vLLM 0.32, 4 ms passed between sending and the first step
LEAST_VARIANCE = 1e-30  # s^2, a variance that no measurement has
LEAST_GAPS = 1000  # of a level, for the percentiles of their noise
REQUEST_DELAY = 0.004  # s, a first guess; the fit gives a better one and the steps are reconstructed with it again

Array = npt.NDArray[np.float64]


class FitError(ValueError):
    """The measurements do not suffice to fit a step-time model."""


@dataclass(frozen=True)
class Coefficient:
    """A fitted coefficient and its standard error, in seconds a unit; a dropped term is 0."""

    value: float
    stderr: float
    dropped: bool = False


@dataclass(frozen=True)
class StepTimeFit:
    """Coefficients by the names in `TERMS`, and how well they explain what was observed.

    `noise` is the robust standard deviation of the residuals in seconds, by kind of observation; `observations` their
    number. `gap_noise` are the percentiles of single token gaps about the fitted step, see `HostTime`. `correlations`
    are those of the errors of every pair of coefficients that were kept. `held` are the terms that the data leave at
    their prior, each with the prior's source.
    """

    coefficients: dict[str, Coefficient]
    noise: dict[str, float]
    observations: dict[str, int]
    gap_noise: tuple[float, ...] = ()
    correlations: tuple[tuple[str, str, float], ...] = ()
    held: dict[str, str] = field(default_factory=dict)

    @property
    def step_time(self) -> StepTime:
        values = {name: item.value for name, item in self.coefficients.items() if name not in HOST_TERMS}
        return StepTime(**values)

    @property
    def host_time(self) -> HostTime:
        """A lone request shows the sum only; it is split as on vLLM 0.32, see `SERIAL_SHARE`."""
        per_request = self.coefficients["per_request"].value
        return HostTime(
            per_request=per_request * (1 - SERIAL_SHARE),
            per_request_serial=per_request * SERIAL_SHARE,
            per_prompt_token=self.coefficients["per_prompt_token"].value,
            gap_noise=self.gap_noise,
        )


def fit_step_time(
    levels: Sequence[Level], flags: EngineFlags, priors: Mapping[str, Prior] | None = None
) -> StepTimeFit:
    """Fit to measured levels. Raises `FitError` if they hold too little.

    `priors` tell of some coefficients what is believed of them, as `calibration.roofline.roofline_priors` does; they
    count only for those that the data tell less about.
    """
    delay = REQUEST_DELAY
    fit = None
    for _ in range(2):
        fit = _fit(observations(levels, flags, delay), priors or {})
        delay = fit.host_time.per_request_serial
    assert fit is not None
    return replace(fit, gap_noise=_gap_noise(levels, flags, fit))


def _gap_noise(levels: Sequence[Level], flags: EngineFlags, fit: StepTimeFit) -> tuple[float, ...]:
    """Percentiles of what single gaps of decode steps add to the fitted duration, about zero; levels count alike.

    Crowds of short requests keep the API server busier than what is predicted, so probes do not count.
    """
    found = []
    graphs, step_time = DecodeGraphs(flags), fit.step_time
    for level in levels:
        if is_probe(level.workload):
            continue
        steps = reconstruct(level, flags, fit.host_time.per_request_serial)
        told = np.array(
            [
                step_time.duration(sequences, kv_tokens) + step_time.graph_cost(graphs.padding(sequences))
                for sequences, kv_tokens in zip(steps["sequences"].tolist(), steps["kv_tokens"].tolist(), strict=True)
            ]
        )
        gaps = stream_gaps(level, steps)
        prompts = (steps["prefill_tokens"] > 0).to_numpy()
        late = np.concatenate([[False], prompts[:-1]])  # a step after prompts seems short, as those came late
        decode = ~(prompts | late)[gaps["step"]]
        added = gaps["gap"][decode] - told[gaps["step"][decode]]
        if len(added) >= LEAST_GAPS:
            found.append(np.percentile(added - added.mean(), NOISE_PERCENTILES))
    return tuple(float(value) for value in np.mean(found, axis=0)) if found else ()


@dataclass(frozen=True)
class _Trial:
    """A fit with some of the terms. `knee` as in `Observations.design`; `names` include ``weights`` if it is given."""

    names: list[str]
    values: dict[str, float]
    covariance: Array
    solution: Solution
    knee: float | None
    held: frozenset[str]

    @property
    def errors(self) -> dict[str, float]:
        variances = np.maximum(np.diag(self.covariance), LEAST_VARIANCE)
        return dict(zip(self.names, np.sqrt(variances).tolist(), strict=True))

    def strength(self, name: str) -> float:
        """Value in standard errors, as a share of what a rare term must have to be kept."""
        return self.values[name] / (SIGNIFICANT * self.errors[name])


def _fit(observed: Observations, priors: Mapping[str, Prior]) -> StepTimeFit:
    _check(observed)
    trial = _eliminated(observed, None, priors)
    knee = _best_knee(observed, trial, priors)
    if knee is not None:
        overlapping = _eliminated(observed, knee, priors)
        if overlapping.values["weights"] >= OVERLAPPING * overlapping.errors["weights"]:
            trial = overlapping
        else:
            trial = replace(trial, covariance=trial.covariance + _choice(overlapping, trial))
    return _told(observed, trial, priors)


def _check(observed: Observations) -> None:
    decode, lone = (int((observed.kinds == kind).sum()) for kind in (DECODE, LONE))
    if decode < 10:
        raise FitError(f"only {decode} decode steps could be seen; measure more requests or longer outputs")
    if lone < 2:
        raise FitError(f"only {lone} prompts ran alone; a level with concurrency 1 is needed")


def _eliminated(observed: Observations, knee: float | None, priors: Mapping[str, Prior]) -> _Trial:
    """Rare terms that the data cannot tell from zero go one by one, the weakest first; priors hold the vague ones."""
    kept = [name for name in TERMS if observed.terms[:, TERMS.index(name)].any()]
    held: frozenset[str] = frozenset()
    whole = None
    while True:
        trial = _solved(observed, kept, knee, priors, held)
        vague = [name for name in kept if name in priors.keys() - held and _is_vaguer(trial, name, priors[name])]
        if vague:
            held |= {max(vague, key=lambda name: trial.errors[name] / priors[name].value)}
            continue
        weak = [name for name in kept if name in RARE - held and trial.strength(name) < 1]
        whole = whole or trial
        if not weak:
            return replace(trial, covariance=trial.covariance + _choice(whole, trial))
        kept.remove(min(weak, key=trial.strength))


def _choice(whole: _Trial, trial: _Trial) -> Array:
    """Covariance from having chosen the terms: with those that were dropped, the others would be that different."""
    moved = np.array([trial.values[name] - whole.values.get(name, 0.0) for name in trial.names])
    return np.outer(moved, moved)


def _is_vaguer(trial: _Trial, name: str, prior: Prior) -> bool:
    """Whether the data say less of a coefficient than its prior does."""
    return trial.errors[name] > prior.value * prior.uncertainty


def _solved(
    observed: Observations, kept: Sequence[str], knee: float | None, priors: Mapping[str, Prior], held: frozenset[str]
) -> _Trial:
    columns = [TERMS.index(name) for name in kept]
    groups = _groups(observed)
    belief = _belief(kept, priors, held)
    solution = solve(observed.design(knee)[:, columns], observed.seconds, groups, belief)
    values = dict(zip(kept, solution.values.tolist(), strict=True))
    names = [*kept]
    if knee is not None:
        names.append("weights")
        values["weights"] = knee * values["per_prefill_token"]
        belief = _belief(names, priors, held)
    slopes = observed.slopes(knee)[:, [TERMS.index(name) for name in names]]
    errors = covariance(slopes, solution, groups, observed.clusters, belief)
    by_level = covariance(slopes, solution, groups, observed.levels, belief)
    ratio = np.diag(by_level) / np.maximum(np.diag(errors), LEAST_VARIANCE)
    wider = np.sqrt(np.maximum(ratio, 1.0))
    return _Trial(names, values, errors * np.outer(wider, wider), solution, knee, held)


def _groups(observed: Observations) -> npt.NDArray[np.int64]:
    return np.searchsorted(np.sort(KINDS), observed.kinds)


def _belief(names: Sequence[str], priors: Mapping[str, Prior], held: frozenset[str]) -> Belief:
    known = [priors[name] if name in held else None for name in names]
    return Belief(
        np.array([prior.value if prior else 0.0 for prior in known]),
        np.array([prior.value * prior.uncertainty if prior else np.inf for prior in known]),
    )


def _best_knee(observed: Observations, trial: _Trial, priors: Mapping[str, Prior]) -> float | None:
    """The knee that explains the observations best; None if none does much better than no overlap at all."""
    columns = [TERMS.index(name) for name in trial.names]
    belief = _belief(trial.names, priors, trial.held)
    constant, rate = trial.names.index("constant"), trial.names.index("per_prefill_token")
    weights = trial.solution.weights

    def misses(knee: float | None) -> float:
        values, left = weighted(observed.design(knee)[:, columns], observed.seconds, weights, belief)
        possible = knee is None or knee * values[rate] <= values[constant]  # reading them is a part of the constant
        return left if possible else np.inf

    tried = {knee: misses(knee) for knee in KNEES.tolist()}
    step = float(KNEES[1] / KNEES[0])
    for _ in range(REFINEMENTS):
        best = min(tried, key=tried.__getitem__)
        step **= 0.5
        tried |= {knee: misses(knee) for knee in (best / step, best * step)}
    best = min(tried, key=tried.__getitem__)
    return best if tried[best] + IMPROVEMENT < misses(None) else None


def _told(observed: Observations, trial: _Trial, priors: Mapping[str, Prior]) -> StepTimeFit:
    coefficients = {name: Coefficient(0.0, 0.0, dropped=True) for name in TERMS}
    coefficients |= {name: Coefficient(trial.values[name], error) for name, error in trial.errors.items()}
    errors = np.array([*trial.errors.values()])
    correlation = trial.covariance / np.outer(errors, errors)
    pairs = tuple(
        (one, other, float(correlation[row, column]))
        for row, one in enumerate(trial.names)
        for column, other in enumerate(trial.names[:row])
    )
    groups = _groups(observed)
    seen = {kind: int((observed.kinds == kind).sum()) for kind in KINDS}
    noise = {
        kind: float(trial.solution.scales[groups[observed.kinds == kind][0]]) for kind, count in seen.items() if count
    }
    counts = {kind: count for kind, count in seen.items() if count}
    held = {name: priors[name].source for name in trial.names if name in trial.held}
    return StepTimeFit(coefficients, noise, counts, correlations=pairs, held=held)
