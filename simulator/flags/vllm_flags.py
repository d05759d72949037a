"""Engine flags as people write them: under vLLM's names, with dashes or underscores, sizes with or without a unit."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from typing import Any, Literal

from simulator.engine.engine_flags import EngineFlags, FlagError
from simulator.yaml_file import KeyProblem, suggestion

# names of vLLM's command line for what `EngineFlags` calls by the name of vLLM's config
SYNONYMS = {"kv_cache_memory": "kv_cache_memory_bytes", "num_gpu_blocks_override": "num_gpu_blocks"}

# k to t count in thousands and K to T in steps of 1,024, as vLLM reads them
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_UNITS = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


MOST_DIGITS = 18


class BadFlag(FlagError, KeyProblem):
    """A flag that does not exist or whose value has the wrong form; `key` is its name as it was given."""


def parse_size(text: str) -> int:
    """A whole number of tokens, blocks or bytes: ``6569114112``, ``8k``, ``10G``, ``6.12GiB``. Raises ValueError."""
    found = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    factor = None
    if found:
        factor = _SUFFIXES.get(found[2], _UNITS.get(found[2].lower()))
    if not found or factor is None or (factor == 1 and "." in found[1]):
        raise ValueError(f"{text!r} is not a size such as 6569114112, 8k, 10G or 6.12GiB")
    digits = found[1].replace("_", "")
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"{text!r} has more than {MOST_DIGITS} digits")
    return int(digits) * factor if "." not in digits else int(float(digits) * factor)


def change_flags(flags: EngineFlags, given: Mapping[str, object], kv_bytes_per_token: int | None = None) -> EngineFlags:
    """`flags` with the `given` ones changed.

    ``kv_cache_memory_bytes`` becomes blocks by `kv_bytes_per_token`. Another block size alone keeps the pool's tokens.
    Raises `FlagError`.
    """
    changes = parse_flags(given)
    memory = changes.pop("kv_cache_memory_bytes", None)
    block_size = int(changes.get("block_size", flags.block_size))
    if "num_gpu_blocks" not in changes and block_size >= 1:
        if memory is not None:
            changes["num_gpu_blocks"] = _blocks(memory, block_size, kv_bytes_per_token)
        elif block_size != flags.block_size:
            changes["num_gpu_blocks"] = flags.kv_tokens // block_size
    return flags.changed(**changes)


def parse_flags(given: Mapping[str, object]) -> dict[str, Any]:
    """Names and values of flags in the form of `EngineFlags`; ``kv_cache_memory_bytes`` may be among them."""
    wanted = typing.get_type_hints(EngineFlags) | {"kv_cache_memory_bytes": int}
    changes: dict[str, Any] = {}
    for key, value in given.items():
        name = key.removeprefix("--").replace("-", "_")
        name = SYNONYMS.get(name, name)
        if name not in wanted:
            close = suggestion(name, {*wanted, *SYNONYMS}).replace("_", "-" if "-" in key else "_")
            raise BadFlag(key, f"not an engine flag that capsim models; {close}")
        if name in changes:
            raise BadFlag(key, "given twice under two names")
        try:
            changes[name] = _typed(value, wanted[name])
        except ValueError as problem:
            raise BadFlag(key, str(problem)) from None
    return changes


def _blocks(memory: int, block_size: int, kv_bytes_per_token: int | None) -> int:
    """Blocks of a KV pool of `memory` bytes."""
    if kv_bytes_per_token is None:
        raise FlagError(
            "--kv-cache-memory-bytes needs the model's KV bytes per token, which the profile does not know; "
            "add kv_bytes_per_token to it or give --num-gpu-blocks-override"
        )
    return memory // (block_size * kv_bytes_per_token)


def _typed(value: object, wanted: Any) -> object:
    """`value` in the type that `EngineFlags` declares. Raises ValueError."""
    if wanted is int and isinstance(value, str):
        return parse_size(value)
    if wanted is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        return parse_real(value)
    if typing.get_origin(wanted) is Literal:
        choices = typing.get_args(wanted)
        if value not in choices:
            raise ValueError(f"must be {' or '.join(choices)}, got {value!r}")
    elif type(value) is not wanted:
        raise ValueError(f"must be {_WORDS[wanted]}, got {value!r}")
    return value


def parse_real(value: int | str) -> float:
    """A number that is not whole. Raises ValueError."""
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise ValueError(f"must be a number, got {value!r}") from None


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text (put it in quotes)"}
