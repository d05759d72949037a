"""A profile on another GPU, or on several: which terms of a step move with bandwidth, which with computing, which stay.

Nothing of this is measured, so every term gets more uncertain, by `DOUBT`. Move first, then split over GPUs. A profile
whose fit found the term `weights` moves best: without it the overlap of computing and reading stays as on the old card.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from simulator.engine.engine_flags import EngineFlags
from simulator.hardware.gpus import Gpu, GpuError, find_gpu
from simulator.hardware.kv_layout import kv_layout
from simulator.hardware.memory import (
    MemoryAccountError,
    MemoryFlags,
    account_around,
    account_under,
    estimated_account,
    kv_layout_of,
    pool_of,
)
from simulator.hardware.model_config import ModelArchitecture, ModelError, find_model
from simulator.profile import Coefficient, Coefficients, LevelErrors, Profile

Z90 = 1.645  # standard errors from the middle to either end of a 90 % interval

# Relative standard error that a move adds to each term. Benchmarks: benchmarks/accuracy/other_gpu.py.
DOUBT = {
    "constant": 0.12,
    "weights": 0.12,
    "per_kv_token": 0.10,
    "per_prefill_token": 0.15,
    "per_prefill_attention": 0.30,
    "per_sequence": 0.40,
    "mixed_per_sequence": 0.50,
    "per_padded_sequence": 0.40,
    "without_graph": 0.30,
    "per_request": 0.20,
    "per_request_serial": 0.20,
    "per_prompt_token": 0.20,
}
# Of tensor parallelism, seconds. NVLink and launches: Mistral-7B on 1, 2, 4 and 8 A100, vLLM 0.6, two requests at once:
# 10.8, 7.1, 4.7 and 3.6 ms a token (github LambdaLabsML/vllm-benchmark). The other links are a guess.
ALL_REDUCE_LATENCY = {"nvlink": 17e-6, "infinity-fabric": 25e-6, "pcie": 40e-6}
UNSPLIT_PER_LAYER = 35e-6  # launches, norms and what else every rank does as a single GPU would
ALL_REDUCES = 2  # of each layer: after attention and after the MLP
COMMUNICATION_DOUBT = 0.5


@dataclass(frozen=True)
class Ratios:
    """Time on the new GPU over time on the old one."""

    weights: float
    kv_cache: float
    compute: float

    @property
    def mixed(self) -> float:
        """Of work that is partly computing and partly launching kernels: between the ratio and one."""
        return math.sqrt(self.compute)


def ratios(old: Gpu, new: Gpu, weights: str = "bf16") -> Ratios:
    """How much longer things take on `new`. KV cache is read as long streams, at nearly the whole bandwidth."""
    bandwidth = old.memory_bandwidth / new.memory_bandwidth
    compute = old.dense_operations(weights) / new.dense_operations(weights)
    return Ratios(
        weights=bandwidth * old.reached_bandwidth / new.reached_bandwidth,
        kv_cache=bandwidth,
        compute=compute * old.reached_compute / new.reached_compute,
    )


def move(
    profile: Profile,
    to_gpu: Gpu | str,
    model: ModelArchitecture | None = None,
    from_gpu: Gpu | str | None = None,
    flags: EngineFlags | None = None,
    gpu_memory_utilization: float | None = None,
) -> Profile:
    """What the profile's server would be on `to_gpu`, with `flags` if they shall differ from the profile's.

    Weights and KV cache move with the bandwidth, prompts with the rate of computing; what the host does stays. The KV
    pool is what the card leaves at the same utilization, whatever `flags` say of it: that of the measured server,
    vLLM's default unless given. The model and the GPU are those that the profile names unless given. Raises
    `ModelError` and `GpuError` where they are unknown, `MemoryAccountError` where the model or a request of
    max_model_len does not fit.
    """
    old, new = _gpu(profile, from_gpu), find_gpu(to_gpu) if isinstance(to_gpu, str) else to_gpu
    model = model or _model(profile)
    fp8 = model.quantization is not None and model.quantization.bytes_per_parameter == 1
    ratio = ratios(old, new, "fp8" if fp8 else "bf16")
    read = _weights_seconds(profile, model, old)
    factors = {
        "constant": 1 + read / profile.step_time.constant * (ratio.weights - 1) if profile.step_time.constant else 1.0,
        "weights": ratio.weights,
        "per_kv_token": ratio.kv_cache,
        "per_prefill_token": ratio.compute,
        "per_prefill_attention": ratio.compute,
        "per_sequence": ratio.mixed,
        "mixed_per_sequence": ratio.mixed,
        "per_padded_sequence": ratio.mixed,
    }
    flags, pool = _flags_on(profile, flags or profile.engine_flags, model, old, new, gpu_memory_utilization)
    note = f"moved from {old.name} to {new.name}"
    assumed = [
        f"the step time on {new.name} is that on {old.name}, weights {_times(ratio.weights)}, KV cache "
        f"{_times(ratio.kv_cache)} and prompts {_times(ratio.compute)} by data sheets and the share of them that vLLM "
        "reaches on other servers; the host is as fast as the measured one",
        pool,
    ]
    return _moved(profile, factors, note, assumed).model_copy(
        update={
            "name": f"{profile.name}-on-{new.name.lower().replace(' ', '-')}",
            "gpu": new.name,
            "engine_flags": flags,
        }
    )


def with_tensor_parallel(
    profile: Profile,
    ranks: int,
    model: ModelArchitecture | None = None,
    gpu: Gpu | str | None = None,
    gpu_memory_utilization: float | None = None,
) -> Profile:
    """What the profile's server, measured on one GPU, would be on `ranks` of them with --tensor-parallel-size.

    Weights, KV heads and computing are split; each layer sums the ranks' results twice, which costs latency for each
    step and link bandwidth for each token.
    """
    model, gpu = model or _model(profile), _gpu(profile, gpu)
    model.check_tensor_parallel(ranks)
    if ranks == 1:
        return profile
    step = profile.step_time
    latency, per_token = all_reduce_cost(model, gpu, ranks)
    share = model.weight_bytes_read(ranks) / model.weight_bytes_read()
    heads = kv_layout(model, tensor_parallel=ranks).block_bytes / kv_layout(model).block_bytes
    read = max(_weights_seconds(profile, model, gpu) - UNSPLIT_PER_LAYER * model.layers, 0.0)
    constant = step.constant - read + read * share + latency
    factors = {
        "constant": constant / step.constant if step.constant else 1.0,
        "weights": share,
        "per_kv_token": heads,
        "per_prefill_token": 1 / ranks + per_token / step.per_prefill_token if step.per_prefill_token else 1.0,
        "per_prefill_attention": 1 / ranks,
        "per_sequence": 1 + per_token / step.per_sequence if step.per_sequence else 1.0,
    }
    flags, pool = _flags_on(profile, profile.engine_flags, model, gpu, gpu, gpu_memory_utilization, ranks)
    note = f"split over {ranks} GPUs"
    assumed = [
        f"--tensor-parallel-size {ranks} over {gpu.link}: an all-reduce takes {latency / _all_reduces(model) * 1e6:.0f}"
        f" us and {per_token * 1e6:.2f} us a token more, measured on A100 with NVLink, else by the link's data sheet",
        pool,
    ]
    doubt = COMMUNICATION_DOUBT * latency / constant
    return _moved(profile, factors, note, assumed, {"constant": math.hypot(DOUBT["constant"], doubt)}).model_copy(
        update={
            "name": f"{profile.name}-tp{ranks}",
            "gpu": f"{ranks} x {profile.gpu}",
            "kv_bytes_per_token": kv_layout(model, 16, _kv_cache_dtype(profile, model), ranks).bytes_per_token,
            "engine_flags": flags,
        }
    )


def all_reduce_cost(model: ModelArchitecture, gpu: Gpu, ranks: int) -> tuple[float, float]:
    """Seconds that communication adds to a step, and to each token in it.

    A ring moves 2 (n - 1) / n times the data through every link, each way at half of its bandwidth.
    """
    if ranks == 1:
        return 0.0, 0.0
    sent = 2 * (ranks - 1) / ranks * model.hidden_size * model.dtype_bytes
    each_way = gpu.link_bandwidth / 2
    times = _all_reduces(model)
    return times * ALL_REDUCE_LATENCY[gpu.link], times * sent / each_way


def _all_reduces(model: ModelArchitecture) -> int:
    return ALL_REDUCES * model.layers + 1  # and one for the embedding


def _gpu(profile: Profile, gpu: Gpu | str | None) -> Gpu:
    if isinstance(gpu, Gpu):
        return gpu
    name = gpu or profile.gpu
    if name is None:
        raise GpuError(f"the profile {profile.name} does not tell its GPU; name the one it was measured on")
    return find_gpu(name)


def _model(profile: Profile) -> ModelArchitecture:
    try:
        return find_model(profile.model)
    except ModelError:
        raise ModelError(
            f"the architecture of {profile.model} is not known; give the path of its config.json"
        ) from None


def _weights_seconds(profile: Profile, model: ModelArchitecture, gpu: Gpu) -> float:
    """Of the constant, the part in which weights are read; what is beyond is launching and waiting, which stays."""
    read = model.weight_bytes_read() / (gpu.memory_bandwidth * gpu.reached_bandwidth)
    return min(max(read, profile.step_time.weights), profile.step_time.constant)


def _times(ratio: float) -> str:
    return f"x {ratio:.2f}"


# --- terms and their uncertainty


def _moved(
    profile: Profile,
    factors: Mapping[str, float],
    note: str,
    assumed: list[str],
    doubt: Mapping[str, float] | None = None,
) -> Profile:
    """The profile with its terms times `factors`, more uncertain. Errors of levels stay, as those on the old GPU."""
    old = profile.coefficients
    step = {name: _changed(name, term, factors.get(name, 1.0), note, doubt) for name, term in old.step_time.items()}
    same_host = "as on the measured host"
    host = {name: _changed(name, term, 1.0, same_host, doubt) for name, term in old.host_time.items()}
    terms = old.step_time | old.host_time
    kept = {name: _kept_share(terms[name], new) for name, new in (step | host).items()}
    correlations = [
        (one, other, value * kept[one] * kept[other])
        for one, other, value in old.correlations
        if one in kept and other in kept
    ]
    coefficients = Coefficients(step_time=step, host_time=host, correlations=correlations, gap_noise=old.gap_noise)
    source = "; ".join(part for part in (profile.provenance.source, note) if part)
    return profile.model_copy(
        update={
            "coefficients": coefficients,
            "fit": [_on(profile, level) for level in profile.fit],
            "hold_out": [_on(profile, level) for level in profile.hold_out],
            "assumed": [*profile.assumed, *assumed],
            "provenance": profile.provenance.model_copy(update={"source": source}),
        }
    )


def _on(profile: Profile, level: LevelErrors) -> LevelErrors:
    return level.model_copy(update={"level": f"{level.level}, on {profile.gpu}"})


def _changed(name: str, term: Coefficient, factor: float, note: str, doubt: Mapping[str, float] | None) -> Coefficient:
    value = term.value * factor
    if value == 0:
        return term
    relative = math.hypot((term.stderr or 0.0) / term.value, (doubt or {}).get(name, DOUBT.get(name, 0.2)))
    spread = math.exp(Z90 * relative)
    return Coefficient(
        value=value,
        stderr=value * relative,
        low=value / spread,
        high=value * spread,
        origin="assumed",
        note=f"{term.note}; {note}" if term.note else note,
    )


def _kept_share(old: Coefficient, new: Coefficient) -> float:
    """How much of the new relative error is the old one, which was correlated with others."""
    if not (old.stderr and new.stderr and old.value and new.value):
        return 0.0
    return min((old.stderr / old.value) / (new.stderr / new.value), 1.0)


# --- the KV pool


def _kv_cache_dtype(profile: Profile, model: ModelArchitecture) -> str:
    """The type of the measured server's cache: one byte a value where a token has half of what 16 bits take."""
    half = 2 * (profile.kv_bytes_per_token or 0) == kv_layout(model).bytes_per_token
    return "fp8" if half else "auto"


def _flags_on(
    profile: Profile,
    flags: EngineFlags,
    model: ModelArchitecture,
    old: Gpu,
    new: Gpu,
    utilization: float | None,
    ranks: int = 1,
) -> tuple[EngineFlags, str]:
    """`flags` with the pool that `ranks` of the new card leave, and a sentence on where it comes from."""
    given: dict[str, object] = {"kv_cache_dtype": _kv_cache_dtype(profile, model)}
    if utilization is not None:
        given["gpu_memory_utilization"] = utilization
    before = MemoryFlags.of(profile.engine_flags, **given)
    after = MemoryFlags.of(flags, **given, tensor_parallel_size=ranks)
    layout = kv_layout_of(model, after)
    try:
        known = profile.engine_flags.num_gpu_blocks * kv_layout_of(model, before).block_bytes
        around = account_around(known, before, model, old)
        moved = replace(around, total=new.memory_bytes, free=new.memory_bytes)
        account = account_under(moved, before, after, model, layout)
        origin = f"that on one {old.name} and the difference in memory"
    except MemoryAccountError:
        account = estimated_account(model, new, after)
        origin = f"what {ranks} x {new.name} leave by estimate"
    pool = pool_of(account, after, layout)
    sentence = f"the KV pool of {pool.tokens:,} tokens is {origin}, at utilization {after.gpu_memory_utilization:g}"
    return flags.changed(num_gpu_blocks=pool.simulated_blocks), sentence
