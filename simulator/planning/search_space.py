"""Configurations of a server to choose from: engine flags, GPUs, and how many replicas behind which router."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from simulator.engine.engine_flags import EngineFlags, FlagError
from simulator.engine.fleet import Fleet
from simulator.flags.serve_flags import find_flag
from simulator.flags.serve_line import read_line
from simulator.flags.vllm_flags import parse_size
from simulator.hardware.gpus import GpuError, find_gpu
from simulator.planning.alternative import BASELINE, Alternative, alternative
from simulator.profile import Profile

TENSOR, DATA = "tensor_parallel_size", "data_parallel_size"
DISAGGREGATION = ("kv_transfer_config", "ec_transfer_config")
MOST_VALUES = 10_000  # of one range
MOST_CONFIGURATIONS = 100_000
MOST_PRICE = 1e9  # of an hour


class SpaceError(ValueError):
    """A space that makes no sense. The message is one line."""


Value = str | bool


@dataclass(frozen=True)
class Configuration:
    """One way to serve.

    Attributes
        flags: engine flags that differ from the profile's, under vLLM's names
        gpu: the GPU that the profile is moved to; None for its own
        replicas, router: servers and who stands before them
    """

    flags: tuple[tuple[str, Value], ...] = ()
    gpu: str | None = None
    replicas: int = 1
    router: str = "least-requests"

    def __str__(self) -> str:
        parts = [f"{self.replicas} x {self.gpu}"] if self.gpu else []
        parts += [f"{self.replicas} replicas"] if self.replicas > 1 and not self.gpu else []
        parts += [self.router] if self.replicas > 1 else []
        flags = " ".join(f"--{name.replace('_', '-')}={_shown(value)}" for name, value in self.flags)
        return ", ".join([*parts, *([flags] if flags else [])]) or "as measured"


@dataclass(frozen=True)
class Server:
    """A configuration, ready to be simulated.

    Attributes
        profile: of one engine with its flags, on its GPUs
        fleet: how many engines
        gpus: of all engines together
        notes: what was left out of account or taken for granted
    """

    configuration: Configuration
    profile: Profile
    fleet: Fleet
    gpus: int
    notes: tuple[str, ...] = ()

    @property
    def flags(self) -> EngineFlags:
        return self.profile.engine_flags


def configurations(
    vary: Mapping[str, Sequence[Value]],
    gpus: Sequence[str] = (),
    replicas: Sequence[int] = (1,),
    routers: Sequence[str] = ("least-requests",),
) -> list[Configuration]:
    """All combinations. A router makes no difference to a single replica, which is there once.

    Raises `SpaceError` for more than could be tried.
    """
    count = math.prod(map(len, (*vary.values(), gpus or (None,), replicas, routers)))
    if count > MOST_CONFIGURATIONS:
        raise SpaceError(f"{count:,} configurations are more than {MOST_CONFIGURATIONS:,}: vary fewer values")
    found: dict[Configuration, None] = {}
    for values in itertools.product(*vary.values()):
        flags = tuple(zip(vary, values, strict=True))
        for gpu, count, router in itertools.product(gpus or (None,), replicas, routers):
            found[Configuration(flags, gpu, count, router if count > 1 else routers[0])] = None
    return list(found)


class Builder:
    """Makes servers of configurations of one profile."""

    def __init__(self, profile: Profile, given: Mapping[str, Value] | None = None) -> None:
        """`given` are flags that all configurations share."""
        self._profile = profile
        self._given = dict(given or {})

    def build(self, configuration: Configuration) -> Server:
        """Raises what refuses it in one line: `FlagError`, `GpuError`, `ModelError` or `MemoryAccountError`."""
        flags: dict[str, Value] = self._given | dict(configuration.flags)
        data = _whole(flags.pop(DATA, "1"), DATA)
        tensor = _whole(flags.get(TENSOR, "1"), TENSOR)
        words = [_written(name, value) for name, value in flags.items()]
        if configuration.gpu is not None and not _same_gpu(self._profile.gpu, configuration.gpu):
            words.append(f"--gpu {shlex.quote(configuration.gpu)}")
        server = Alternative(BASELINE, self._profile)
        if words:
            server = alternative(self._profile, read_line(" ".join(words)))
        fleet = Fleet(configuration.replicas, configuration.router, data)
        notes = (*server.notes, *server.assumed)
        return Server(configuration, server.profile, fleet, fleet.engines * tensor, notes)


def _written(name: str, value: Value) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={shlex.quote(value)}"


def _whole(value: Value, name: str) -> int:
    try:
        return parse_size(str(value))
    except ValueError:
        raise FlagError(f"--{name.replace('_', '-')} must be a whole number, got {value}") from None


def _same_gpu(one: str | None, other: str) -> bool:
    return one is not None and canonical_gpu(one) == canonical_gpu(other)


def canonical_gpu(name: str) -> str:
    """The name that the table of GPUs has for it, or itself where the table has none."""
    try:
        return find_gpu(name).name
    except GpuError:
        return name


# --- the words in which people write a space


def parse_vary(texts: Sequence[str]) -> dict[str, list[Value]]:
    """Flags and their values from ``--max-num-seqs=64,128`` or ``--max-num-batched-tokens=512..8192:log2``.

    Raises `SpaceError`, and `FlagError` for a flag that vLLM does not know.
    """
    found: dict[str, list[Value]] = {}
    for text in texts:
        flag, equals, values = text.strip().partition("=" if "=" in text else " ")
        flag = "--" + flag.strip().removeprefix("--")
        if not equals or not values.strip():
            raise SpaceError(f"{text!r} is not a flag with values, such as --max-num-seqs=64,128,256")
        name = find_flag(flag)[0].name.replace("-", "_")
        if name in DISAGGREGATION:
            raise SpaceError(f"{flag}: prefill/decode disaggregation is not modelled")
        if name in found:
            raise SpaceError(f"{flag} is varied twice; give all its values together")
        found[name] = parse_values(values)
    return found


def parse_values(text: str) -> list[Value]:
    """Values from ``64,128``, ``1..8``, ``512..2048:+512``, ``512..8192:log2`` or ``true,false``."""
    values: list[Value] = []
    for part in text.replace(" ", "").split(","):
        values += _range(part) if ".." in part else [{"true": True, "false": False}.get(part.lower(), part)]
    if "" in values:
        raise SpaceError(f"{text!r} has an empty value")
    return list(dict.fromkeys(values))


def parse_counts(option: str, text: str) -> list[int]:
    """Whole numbers from 1 on, from ``1,2,4`` or ``1..8``."""
    try:
        counts = [int(str(value)) for value in parse_values(text)]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise SpaceError(f"{option}: {text!r} is not a list of whole numbers such as 1,2,4 or 1..8")
    return counts


def parse_prices(texts: Sequence[str]) -> dict[str, float]:
    """Price of an hour by GPU, from ``L4=0.5/h``. Raises `SpaceError`."""
    prices = {}
    for text in (part for given in texts for part in given.split(",")):
        found = re.fullmatch(r"\s*(.+?)\s*=\s*(\d+(?:\.\d+)?)\s*(?:/\s*h)?\s*", text)
        if not found or not float(found[2]) <= MOST_PRICE:
            raise SpaceError(f"{text!r} is not a price such as L4=0.5/h")
        prices[canonical_gpu(found[1])] = float(found[2])
    return prices


def _range(text: str) -> Iterator[Value]:
    found = re.fullmatch(r"([^.:]+)\.\.([^.:]+?)(?::(log2|\+[^:]+))?", text.replace(" ", ""))
    try:
        if not found:
            raise ValueError
        low, high = parse_size(found[1]), parse_size(found[2])
        step = parse_size(found[3][1:]) if found[3] and found[3] != "log2" else 1
        doubles = found[3] == "log2"
        if low > high or step < 1 or (doubles and low < 1) or (not doubles and (high - low) // step > MOST_VALUES):
            raise ValueError
    except ValueError:
        raise SpaceError(f"{text!r} is not a range such as 1..8, 512..2048:+512 or 512..8192:log2") from None
    value = low
    while value <= high:
        yield str(value)
        value = 2 * value if doubles else value + step


def _shown(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else value
