"""Loads of the sources, and what is believed of a model on a GPU before any of its rows is seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from calibration.roofline import Efficiency, GpuFacts, ModelFacts, Prior, roofline_priors
from simulator.loads.workload import ClosedLoop, Length, Load, OpenLoop, Shape, Workload

LLAMA_3_1_8B = ModelFacts(8_030_261_248, 128_256 * 4096, 32, 32, 8, 128)
QWEN_2_7B = ModelFacts(7_615_616_512, 152_064 * 3584, 28, 28, 4, 128)
QWEN_2_5_1_5B = ModelFacts(1_543_714_304, 151_936 * 1536, 28, 12, 2, 128, tied_embeddings=True)
QWEN_3_4B = ModelFacts(4_022_468_096, 151_936 * 2560, 36, 32, 8, 128, tied_embeddings=True)
QWEN_3_8B = ModelFacts(8_190_735_360, 151_936 * 4096, 36, 32, 8, 128)

# A card that nobody has measured: what kernels reach is known to a third. Reading KV is plain streaming, known better;
# it is also what a single mix of lengths cannot tell from a cost of each sequence.
UNKNOWN = Efficiency(weights=0.85, kv_cache=0.85, compute=0.65, attention=0.5)
DOUBT = {"constant": 0.3, "per_kv_token": 0.1, "per_prefill_token": 0.3, "per_prefill_attention": 0.5}


def closed(input_len: int, output_len: int, clients: int, num_prompts: int, spread: float = 0.0) -> Workload:
    """A closed loop; outputs lie within `spread` of their length."""
    shape = Shape(Length.fixed(input_len), Length.jittered(output_len, spread))
    return Workload(ClosedLoop(clients), (shape,), num_prompts)


def poisson(input_len: int, output_len: int, rate: float, num_prompts: int) -> Workload:
    """Fixed lengths, `rate` requests a second."""
    return Workload(OpenLoop(rate), (Shape(Length.fixed(input_len), Length.fixed(output_len)),), num_prompts)


def burst(input_len: int, output_len: int, num_prompts: int) -> Workload:
    """All at once."""
    return poisson(input_len, output_len, float("inf"), num_prompts)


@dataclass(frozen=True, eq=False)
class ClosedRequests(Load):
    """Requests with lengths of their own, sent by `clients` clients."""

    name: str
    clients: int
    prompt_tokens: npt.NDArray[np.int64]
    generated_tokens: npt.NDArray[np.int64]

    @property
    def num_prompts(self) -> int:
        return len(self.prompt_tokens)

    @property
    def concurrency(self) -> int:
        return self.clients

    def lengths(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return self.prompt_tokens, self.generated_tokens

    def arrival_times(self) -> None:
        return None


def priors_of(model: ModelFacts, gpu: GpuFacts, changed: Mapping[str, Prior] | None = None) -> dict[str, Prior]:
    """Priors of a dense model on a GPU of which only the data sheet is known; `changed` adds terms or replaces them."""
    priors = {
        name: Prior(prior.value, DOUBT[name], prior.source)
        for name, prior in roofline_priors(model, gpu, UNKNOWN).items()
    }
    priors["per_sequence"] = Prior(20e-6, 0.8, "15 to 55 us on other cards")
    priors["mixed_per_sequence"] = Prior(10e-6, 1.0, "0 to 140 us on other cards")
    priors["per_request"] = Prior(8e-3, 0.6, "vLLM's API server and client with an engine whose step times are known")
    priors["weights"] = Prior(
        model.weight_bytes_read / gpu.memory_bandwidth, 0.15, f"weights at the {gpu.name}'s peak bandwidth"
    )
    return priors | (changed or {})
