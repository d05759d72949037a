"""A published concurrency sweep of one RTX 4090: fitted up to 8 clients, predicted up to 64.

    python -m benchmarks.rtx4090            the fit, the check, the ceilings, and what the check depends on
    python -m benchmarks.rtx4090 --write    also writes the shipped profile

The report (Qwen2.5-7B in bfloat16, vLLM 0.27.1, 1,024 tokens in and 256 out, closed loop) states a few figures a level.
Those for 1 to 8 clients, what it says of memory, and facts of the hardware make the profile. Those for 16, 32 and 64
clients are the check; `fit_figures` never sees them.

What had to be assumed is in `ASSUMED`. Two choices were made knowing the check; the last table shows what they decide:

- Requests per level. The report states their sum alone. Their number decides which of the start burst's requests is the
  99th percentile of TTFT, and how much of a level is its end, where fewer gaps hold a prompt.
- Requests that are sent in one moment reach the engine together. A real vLLM hands them over one by one, and the first
  prompt has a step to itself. Then 10.0 % of the gaps at 64 clients hold a whole chunk of 2,048 tokens, and not 10.2 %,
  and the 90th percentile falls off the edge of these. No other check depends on it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from calibration.aggregate_fit import HOST_TERMS, AggregateFit, fit_figures
from calibration.roofline import GpuFacts, ModelFacts, Prior, roofline_priors
from calibration.trial import Figure, figure_of
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.workload import ClosedLoop, Length, Shape, Workload
from simulator.profile import Coefficient, Coefficients, LevelErrors, MeasuredRange, Profile, Provenance
from simulator.results.run import Level

PROFILE = Path(__file__).parents[1] / "scenarios" / "profiles" / "rtx4090-qwen2.5-7b.yaml"

MODEL = ModelFacts(
    parameters=7_615_616_512,
    embedding_parameters=152_064 * 3_584,
    layers=28,
    attention_heads=28,
    kv_heads=4,
    head_dim=128,
)
GPU = GpuFacts("RTX 4090", memory_bandwidth=1008e9, dense_operations=165.2e12)
KV_BYTES_PER_TOKEN = int(MODEL.kv_bytes_per_token)
BIGGER_KV_MEMORY = 6_569_114_112  # bytes; vLLM's own suggestion in the report's log

FLAGS = EngineFlags(
    max_num_seqs=128,
    max_num_batched_tokens=2048,
    max_model_len=32768,
    num_gpu_blocks=86_896 // 16,
    block_size=16,
    async_scheduling=True,
    engine_version="0.27.1",
)
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
NUM_PROMPTS = (44, 44, 44, 80, 160, 320, 640)  # 1,332: 10 a client, the rest shared by the three smallest levels

ASSUMED = [
    "max_num_batched_tokens 2048 and asynchronous scheduling, the defaults of vLLM 0.27 on a card of 24 GB; "
    "max_model_len 32768; block size 16. The report states none of them.",
    "requests per level: the report states 1,332 in all; taken as 10 a client and at least 44",
    "every prompt has exactly 1,024 tokens and shares no prefix with another",
    "requests that are sent in one moment reach the engine together",
    "a mixed step costs more for each running sequence: measured on other cards, not seen up to 8 clients",
]


def level(clients: int, num_prompts: int | None = None, input_len: Length | None = None) -> Workload:
    """A level of the report's sweep."""
    shape = Shape(input_len or Length.fixed(1024), Length.fixed(256))
    return Workload(ClosedLoop(clients), (shape,), num_prompts or NUM_PROMPTS[CONCURRENCY.index(clients)])


# Uncertainties: half a unit of the last digit stated, and 1 % for what a second run of the level would change; the
# throughput and decode time of one client hardly change.
STATED = (
    Figure(level(1), "output_throughput", 61.48, 0.002),
    Figure(level(1), "p50_itl", 15.9e-3, 0.003),
    Figure(level(1), "p50_decode_time", 4.06, 0.0015),
    Figure(level(1), "p99_ttft", 0.11, 0.06),
    Figure(level(2), "output_throughput", 118.1, 0.01),
    Figure(level(8), "p99_itl", 99.6e-3, 0.01),
)

# What no data sheet tells, from measurements that others published.
ELSEWHERE = {
    "per_sequence": Prior(
        46e-6, 0.35, "37 to 55 us in a run of Llama-3.1-8B on an RTX 4090 (github casys-kaist/LLMServingSim)"
    ),
    "mixed_per_sequence": Prior(
        130e-6,
        0.5,
        "120 to 140 us on an RTX PRO 4500 (github akamaslabs/vllm-benchmark): full CUDA graphs serve pure decode only",
    ),
    "per_request": Prior(8e-3, 0.6, "vLLM's API server and client with an engine whose step times are known"),
}


@dataclass(frozen=True)
class Check:
    """A stated figure that the fit has not seen, and how close the prediction shall come; no goal if None."""

    clients: int
    metric: str
    value: float
    goal: float | None


CHECKS = (
    Check(16, "output_throughput", 683, 0.04),
    Check(32, "output_throughput", 1031, 0.04),
    Check(64, "output_throughput", 1402, 0.04),
    Check(16, "p50_itl", 17.4e-3, 0.04),
    Check(64, "p50_itl", 22.7e-3, 0.04),
    Check(16, "p99_ttft", 1.39, 0.06),
    Check(32, "p99_ttft", 2.85, 0.06),
    Check(64, "p99_ttft", 5.75, 0.06),
    Check(64, "p90_itl", 188e-3, 0.06),
    Check(64, "p50_decode_time", 10.92, 0.04),
    Check(16, "p99_itl", 10.3 * 17.4e-3, None),
    # the tail of undisturbed steps, whose noise is not modelled; it says that fewer than 1 % of gaps hold a prompt
    Check(4, "p99_itl", 17.4e-3, None),
)


def fit() -> AggregateFit:
    """The fit to `STATED`."""
    return fit_figures(STATED, FLAGS, roofline_priors(MODEL, GPU) | ELSEWHERE)


@dataclass(frozen=True)
class Variant:
    """The sweep under another assumption than the shipped one."""

    name: str
    num_prompts: Sequence[int] = NUM_PROMPTS
    input_len: Length = field(default_factory=lambda: Length.fixed(1024))
    step_time: Mapping[str, float] = field(default_factory=dict)
    host_time: Mapping[str, float] = field(default_factory=dict)


VARIANTS = (
    Variant("as shipped"),
    Variant("each level as long as the others, about 83 s", num_prompts=(20, 40, 76, 136, 229, 352, 479)),
    Variant("190 requests at every level", num_prompts=(190, 190, 190, 190, 190, 191, 191)),
    Variant("6 requests a client, at least 151", num_prompts=(151, 151, 151, 151, 152, 192, 384)),
    Variant("requests reach the engine one by one, 1 ms", host_time={"per_request_serial": 1e-3}),
    Variant("prompts of 1,014 to 1,034 tokens", input_len=Length(1014, 1034)),
    Variant("prompts of 1,054 tokens (chat template)", input_len=Length.fixed(1054)),
    Variant("mixed steps cost nothing more", step_time={"mixed_per_sequence": 0.0}),
)


def predict(step_time: StepTime, host_time: HostTime, variant: Variant = VARIANTS[0]) -> dict[int, Level]:
    """Every level of the sweep, by its number of clients."""
    step_time, host_time = replace(step_time, **variant.step_time), replace(host_time, **variant.host_time)
    return {
        clients: simulate_level(level(clients, requests, variant.input_len), FLAGS, step_time, host_time)
        for clients, requests in zip(CONCURRENCY, variant.num_prompts, strict=True)
    }


def check(levels: Mapping[int, Level]) -> list[float]:
    """(predicted - stated) / stated of every one of `CHECKS`."""
    return [figure_of(levels[item.clients], item.metric) / item.value - 1 for item in CHECKS]


def ceiling(flags: EngineFlags, tokens: int = 1280) -> int:
    """Requests of `tokens` tokens whose KV cache fits the pool at full length; the last token needs no place in it."""
    return flags.usable_blocks // -(-(tokens - 1) // flags.block_size)


def bigger_pool() -> EngineFlags:
    """The flags with ``--kv-cache-memory=6569114112``."""
    return replace(FLAGS, num_gpu_blocks=BIGGER_KV_MEMORY // (FLAGS.block_size * KV_BYTES_PER_TOKEN))


def profile_of(fitted: AggregateFit) -> Profile:
    """The profile that is shipped."""
    levels = predict(fitted.step_time, fitted.host_time)
    in_fit = [(figure.workload, figure.metric, error) for figure, error in zip(STATED, fitted.errors, strict=True)]
    kept_out = [
        (level(item.clients), item.metric, error)
        for item, error in zip(CHECKS, check(levels), strict=True)
        if item.goal is not None
    ]
    terms = {name: _coefficient(fitted, name) for name in fitted.terms}
    return Profile(
        name="rtx4090-qwen2.5-7b",
        model="Qwen/Qwen2.5-7B",
        gpu="NVIDIA GeForce RTX 4090",
        engine_version=FLAGS.engine_version,
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        gpu_memory_utilization=0.9,  # as the report states
        engine_flags=FLAGS,
        coefficients=Coefficients(
            step_time={name: term for name, term in terms.items() if name not in HOST_TERMS},
            host_time={name: term for name, term in terms.items() if name in HOST_TERMS},
        ),
        measured_range=MeasuredRange(
            concurrency=(1, 8), sequences=(1, 8), context_tokens=(1024, 1280), prompt_chunk_tokens=(1024, 2048)
        ),
        fit=_level_errors(in_fit),
        hold_out=_level_errors(kept_out),
        assumed=ASSUMED,
        provenance=Provenance(
            source="a published report, 'Concurrency Sweep, RTX 4090, Qwen2.5-7B': its figures for 1 to 8 clients, "
            "fitted by python -m benchmarks.rtx4090 --write"
        ),
    )


def _coefficient(fitted: AggregateFit, name: str) -> Coefficient:
    """A term of the fit; one that the figures do not identify is marked as assumed."""
    term = fitted.terms[name]
    low, high = term.interval()
    return Coefficient(
        value=_rounded(term.value),
        stderr=_rounded(term.stderr),
        low=_rounded(low),
        high=_rounded(high),
        origin="measured" if term.identified else "assumed",
        note="" if term.identified else term.prior.source,
    )


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _level_errors(errors: Sequence[tuple[Workload, str, float]]) -> list[LevelErrors]:
    return [
        LevelErrors(
            level=f"{workload.arrivals}, {workload.shapes[0]}",
            num_prompts=workload.num_prompts,
            errors={metric: round(error, 4) for other, metric, error in errors if other == workload},
        )
        for workload in dict.fromkeys(workload for workload, _, _ in errors)
    ]


def report(fitted: AggregateFit) -> Iterator[str]:
    """The benchmark's output, line by line."""
    yield from _fit_lines(fitted)
    yield from _check_lines(fitted)
    yield "\nCeilings, requests of 1,280 tokens (stated: 67 and 89)"
    for flags in (FLAGS, bigger_pool()):
        yield f"  KV pool of {flags.kv_tokens:>7,} tokens: {ceiling(flags)}"
    yield from _sensitivity_lines(fitted)


def _fit_lines(fitted: AggregateFit) -> Iterator[str]:
    yield "Fit, figures for 1 to 8 clients"
    yield f"  {'figure':<26}{'stated':>10}{'fitted':>10}{'error':>9}"
    for figure, value, error in zip(fitted.figures, fitted.reproduced, fitted.errors, strict=True):
        shown = _shown(figure.metric, figure.value), _shown(figure.metric, value)
        yield f"  {figure!s:<26}{shown[0]:>10}{shown[1]:>10}{error:>+9.1%}"
    yield f"\n  {'coefficient':<26}{'value':>10}{'stderr':>10}{'prior':>10}"
    for name, term in fitted.terms.items():
        numbers = "".join(f"{_seconds(value):>10}" for value in (term.value, term.stderr, term.prior.value))
        yield f"  {name:<26}{numbers}  {'measured' if term.identified else 'assumed: ' + term.prior.source}"


def _check_lines(fitted: AggregateFit) -> Iterator[str]:
    levels = predict(fitted.step_time, fitted.host_time)
    yield "\nCheck, figures that the fit has not seen"
    yield f"  {'figure':<26}{'stated':>10}{'predicted':>11}{'error':>9}{'goal':>8}"
    for item, error in zip(CHECKS, check(levels), strict=True):
        shown = _shown(item.metric, item.value), _shown(item.metric, item.value * (1 + error))
        verdict = "" if item.goal is None else f"{item.goal:>7.0%}  {'ok' if abs(error) <= item.goal else 'MISSED'}"
        yield f"  {f'C={item.clients} {item.metric}':<26}{shown[0]:>10}{shown[1]:>11}{error:>+9.1%} {verdict}".rstrip()


def _sensitivity_lines(fitted: AggregateFit) -> Iterator[str]:
    """The checks that have a goal, under other assumptions with the same coefficients."""
    yield "\nSensitivity: errors of the check under other assumptions, in %, with a star where the goal is missed"
    judged = [item for item in CHECKS if item.goal is not None]
    for titles in ([_SHORT.get(item.metric, item.metric) for item in judged], [f"C={item.clients}" for item in judged]):
        yield f"  {'':<46}" + "".join(f"{title:>10} " for title in titles).rstrip()
    for variant in VARIANTS:
        errors = check(predict(fitted.step_time, fitted.host_time, variant))
        cells = [
            f"{100 * error:>+10.1f}{'*' if abs(error) > item.goal else ' '}"
            for item, error in zip(CHECKS, errors, strict=True)
            if item.goal is not None
        ]
        yield f"  {variant.name:<46}{''.join(cells)}".rstrip()


_SHORT = {"output_throughput": "tokens/s", "p50_decode_time": "decode"}


def _shown(metric: str, value: float) -> str:
    if metric == "output_throughput":
        return f"{value:,.1f}/s"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def _seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def main() -> None:
    parser = argparse.ArgumentParser(description="The published sweep of one RTX 4090: fit and check.")
    parser.add_argument("--write", action="store_true", help=f"write {PROFILE.name}")
    arguments = parser.parse_args()
    fitted = fit()
    for line in report(fitted):
        print(line)
    if arguments.write:
        PROFILE.parent.mkdir(parents=True, exist_ok=True)
        profile_of(fitted).save(PROFILE)
        print(f"\nwrote {PROFILE.name}")


if __name__ == "__main__":
    main()
