"""From a measured run to a profile: the fit, its errors on the levels it used, and on those it never saw."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from calibration.step_fit import HOST_TERMS, SERIAL_SHARE, FitError, StepTimeFit, fit_step_time, observations
from calibration.validate import validate
from simulator.engine_flags import EngineFlags
from simulator.profile import Coefficient, Coefficients, LevelErrors, MeasuredRange, Profile, Provenance
from simulator.run import Level, Run

REPORTED = ("output_throughput", "p50_ttft", "p99_ttft", "p50_tpot", "p50_itl", "p99_itl", "p50_e2el")
INTERVAL = 1.645  # standard errors on either side for 90 % confidence


def fit_profile(run: Run, flags: EngineFlags, *, hold_out: Sequence[int] = (), name: str = "") -> Profile:
    """Fit a measured run of a server with `flags`.

    Closed-loop levels whose concurrency is in `hold_out` do not enter the fit; their prediction errors judge it.
    Raises `FitError` if the run holds too little.
    """
    kept_out = [level for level in run.levels if _held_out(level, hold_out)]
    used = [level for level in run.levels if not _held_out(level, hold_out)]
    if not used:
        raise FitError("every level is held out; leave some to fit")
    fit = fit_step_time(used, flags)
    server = run.server
    profile = Profile(
        name=name or str(server.get("model", "server")),
        model=str(server.get("model", "unknown")),
        gpu=str(server["gpu"]) if server.get("gpu") else None,
        engine_version=flags.engine_version,
        kv_bytes_per_token=_positive_int(server.get("kv_bytes_per_token")),
        engine_flags=flags,
        coefficients=_coefficients(fit),
        measured_range=_measured_range(used, flags, fit),
        assumed=[
            f"{SERIAL_SHARE:.0%} of the host time of a request is spent in the API server one request after the other"
        ],
        provenance=Provenance(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            capsim_version=_capsim_version(),
            source=f"measured at {server.get('url', 'a server')} from {run.started_at}",
        ),
    )
    return profile.model_copy(update={"fit": _errors(run, used, profile), "hold_out": _errors(run, kept_out, profile)})


def _positive_int(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _held_out(level: Level, hold_out: Sequence[int]) -> bool:
    """Lone prompts at concurrency 1 always enter the fit; only they show what a prompt costs by itself."""
    return level.workload.concurrency in hold_out and level.workload.concurrency != 1


def _coefficients(fit: StepTimeFit) -> Coefficients:
    step_time = {
        name: _coefficient(item.value, item.stderr, item.dropped)
        for name, item in fit.coefficients.items()
        if name not in HOST_TERMS
    }
    host = fit.coefficients["per_request"]
    shares = {"per_request": 1 - SERIAL_SHARE, "per_request_serial": SERIAL_SHARE}
    host_time = {
        name: _coefficient(share * host.value, share * host.stderr, host.dropped) for name, share in shares.items()
    }
    prompt = fit.coefficients["per_prompt_token"]
    host_time["per_prompt_token"] = _coefficient(prompt.value, prompt.stderr, prompt.dropped)
    noise = [_rounded(value) for value in fit.gap_noise]
    return Coefficients(step_time=step_time, host_time=host_time, gap_noise=noise, correlations=_correlations(fit))


def _correlations(fit: StepTimeFit) -> list[tuple[str, str, float]]:
    """Those that matter. Both parts of a request's host time are one fitted number, so they move together."""
    pairs = [(one, other, round(value, 3)) for one, other, value in fit.correlations if abs(value) >= 0.01]
    twins = [(_serial(one), _serial(other), value) for one, other, value in pairs if "per_request" in (one, other)]
    together = [] if fit.coefficients["per_request"].dropped else [("per_request", "per_request_serial", 1.0)]
    return [*pairs, *twins, *together]


def _serial(name: str) -> str:
    return "per_request_serial" if name == "per_request" else name


def _coefficient(value: float, stderr: float, dropped: bool) -> Coefficient:
    if dropped:
        return Coefficient(value=0.0, note="not told from zero by these measurements")
    low, high = max(0.0, value - INTERVAL * stderr), value + INTERVAL * stderr
    return Coefficient(value=_rounded(value), stderr=_rounded(stderr), low=_rounded(low), high=_rounded(high))


def _rounded(seconds: float) -> float:
    """Six digits: more than any measurement gives, and a profile stays readable."""
    return float(f"{seconds:.6g}")


def _measured_range(levels: Sequence[Level], flags: EngineFlags, fit: StepTimeFit) -> MeasuredRange:
    """The conditions that the observations cover."""
    rows = observations(levels, flags, fit.host_time.per_request_serial).terms
    sequences, chunk = rows[:, 1] / rows[:, 0], rows[:, 3] / rows[:, 0]
    prompts = [int(size) for level in levels for size in level.completed["prompt_tokens"]]
    totals = [
        int(size) for level in levels for size in (level.completed["prompt_tokens"] + level.completed["output_tokens"])
    ]
    clients = [level.workload.concurrency or 1 for level in levels]
    return MeasuredRange(
        concurrency=(min(clients), max(clients)),
        sequences=(1, max(1, round(float(sequences.max())))),
        context_tokens=(min(prompts), max(totals)),
        prompt_chunk_tokens=(min(*prompts, flags.max_num_batched_tokens), max(1, round(float(chunk.max())))),
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


def _capsim_version() -> str:
    try:
        return version("capsim")
    except PackageNotFoundError:
        return ""
