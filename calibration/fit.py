"""From a measured run to a profile: the fit, its errors on the levels it used, and on those it never saw."""

from __future__ import annotations

from collections.abc import Sequence

from calibration.refine import HOST_FIELDS, Refinement, refine
from calibration.roofline import server_priors
from calibration.step_fit import Coefficient as FittedCoefficient
from calibration.step_fit import FitError, StepTimeFit, fit_step_time
from calibration.step_rows import observations
from calibration.sweep_plan import is_probe
from calibration.validate import noise_floor, validate
from simulator import __version__
from simulator.engine.engine_flags import EngineFlags
from simulator.profile import Coefficient, Coefficients, LevelErrors, MeasuredRange, Profile, Provenance
from simulator.results.run import Level, Run

REPORTED = (
    "output_throughput",
    *(f"{percentile}_ttft" for percentile in ("p50", "p90", "p99")),
    "p50_tpot",
    *(f"{percentile}_{latency}" for latency in ("itl", "e2el") for percentile in ("p50", "p90", "p99")),
)
NOTABLE = 0.1  # standard errors; a smaller move by the second stage is not worth a note
INTERVAL = 1.645  # standard errors on either side for 90 % confidence


def fit_profile(run: Run, flags: EngineFlags, *, hold_out: Sequence[int] = (), name: str = "") -> Profile:
    """Fit a measured run of a server with `flags`: its steps first, then its percentiles with the simulator.

    Closed-loop levels whose concurrency is in `hold_out` do not enter the fit; their prediction errors judge it.
    Raises `FitError` if the run holds too little.
    """
    kept_out = [level for level in run.levels if _held_out(level, hold_out)]
    used = [level for level in run.levels if not _held_out(level, hold_out)]
    if not used:
        raise FitError("every level is held out; leave some to fit")
    fit = fit_step_time(used, flags, server_priors(run.server))
    refined = refine(fit, used, flags)
    server = run.server
    profile = Profile(
        name=name or str(server.get("model", "server")),
        model=str(server.get("model", "unknown")),
        gpu=str(server["gpu"]) if server.get("gpu") else None,
        engine_version=flags.engine_version,
        kv_bytes_per_token=_positive_int(server.get("kv_bytes_per_token")),
        gpu_memory_utilization=_share(server.get("gpu_memory_utilization")),
        engine_flags=flags,
        coefficients=_coefficients(refined, fit),
        measured_range=_measured_range(used, flags, refined),
        noise={metric: round(value, 5) for metric, value in noise_floor(run.levels).items()},
        assumed=_assumed(refined),
        provenance=Provenance(
            created=run.started_at,  # and not now: the same run gives the same profile
            capsim_version=__version__,
            source=f"measured at {server.get('url', 'a server')}",
        ),
    )
    return profile.model_copy(update={"fit": _errors(run, used, profile), "hold_out": _errors(run, kept_out, profile)})


def _assumed(refined: Refinement) -> list[str]:
    if refined.share_is_measured or refined.coefficients["per_request"].dropped:
        return []
    share = refined.serial_share.value
    return [f"{share:.0%} of the host time of a request is spent in the API server one request after the other"]


def _positive_int(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _share(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and 0 < value <= 1 else None


def _held_out(level: Level, hold_out: Sequence[int]) -> bool:
    """Lone prompts at concurrency 1 and other probes always enter the fit; only they show some of the costs."""
    clients = level.workload.concurrency
    return clients in hold_out and clients != 1 and not is_probe(level.workload)


def _coefficients(refined: Refinement, fit: StepTimeFit) -> Coefficients:
    terms = {name: _coefficient(item, _note(refined, name)) for name, item in refined.coefficients.items()}
    assumed = {name: {"origin": "assumed", "note": source} for name, source in fit.held.items()}
    if not refined.share_is_measured:
        assumed |= {name: {"origin": "assumed"} for name in ("per_request", "per_request_serial")}
    terms |= {name: terms[name].model_copy(update=update) for name, update in assumed.items()}
    pairs = [(one, other, round(value, 3)) for one, other, value in refined.correlations if abs(value) >= 0.01]
    return Coefficients(
        step_time={name: term for name, term in terms.items() if name not in HOST_FIELDS},
        host_time={name: term for name, term in terms.items() if name in HOST_FIELDS},
        gap_noise=[_rounded(value) for value in fit.gap_noise],
        correlations=pairs,
    )


def _coefficient(item: FittedCoefficient, note: str) -> Coefficient:
    if item.dropped:
        return Coefficient(value=0.0, note="not told from zero by these measurements")
    low, high = max(0.0, item.value - INTERVAL * item.stderr), item.value + INTERVAL * item.stderr
    return Coefficient(
        value=_rounded(item.value), stderr=_rounded(item.stderr), low=_rounded(low), high=_rounded(high), note=note
    )


def _note(refined: Refinement, name: str) -> str:
    """What the second stage did to a coefficient."""
    if name in ("per_request", "per_request_serial"):
        if not refined.share_is_measured:
            return "the measured sum, split as assumed: these levels do not show how"
        return "the measured sum, split by the percentiles"
    by = refined.moved.get(name, 0.0)
    return f"moved by the percentiles, {by:+.1f} standard errors of the steps" if abs(by) >= NOTABLE else ""


def _rounded(seconds: float) -> float:
    """Six digits: more than any measurement gives, and a profile stays readable."""
    return float(f"{seconds:.6g}")


def _measured_range(levels: Sequence[Level], flags: EngineFlags, fit: Refinement) -> MeasuredRange:
    """The conditions that the observations cover."""
    seen = observations(levels, flags, fit.host_time.per_request_serial)
    prompts = [int(size) for level in levels for size in level.completed["prompt_tokens"]]
    totals = [
        int(size) for level in levels for size in (level.completed["prompt_tokens"] + level.completed["output_tokens"])
    ]
    clients = [level.workload.concurrency or 1 for level in levels if not is_probe(level.workload)]
    return MeasuredRange(
        concurrency=(min(clients), max(clients)),
        sequences=(1, max(1, seen.most_sequences)),
        context_tokens=(min(prompts), max(totals)),
        prompt_chunk_tokens=(min(*prompts, flags.max_num_batched_tokens), max(1, seen.most_prompt_tokens)),
    )


def _errors(run: Run, levels: Sequence[Level], profile: Profile) -> list[LevelErrors]:
    if not levels:
        return []
    outcome = validate(Run(run.source, list(levels), run.server), profile, profile.engine_flags)
    return [
        LevelErrors(
            level=level.workload.describe(),
            num_prompts=level.workload.num_prompts,
            errors={name: round(error, 5) for name, error in level.errors.items() if name in REPORTED},
        )
        for level in outcome.levels
    ]
