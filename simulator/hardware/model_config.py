"""A model's architecture: from the ``config.json`` that comes with its weights to parameters, bytes and KV cache.

Counts are those of the layers that vLLM builds; its reading of a config is `transformers_utils/config.py` and
`model_executor/models/` (0.32.0). A model family that is not listed in `FAMILIES` is refused: another architecture may
cache in ways that a formula for this one gets wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from simulator.hardware.quantization import Quantization, QuantizationError, quantization_in, quantization_of
from simulator.yaml_file import suggestion

TABLE = Path(__file__).with_name("models.yaml")
MAX_BYTES = 1 << 20  # of a config.json
MOST, MOST_LAYERS = 10**12, 10_000  # of a number in it


class ModelError(ValueError):
    """A model that is not known or not understood. The message is one line."""


@dataclass(frozen=True)
class KvLayers:
    """Layers that cache alike. `key_size` and `value_size` are values of one head and token.

    `window` is in tokens, None for full attention. `latent` is MLA: one cached vector a token stands for all heads, and
    every tensor-parallel rank holds it whole.
    """

    layers: int
    heads: int
    key_size: int
    value_size: int
    window: int | None = None
    latent: bool = False

    def heads_per_rank(self, tensor_parallel: int) -> int:
        """KV heads that one rank caches: split as long as there are enough, then replicated."""
        return self.heads if self.latent else max(1, self.heads // tensor_parallel)


@dataclass(frozen=True)
class Parameters:
    """Counts of parameters, by how vLLM places them.

    Attributes
        table: input embedding
        output: output layer; 0 if it is the embedding again
        attention: query and output projections, split by heads
        attention_kv: key and value projections, split as long as there are KV heads
        latent: MLA's down-projections, on every rank
        mlp: dense layers and shared experts, split
        experts: routed experts, split
        active_experts: of `experts`, those that one token passes
        other: norms, routers and the like, on every rank
    """

    table: int
    output: int = 0
    attention: int = 0
    attention_kv: int = 0
    latent: int = 0
    mlp: int = 0
    experts: int = 0
    active_experts: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return self.table + self.output + self.linear + self.other

    @property
    def linear(self) -> int:
        """Of the layers between embedding and output: what quantisation makes smaller."""
        return self.attention + self.attention_kv + self.latent + self.mlp + self.experts


@dataclass(frozen=True)
class ModelArchitecture:
    """A decoder-only model. Sizes are values, lengths tokens; `dtype_bytes` is of weights, activations and KV cache.

    `intermediate_size` is the widest layer that a token passes, all of its experts together.
    """

    name: str
    family: str
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    attention_heads: int
    max_model_len: int
    kv: tuple[KvLayers, ...]
    parameters: Parameters
    quantization: Quantization | None = None
    dtype_bytes: int = 2
    notes: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        return sum(group.layers for group in self.kv)

    def check_tensor_parallel(self, ranks: int) -> None:
        """Raises `ModelError` where vLLM would refuse to split the model over so many ranks."""
        if ranks < 1 or self.attention_heads % ranks:
            raise ModelError(
                f"{self.name} has {self.attention_heads} attention heads; --tensor-parallel-size must divide them, "
                f"got {ranks}"
            )

    def weight_bytes(self, tensor_parallel: int = 1) -> int:
        """Bytes of weights on one GPU."""
        self.check_tensor_parallel(tensor_parallel)
        counts, per_rank = self.parameters, 1 / tensor_parallel
        kv_share = self.kv[0].heads_per_rank(tensor_parallel) / self.kv[0].heads if not self.kv[0].latent else per_rank
        dense = (counts.attention + counts.mlp) * per_rank + counts.attention_kv * kv_share + counts.latent
        whole = (counts.table + counts.output) * per_rank + counts.other
        experts = counts.experts * per_rank
        return round(whole * self.dtype_bytes + self._bytes_of(dense, experts))

    def weight_bytes_read(self, tensor_parallel: int = 1) -> int:
        """Bytes of weights that a step of one token reads: of the experts the chosen, of the input table one row."""
        counts = self.parameters
        read = replace(counts, experts=counts.active_experts, table=counts.table if not counts.output else 0)
        return replace(self, parameters=read).weight_bytes(tensor_parallel)

    @property
    def active_parameters(self) -> int:
        """Of the layers between embedding and output, those that one token passes."""
        return self.parameters.linear - self.parameters.experts + self.parameters.active_experts

    def _bytes_of(self, dense: float, experts: float) -> float:
        quantization = self.quantization
        if quantization is None:
            return (dense + experts) * self.dtype_bytes
        of_dense = self.dtype_bytes if quantization.experts_only else quantization.bytes_per_parameter
        return dense * of_dense + experts * quantization.bytes_per_parameter


@dataclass(frozen=True)
class Family:
    """What distinguishes the architectures, by the ``model_type`` of the config.

    `windows` tells which layers have the config's sliding window: "none"; "all"; "types", those that ``layer_types``
    lists, else all but each ``sliding_window_pattern``-th; "switch", as "types" but only with ``layer_types``.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    query_key_norm: bool = False
    norms: int = 2
    tied: bool = False  # unless the config says otherwise
    windows: str = "none"
    experts: str = ""  # whose names the config's keys have; "" for dense
    defaults: Mapping[str, int] = field(default_factory=dict)  # of keys that published configs leave out


FAMILIES = {
    "llama": Family(),
    "mistral": Family(windows="all"),
    "qwen2": Family(qkv_bias=True, windows="switch"),
    "qwen3": Family(query_key_norm=True, windows="switch"),
    "qwen3_moe": Family(query_key_norm=True, windows="switch", experts="qwen"),
    "phi3": Family(windows="all"),
    "mixtral": Family(windows="all", experts="mixtral"),
    "gemma": Family(tied=True),
    "gemma2": Family(norms=4, tied=True, windows="types"),
    "gemma3_text": Family(
        norms=4,
        tied=True,
        query_key_norm=True,
        windows="types",
        defaults={
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window_pattern": 6,
            "max_position_embeddings": 131_072,
        },
    ),
    "gpt_oss": Family(qkv_bias=True, output_bias=True, windows="types", experts="gpt_oss"),
    "deepseek_v2": Family(experts="deepseek"),
    "deepseek_v3": Family(experts="deepseek"),
}


def find_model(name: str | Path) -> ModelArchitecture:
    """The model of a ``config.json``, of the folder around one, or of the shipped table by its name.

    Upper and lower case, the publisher, and endings such as -Instruct do not matter; -FP8, -AWQ and the like mean the
    quantised weights. Raises `ModelError`.
    """
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return read_model(path)
    models, wanted, quantization = _table(), _plain_name(str(name)), quantization_in(str(name))
    if wanted not in models or path.suffix == ".json":
        known = suggestion(wanted, models) if wanted else f"known are {', '.join(sorted(models))}"
        raise ModelError(f"{name}: no such model or file; {known}; or give the path of its config.json")
    model = architecture(str(name), models[wanted])
    model = replace(model, max_model_len=_length(str(name)) or model.max_model_len)
    return replace(model, quantization=quantization) if quantization else model


def read_model(path: Path) -> ModelArchitecture:
    """The model that a ``config.json`` describes. Raises `ModelError`."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ModelError(f"{path}: larger than {MAX_BYTES >> 20} MiB; this is no config.json of a model")
        content = path.read_bytes()
    except OSError as problem:
        raise ModelError(f"{path}: cannot be read ({problem.strerror})") from None
    try:
        config = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):
        raise ModelError(f"{path}: not valid JSON; give the config.json that comes with the model's weights") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: not the config.json of a model")
    return architecture(str(config.get("_name_or_path") or path), config)


def architecture(name: str, config: Mapping[str, Any]) -> ModelArchitecture:
    """The model that a config describes. Raises `ModelError` for a family, key or quantisation that is not known."""
    notes = []
    if "text_config" in config:
        notes.append("only the language model is counted: weights of image and audio parts are left out")
        if not isinstance(config["text_config"], dict):
            raise ModelError(f"{name}: the config's text_config must be an object")
        outer = {key: config[key] for key in ("quantization_config", "other_parameters") if key in config}
        config = {**config["text_config"], **outer}
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        raise ModelError(
            f"{name}: model_type {model_type!r} is not modelled; known are {', '.join(FAMILIES)}; "
            "give --num-gpu-blocks-override as the server's log states the pool"
        )
    return _Reader(name, config, FAMILIES[model_type]).model(notes)


class _Reader:
    """A config that is being read."""

    def __init__(self, name: str, config: Mapping[str, Any], family: Family) -> None:
        self.name, self.config, self.family = name, {**family.defaults, **config}, family
        self.hidden, self.heads = self.positive("hidden_size"), self.positive("num_attention_heads")
        self.layers, self.vocab = self.positive("num_hidden_layers"), self.positive("vocab_size")
        if self.layers > MOST_LAYERS:
            raise ModelError(f"{name}: the config's num_hidden_layers may be up to {MOST_LAYERS:,}, got {self.layers}")
        self.kv_heads = self.positive("num_key_value_heads", self.heads)
        self.head_dim = self.positive("head_dim", self.hidden // self.heads)

    def number(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ModelError(f"{self.name}: the config's {key} must be a whole number, got {value!r}")
        if value > MOST:
            raise ModelError(f"{self.name}: the config's {key} may be up to {MOST:,}, got {value}")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if not value:
            raise ModelError(f"{self.name}: the config's {key} must be at least 1")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key)
        if value is not None and not isinstance(value, bool):
            raise ModelError(f"{self.name}: the config's {key} must be true or false, got {value!r}")
        return default if value is None else value

    def listed(self, key: str) -> list[Any] | None:
        value = self.config.get(key)
        if value is not None and not isinstance(value, list):
            raise ModelError(f"{self.name}: the config's {key} must be a list, got {value!r}")
        return value

    def model(self, notes: list[str]) -> ModelArchitecture:
        dense, moe = self._layers_by_kind()
        counts, width = self._parameters(dense, moe)
        return ModelArchitecture(
            name=self.name,
            family=str(self.config["model_type"]),
            hidden_size=self.hidden,
            intermediate_size=width,
            vocab_size=self.vocab,
            attention_heads=self.heads,
            max_model_len=self.number("max_position_embeddings", 0),
            kv=self._kv(),
            parameters=counts,
            quantization=self._quantization(),
            notes=tuple(notes),
        )

    def _quantization(self) -> Quantization | None:
        try:
            return quantization_of(self.config.get("quantization_config"))
        except QuantizationError as problem:
            raise ModelError(f"{self.name}: {problem}") from None

    # --- what is cached

    @property
    def latent(self) -> int | None:
        return self.number("kv_lora_rank") if self.config.get("kv_lora_rank") is not None else None

    def _kv(self) -> tuple[KvLayers, ...]:
        if self.latent is not None:
            return (KvLayers(self.layers, 1, self.latent + self.number("qk_rope_head_dim"), 0, latent=True),)
        windowed = self._windowed_layers()
        window = self.number("sliding_window") if windowed else None
        made = [(self.layers - windowed, None), (windowed, window)]
        return tuple(KvLayers(n, self.kv_heads, self.head_dim, self.head_dim, size) for n, size in made if n)

    def _windowed_layers(self) -> int:
        """How many layers attend to a sliding window only."""
        if not self.config.get("sliding_window") or self.family.windows == "none":
            return 0
        types = self.listed("layer_types")
        if types is not None and self.family.windows != "all":
            return sum(kind == "sliding_attention" for kind in types[: self.layers])
        if self.family.windows == "switch":
            if self.flag("use_sliding_window", default=False):
                raise ModelError(f"{self.name}: use_sliding_window needs layer_types in the config")
            return 0
        if self.family.windows == "all":
            return self.layers
        pattern = self.positive("sliding_window_pattern", 2)  # every so many layers one of full attention
        return self.layers - self.layers // pattern

    # --- what is learned

    def _layers_by_kind(self) -> tuple[int, int]:
        """Numbers of layers with a dense MLP and with experts."""
        if not self.family.experts:
            return self.layers, 0
        if self.family.experts == "deepseek":
            dense = min(self.number("first_k_dense_replace", 0), self.layers)
            return dense, self.layers - dense
        if self.family.experts == "qwen":
            step, only = self.positive("decoder_sparse_step", 1), self.listed("mlp_only_layers") or ()
            moe = sum((index + 1) % step == 0 and index not in only for index in range(self.layers))
            return self.layers - moe, moe
        return 0, self.layers

    def _parameters(self, dense: int, moe: int) -> tuple[Parameters, int]:
        """Counts, and the widest layer that a token passes."""
        table = self.vocab * self.hidden
        attention, attention_kv, latent, other = self._attention()
        inner = self.number("intermediate_size", 0) if dense else 0
        shared, experts, active, router, width = self._experts() if moe else (0, 0, 0, 0, 0)
        bias = (2 * inner + self.hidden) if self.flag("mlp_bias", default=False) else 0
        counts = Parameters(
            table=table,
            output=0 if self.flag("tie_word_embeddings", self.family.tied) else table,
            attention=self.layers * attention,
            attention_kv=self.layers * attention_kv,
            latent=self.layers * latent,
            mlp=dense * (3 * self.hidden * inner + bias) + moe * shared,
            experts=moe * experts,
            active_experts=moe * active,
            other=self.layers * (other + self.family.norms * self.hidden) + moe * router + self.hidden
            + self.number("other_parameters", 0),
        )  # fmt: skip
        return counts, max(inner, width)

    def _attention(self) -> tuple[int, int, int, int]:
        """Of one layer: query and output, key and value, what is on every rank, norms."""
        hidden, heads, size = self.hidden, self.heads, self.head_dim
        if self.latent is not None:
            return self._latent_attention(self.latent)
        every_bias = self.flag("attention_bias", default=False)
        qkv_bias = self.family.qkv_bias or every_bias
        output_bias = self.family.output_bias or every_bias
        split = 2 * hidden * heads * size + heads * size * qkv_bias + hidden * output_bias
        keys = 2 * self.kv_heads * size * (hidden + qkv_bias)
        norms = 2 * size if self.family.query_key_norm else 0
        sinks = heads if self.config["model_type"] == "gpt_oss" else 0
        return split, keys, 0, norms + sinks

    def _latent_attention(self, rank: int) -> tuple[int, int, int, int]:
        """MLA: projections go down to a latent, which is cached, and up again for each head."""
        hidden, heads = self.hidden, self.heads
        plain, rotary, value = (self.number(f"{key}_head_dim") for key in ("qk_nope", "qk_rope", "v"))
        query_rank = self.number("q_lora_rank", 0)
        split = heads * (plain + rotary) * (query_rank or hidden) + rank * heads * (plain + value)
        split += heads * value * hidden
        down = hidden * (query_rank + rank + rotary)
        return split, 0, down, query_rank + rank

    def _experts(self) -> tuple[int, int, int, int, int]:
        """Of one layer: shared experts, routed ones, those one token passes, the router; the width of those passed."""
        hidden, kind = self.hidden, self.family.experts
        number = self.number({"deepseek": "n_routed_experts", "qwen": "num_experts"}.get(kind, "num_local_experts"))
        chosen = self.number("num_experts_per_tok")
        inner = self.number("moe_intermediate_size" if kind in ("deepseek", "qwen") else "intermediate_size")
        shared_width = inner * self.number("n_shared_experts", 0) if kind == "deepseek" else 0
        expert = 3 * hidden * inner + (2 * inner + hidden if kind == "gpt_oss" else 0)
        router = hidden * number + (number if kind == "gpt_oss" or self.config.get("topk_method") == "noaux_tc" else 0)
        return 3 * hidden * shared_width, number * expert, chosen * expert, router, shared_width + chosen * inner


# --- the shipped table

_ENDINGS = re.compile(
    r"[-_](instruct|it|chat|base|pt|hf|thinking|fp8(-dynamic)?|awq|gptq|int[48]|w4a16|w8a8|nvfp4|quantized|bf16"
    r"|\d{4}|v0\.\d)$"
)


def _plain_name(name: str) -> str:
    """A model's name without publisher, case and the endings that do not change the architecture."""
    plain = name.rsplit("/", 1)[-1].lower().removeprefix("meta-")
    exact = plain
    while (shorter := _ENDINGS.sub("", plain)) != plain:
        if plain in _table():
            return plain
        plain = shorter
    return plain if plain in _table() else exact if exact in _table() else plain


@lru_cache(maxsize=1)
def _table() -> dict[str, dict[str, Any]]:
    """Configs of the shipped models, by their names and the names of their twins."""
    models: dict[str, dict[str, Any]] = {}
    for name, entry in yaml.safe_load(TABLE.read_text(encoding="utf-8"))["models"].items():
        for alias in (name, *entry.get("alike", ())):
            models[alias.rsplit("/", 1)[-1].lower()] = entry["config"]
    return models


def _length(name: str) -> int | None:
    """Most tokens of a model that differs in nothing else from its relatives, such as an -Instruct; None for others."""
    lengths = _lengths()
    plain = name.rsplit("/", 1)[-1].lower()
    while plain not in lengths:
        shorter = _ENDINGS.sub("", plain)
        if shorter == plain or plain in _table():
            return None
        plain = shorter
    return lengths[plain]


@lru_cache(maxsize=1)
def _lengths() -> dict[str, int]:
    """max_position_embeddings of those models that differ from the one they are listed with."""
    entries = yaml.safe_load(TABLE.read_text(encoding="utf-8"))["models"].values()
    return {name.lower(): length for entry in entries for name, length in entry.get("lengths", {}).items()}
