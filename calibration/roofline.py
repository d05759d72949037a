"""Step-time coefficients from data sheets: what is known of a model on a GPU before anything is measured.

A term that moves memory takes bytes / bandwidth, one that computes takes operations / rate, each divided by the share
of the peak that real kernels reach. The terms are those of `simulator.engine.step_time.StepTime`, so a profile can be
moved to another GPU term by term. What launches kernels or runs on the host has no roofline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from simulator.engine.step_time import StepTime
from simulator.hardware.gpus import GpuError, find_gpu


@dataclass(frozen=True)
class ModelFacts:
    """A dense decoder-only transformer.

    Attributes
        parameters: all of them
        embedding_parameters: vocabulary x hidden size, the size of the input table and of the output layer
        tied_embeddings: whether the two are one
        layers, attention_heads, kv_heads, head_dim: as in the model's ``config.json``
        bytes_per_value: of weights and KV cache; 2 for bfloat16
    """

    parameters: int
    embedding_parameters: int
    layers: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    tied_embeddings: bool = False
    bytes_per_value: float = 2.0

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_value

    @property
    def weight_bytes_read(self) -> float:
        """What every step reads: all weights but the input table, of which it reads a row a token."""
        skipped = 0 if self.tied_embeddings else self.embedding_parameters
        return (self.parameters - skipped) * self.bytes_per_value

    @property
    def prompt_token_operations(self) -> float:
        """A multiply-add counts as two; the output layer is left out, since only a prompt's last token passes it."""
        tables = 1 if self.tied_embeddings else 2
        return 2.0 * (self.parameters - tables * self.embedding_parameters)

    @property
    def attention_operations(self) -> float:
        """Of one token that attends to one token: two for the score and two for the value, of every head and layer."""
        return 4.0 * self.layers * self.attention_heads * self.head_dim


@dataclass(frozen=True)
class GpuFacts:
    """Peaks from the data sheet.

    Attributes
        memory_bandwidth: bytes/s
        dense_operations: operations/s of the tensor cores in the model's type, without sparsity
    """

    name: str
    memory_bandwidth: float
    dense_operations: float


@dataclass(frozen=True)
class Efficiency:
    """Shares of the peak that kernels reach.

    Sources: weights, KV cache and compute from a run of Llama-3.1-8B on an RTX 4090 (vLLM 0.19, 300 ShareGPT requests,
    in github casys-kaist/LLMServingSim), to which this simulator was fitted: 15.6 to 17.3 ms a step, 0.122 to 0.137 us
    a KV token and 89 to 92 us a prompt token, against 14.9 ms, 0.130 us and 84.5 us at the peak. Attention: 50 to 73 %
    on an A100 in the paper on FlashAttention-2 (arXiv 2307.08691), the upper half for long prompts and heads of 128.
    """

    weights: float = 0.89
    kv_cache: float = 1.0
    compute: float = 0.93
    attention: float = 0.7


KV_SHARE, KV_DOUBT = 0.85, 0.2  # of the bandwidth, on a card that nobody has measured, and its relative uncertainty


@dataclass(frozen=True)
class Prior:
    """What is believed of a coefficient before measuring: seconds, a relative standard deviation, and the reason."""

    value: float
    uncertainty: float
    source: str


def roofline_step_time(model: ModelFacts, gpu: GpuFacts, efficiency: Efficiency | None = None) -> StepTime:
    """The four terms that a data sheet bounds; the others are zero."""
    share = efficiency or Efficiency()
    return StepTime(
        constant=model.weight_bytes_read / (gpu.memory_bandwidth * share.weights),
        per_kv_token=model.kv_bytes_per_token / (gpu.memory_bandwidth * share.kv_cache),
        per_prefill_token=model.prompt_token_operations / (gpu.dense_operations * share.compute),
        per_prefill_attention=model.attention_operations / (gpu.dense_operations * share.attention),
    )


def roofline_priors(model: ModelFacts, gpu: GpuFacts, efficiency: Efficiency | None = None) -> dict[str, Prior]:
    """`roofline_step_time` as priors, as uncertain as the efficiencies are from one model or GPU to another."""
    share = efficiency or Efficiency()
    bound = roofline_step_time(model, gpu, share)
    return {
        "constant": Prior(bound.constant, 0.10, f"weights read at {share.weights:.0%} of the {gpu.name}'s bandwidth"),
        "per_kv_token": Prior(
            bound.per_kv_token, 0.15, f"KV cache read at {share.kv_cache:.0%} of the {gpu.name}'s bandwidth"
        ),
        "per_prefill_token": Prior(
            bound.per_prefill_token, 0.10, f"prompt tokens at {share.compute:.0%} of the {gpu.name}'s dense rate"
        ),
        "per_prefill_attention": Prior(
            bound.per_prefill_attention, 0.30, f"attention at {share.attention:.0%} of the {gpu.name}'s dense rate"
        ),
    }


def server_priors(server: Mapping[str, object]) -> dict[str, Prior]:
    """What is known of a measured server's coefficients from the GPU and the KV cache that it tells of, if it does.

    `server` is that of a `simulator.results.run.Run`. A KV token's cost is what short requests of one length cannot
    tell.
    """
    kv_bytes, name = server.get("kv_bytes_per_token"), server.get("gpu")
    if not isinstance(kv_bytes, int) or kv_bytes <= 0 or not name or server.get("tensor_parallel_size", 1) != 1:
        return {}
    try:
        gpu = find_gpu(str(name))
    except GpuError:
        return {}
    source = f"KV cache read at {KV_SHARE:.0%} of the {gpu.name}'s bandwidth"
    return {"per_kv_token": Prior(kv_bytes / (gpu.memory_bandwidth * KV_SHARE), KV_DOUBT, source)}
