"""What data sheets say of GPUs: memory, bandwidth, rate of computing, links. The numbers are in ``gpus.yaml``."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from simulator.yaml_file import DocumentError, Section, read_yaml, suggestion

TABLE = Path(__file__).with_name("gpus.yaml")
GIB = 1 << 30


class GpuError(DocumentError):
    """A GPU that is not known, or a table of GPUs that cannot be read. The message is one line."""


class Gpu(Section):
    """One GPU. Rates are of dense matrices, without sparsity, with sums in 32 bits as vLLM's kernels have them."""

    name: str
    memory_gib: float = Field(gt=0, description="GiB that CUDA or ROCm reports as the device's total")
    memory_bandwidth: float = Field(gt=0, description="bytes per second")
    dense_bf16: float = Field(gt=0, description="operations per second in bfloat16 or float16")
    dense_fp8: float | None = Field(default=None, gt=0, description="operations per second in fp8; none without")
    reached_bandwidth: float = Field(default=0.7, gt=0, le=1, description="share of it that a decode step reaches")
    reached_compute: float = Field(default=0.6, gt=0, le=1, description="share of the dense rate that prompts reach")
    link: Literal["nvlink", "pcie", "infinity-fabric"] = "pcie"
    link_bandwidth: float = Field(gt=0, description="bytes per second to the other GPUs, both ways together")
    names: list[str] = Field(default_factory=list, description="other names, as nvidia-smi or people write them")
    source: str = Field(min_length=1, description="where the numbers come from")
    price_per_hour: float | None = Field(default=None, ge=0, description="what you pay, in your currency")

    @property
    def memory_bytes(self) -> int:
        return round(self.memory_gib * GIB)

    def dense_operations(self, weights: str = "bf16") -> float:
        """Operations per second with weights in "fp8" or "bf16"; without fp8 units the 16-bit ones compute."""
        return self.dense_fp8 if weights == "fp8" and self.dense_fp8 else self.dense_bf16


class GpuTable(Section):
    """A file of GPUs."""

    gpus: list[Gpu]


def read_gpus(path: str | Path = TABLE) -> list[Gpu]:
    """The GPUs of a table, the shipped one unless `path` names another of the same form. Raises `GpuError`."""
    return list(_read(Path(path)))


@lru_cache
def _read(path: Path) -> tuple[Gpu, ...]:
    return tuple(read_yaml(path, GpuTable, GpuError).gpus)


def find_gpu(name: str, table: str | Path = TABLE) -> Gpu:
    """The GPU of that name: "NVIDIA GeForce RTX 4090", "rtx4090", "4090", "A100-SXM4-80GB".

    Raises `GpuError` for one that is unknown, and for a name that fits several whose numbers differ.
    """
    gpus, wanted = read_gpus(table), _words(name)
    exact = [gpu for gpu in gpus if wanted in (_words(known) for known in (gpu.name, *gpu.names))]
    found = exact or [gpu for gpu in gpus if wanted and _fits(wanted, gpu)]
    if len(found) == 1:
        return found[0]
    if found:
        raise GpuError(f"{name!r} may be {' or '.join(gpu.name for gpu in found)}; name one of them")
    raise GpuError(f"no GPU is called {name!r}; {suggestion(name, [gpu.name for gpu in gpus])}")


_NOISE = {
    "nvidia",
    "amd",
    "geforce",
    "instinct",
    "generation",
    "gpu",
    "tensor",
    "core",
    "graphics",
    "card",
    "blackwell",
}
_SAME = {"sxm2": "sxm", "sxm4": "sxm", "sxm5": "sxm", "sxm6": "sxm", "pcie4": "pcie"}


def _words(name: str) -> frozenset[str]:
    """The words that tell GPUs apart: "RTX4090", "RTX 4090" and "rtx-4090" have the same."""
    text = re.sub(r"([0-9])\s*g(i?b)\b", r"\1gb", name.lower())
    text = re.sub(r"\b(rtx|gtx)(?=[0-9])", r"\1 ", text)
    words = (_SAME.get(word, word) for word in re.split(r"[^a-z0-9]+", text))
    return frozenset(word for word in words if word and word not in _NOISE)


def _fits(wanted: frozenset[str], gpu: Gpu) -> bool:
    """Whether all words of the name are words of one of the GPU's names."""
    return any(wanted <= _words(known) for known in (gpu.name, *gpu.names))
