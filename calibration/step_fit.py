"""Fits the step-time model to measured steps and to the first tokens of prompts that ran alone.

Every observation is linear in the coefficients: a step's duration, or the time to the first token of a request that had
the engine to itself, which is host time plus one step for each chunk of its prompt. So this is least squares with
non-negative coefficients, made robust against the odd late packet, each kind of observation weighed by its own noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import lsq_linear

from calibration.steps import reconstruct, stream_gaps, streams
from simulator.engine_flags import EngineFlags
from simulator.run import Level
from simulator.step_time import NOISE_PERCENTILES, HostTime, StepTime

TERMS = (
    "constant",
    "per_sequence",
    "per_kv_token",
    "per_prefill_token",
    "per_prefill_attention",
    "mixed_per_sequence",
    "per_request",
    "per_prompt_token",
)
HOST_TERMS = ("per_request", "per_prompt_token")
NEEDED = {"constant", "per_prefill_token"}  # never dropped: a step takes time and prompts cost something
SIGNIFICANT = 2.0  # standard errors below which a term is dropped
HUBER = 1.5  # residuals beyond this many standard deviations count less
SERIAL_SHARE = 0.5  # of the 8 ms for 1,024 token ids on vLLM 0.32, 4 ms passed between sending and the first step
MINUTE = 1e-30  # s^2, a variance that no measurement has
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
    are those of the errors of every pair of coefficients that were kept.
    """

    coefficients: dict[str, Coefficient]
    noise: dict[str, float]
    observations: dict[str, int]
    gap_noise: tuple[float, ...] = ()
    correlations: tuple[tuple[str, str, float], ...] = ()

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


@dataclass(frozen=True)
class Observations:
    """Design matrix (rows x `TERMS`), seconds, and the kind of every row."""

    terms: Array
    seconds: Array
    kinds: npt.NDArray[np.str_]


def fit_step_time(levels: Sequence[Level], flags: EngineFlags) -> StepTimeFit:
    """Fit to measured levels. Raises `FitError` if they hold too little."""
    delay = REQUEST_DELAY
    fit = None
    for _ in range(2):
        observed = observations(levels, flags, delay)
        fit = _solve(observed)
        delay = fit.host_time.per_request_serial
    assert fit is not None
    return replace(fit, gap_noise=_gap_noise(levels, flags, fit))


def _gap_noise(levels: Sequence[Level], flags: EngineFlags, fit: StepTimeFit) -> tuple[float, ...]:
    """Percentiles of what single gaps of decode steps add to the fitted duration, about zero; levels count alike."""
    found = []
    for level in levels:
        steps = reconstruct(level, flags, fit.host_time.per_request_serial)
        told = fit.step_time.constant + steps["sequences"] * fit.step_time.per_sequence
        told += steps["kv_tokens"] * fit.step_time.per_kv_token
        gaps = stream_gaps(level, steps)
        decode = (steps["prefill_tokens"] == 0).to_numpy()[gaps["step"]]
        added = gaps["gap"][decode] - told.to_numpy()[gaps["step"][decode]]
        if len(added) >= LEAST_GAPS:
            found.append(np.percentile(added - added.mean(), NOISE_PERCENTILES))
    return tuple(float(value) for value in np.mean(found, axis=0)) if found else ()


def observations(levels: Sequence[Level], flags: EngineFlags, request_delay: float) -> Observations:
    """Steps and lone first tokens of all levels."""
    tables = [reconstruct(level, flags, request_delay) for level in levels]
    steps = pd.concat(tables, ignore_index=True)
    mixed = (steps["prefill_tokens"] > 0).to_numpy()
    rows = np.column_stack(
        [
            np.ones(len(steps)),
            steps["sequences"],
            steps["kv_tokens"],
            steps["prefill_tokens"],
            steps["prefill_attention"],
            np.where(mixed, steps["sequences"], 0),
            np.zeros(len(steps)),
            np.zeros(len(steps)),
        ]
    )
    lone = [row for level in levels for row in lone_first_tokens(level, flags)]
    lone_rows = np.array([terms for terms, _ in lone], dtype=np.float64).reshape(-1, len(TERMS))
    return Observations(
        terms=np.vstack([rows, lone_rows]),
        seconds=np.concatenate([steps["duration"].to_numpy(), np.array([seconds for _, seconds in lone])]),
        kinds=np.concatenate([np.where(mixed, "mixed steps", "decode steps"), np.full(len(lone), "lone prompts")]),
    )


def lone_first_tokens(level: Level, flags: EngineFlags) -> list[tuple[tuple[float, ...], float]]:
    """TTFT of every request that met an idle engine, as a row of terms and seconds."""
    sent = streams(level)
    found = []
    busy_until = -np.inf
    for number, stream in enumerate(sent):
        first, last = stream.times[0], stream.times[-1]
        next_sent = sent[number + 1].sent if number + 1 < len(sent) else np.inf
        if stream.sent >= busy_until and next_sent >= first:
            found.append((_prompt_terms(stream.prompt_tokens, flags.max_num_batched_tokens), first - stream.sent))
        busy_until = max(busy_until, last)
    return found


def _prompt_terms(prompt: int, budget: int) -> tuple[float, ...]:
    """A prompt alone: chunks of the whole token budget, one step each."""
    chunks = -(-prompt // budget)
    return (chunks, chunks, 0.0, prompt, prompt * prompt / 2, chunks, 1.0, prompt)


def _solve(observed: Observations) -> StepTimeFit:
    """Robust non-negative least squares; terms that the data cannot tell from zero are dropped one by one."""
    _check(observed)
    kept = [name for name in TERMS if observed.terms[:, TERMS.index(name)].any()]
    while True:
        values, covariance, scales = _robust(observed, [TERMS.index(name) for name in kept])
        errors = np.sqrt(np.maximum(np.diag(covariance), MINUTE))
        weakest = min(
            (name for name in kept if name not in NEEDED),
            key=lambda name: values[kept.index(name)] / errors[kept.index(name)],
            default=None,
        )
        if weakest is None or values[kept.index(weakest)] >= SIGNIFICANT * errors[kept.index(weakest)]:
            break
        kept.remove(weakest)
    coefficients = {name: Coefficient(0.0, 0.0, dropped=True) for name in TERMS}
    for name, value, error in zip(kept, values, errors, strict=True):
        coefficients[name] = Coefficient(float(value), float(error))
    counts = {kind: int((observed.kinds == kind).sum()) for kind in scales}
    correlation = covariance / np.outer(errors, errors)
    pairs = tuple(
        (one, other, float(correlation[row, column]))
        for row, one in enumerate(kept)
        for column, other in enumerate(kept[:row])
    )
    return StepTimeFit(coefficients, scales, counts, correlations=pairs)


def _check(observed: Observations) -> None:
    decode, lone = (int((observed.kinds == kind).sum()) for kind in ("decode steps", "lone prompts"))
    if decode < 10:
        raise FitError(f"only {decode} decode steps could be seen; measure more requests or longer outputs")
    if lone < 2:
        raise FitError(f"only {lone} prompts ran alone; a level with concurrency 1 is needed")


def _robust(observed: Observations, columns: list[int]) -> tuple[Array, Array, dict[str, float]]:
    """Values of the chosen columns, their covariance, and the noise of each kind of observation."""
    matrix, seconds = observed.terms[:, columns], observed.seconds
    size = np.abs(matrix).max(axis=0)
    matrix = matrix / size
    kinds = [kind for kind in ("decode steps", "mixed steps", "lone prompts") if (observed.kinds == kind).any()]
    weights = 1.0 / np.maximum(seconds, 1e-6)
    scales: dict[str, float] = {}
    values = np.zeros(len(columns))
    for _ in range(20):
        before = values
        values = lsq_linear(matrix * weights[:, None], seconds * weights, bounds=(0, np.inf)).x
        residual = seconds - matrix @ values
        for kind in kinds:
            chosen = observed.kinds == kind
            scales[kind] = max(1.4826 * float(np.median(np.abs(residual[chosen]))), 1e-6)
            deviation = np.abs(residual[chosen]) / scales[kind]
            weights[chosen] = np.sqrt(np.minimum(1.0, HUBER / np.maximum(deviation, 1e-9))) / scales[kind]
        if np.allclose(values, before, rtol=1e-6, atol=0):
            break
    weighted = matrix * weights[:, None]
    covariance = np.linalg.pinv(weighted.T @ weighted)
    return values / size, covariance / np.outer(size, size), scales
