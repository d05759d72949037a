"""The scenario: a question to the simulator. Which server, under which flags, bears which load, against which targets.

name: long-prompts
profile: profiles/rtx4090-qwen2.5-7b.yaml   # beside the scenario, or the name of a shipped profile
engine_flags:
  max-num-seqs: 64                          # vLLM's names; the profile's flags hold for the rest
  kv-cache-memory-bytes: 6.12GiB
gpu: L40S                                   # unless it is the measured one
replicas: 2                                 # servers behind a router
router: session-sticky
alternatives:                               # what to compare that with, as people write it for `capsim what-if`
- --max-num-batched-tokens 8192
- name=bigger vllm serve Qwen/Qwen2.5-7B --gpu H100-SXM
load:
  concurrency: [1, 2, 4, 8]                 # clients, with think_time; or request_rate, requests a second, with
                                            # burstiness, rate_curve and max_concurrency
  input_len: 1024                           # tokens; or {low: 512, high: 2048}, or lognormal(1000,600); or shapes:
  output_len: 256                           # ["512/128:0.7", ...]; or sessions: {turns: 5, user: 100, output: 200};
                                            # or trace: a file, from the scenario's folder, with speed
  # capacity: clients                       # instead of concurrency: search for the most that meet slo; or rate
  num_prompts: 1000                         # requests a level; or requests_per_client, or duration in seconds
slo:
  p99_ttft: 2000                            # milliseconds
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import (
    AfterValidator,
    BeforeValidator,
    FailFast,
    Field,
    InstanceOf,
    PrivateAttr,
    field_validator,
    model_validator,
)

from simulator.engine.engine_flags import FlagError
from simulator.engine.routers import RouterError, make_router
from simulator.flags.serve_line import ServeLine, Value, read_line
from simulator.flags.vllm_flags import parse_flags
from simulator.hardware.gpus import find_gpu
from simulator.hardware.memory import MemoryAccountError
from simulator.hardware.model_config import ModelError
from simulator.loads.arrivals import RateCurve, parse_curve, parse_seconds, parse_think_time
from simulator.loads.lengths import FORMS, parse_length
from simulator.loads.levels import Levels, LoadError, parse_shape, plan_load, uniform_shape
from simulator.loads.sessions import Sessions, Talk
from simulator.loads.trace import Trace
from simulator.loads.trace_files import read_trace
from simulator.loads.workload import Length, Load, Shape, ThinkTime, Workload
from simulator.planning.alternative import BASELINE, Alternative, alternative
from simulator.planning.replications import AnyLoad
from simulator.planning.targets import check_targets
from simulator.profile import Profile
from simulator.schema_version import readable
from simulator.yaml_file import DocumentError, KeyProblem, Section, read_yaml

SCHEMA_VERSION = 1


class ScenarioError(DocumentError):
    """A file that is not a scenario, or one that cannot be run. The message is one line."""


def _length(value: object) -> object:
    """A number of tokens, ``{low: ..., high: ...}``, or text that `parse_length` reads."""
    if isinstance(value, dict):
        for key, bound in value.items():
            if key not in ("low", "high"):
                raise KeyProblem(key, "a length has the keys low and high")
            if type(bound) is not int:
                raise KeyProblem(key, f"must be a whole number of tokens, got {bound!r}")
        if len(value) < 2:
            raise ValueError("a length needs both low and high, in tokens")
        return Length(**value)
    if isinstance(value, Length):
        return value
    if isinstance(value, str):
        try:
            return parse_length(value)
        except ValueError as problem:
            raise ValueError(f"must be a whole number of tokens, or {FORMS}: {problem}") from None
    if type(value) is not int:
        raise ValueError(f"must be a whole number of tokens or {{low: ..., high: ...}}, got {value!r}")
    return Length.fixed(value)


def _shape(value: object) -> object:
    return parse_shape(value) if isinstance(value, str) else value


def _think_time(value: object) -> object:
    return parse_think_time(str(value)) if type(value) in (int, float, str) else value


def _curve(value: object) -> object:
    return parse_curve(value) if isinstance(value, str) else value


def _seconds(value: object) -> object:
    return parse_seconds(value) if isinstance(value, str) else value


Positive = Annotated[float, Field(gt=0, allow_inf_nan=True)]
TokenLength = Annotated[InstanceOf[Length], BeforeValidator(_length)]


class TalkSection(Section):
    """What sessions are made of."""

    turns: TokenLength = Field(description="requests of a session")
    user: TokenLength = Field(description="tokens that the user adds with every turn")
    output: TokenLength = Field(description="tokens to generate in every turn")
    system: int = Field(default=0, ge=0, description="tokens of the system prompt that all sessions share")
    max_context: int | None = Field(default=None, ge=1, description="tokens before which a session ends")

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        self.talk()
        return self

    def talk(self) -> Talk:
        return Talk(self.turns, self.user, self.output, self.system, self.max_context)


class LoadSection(Section):
    """Levels of load, and the requests that make them up."""

    capacity: Literal["clients", "rate"] | None = Field(
        default=None, description="what to raise as long as slo is met, instead of stated levels"
    )
    concurrency: list[int] | None = Field(default=None, description="numbers of clients, such as [1, 2, 4]")
    request_rate: list[Positive] | None = Field(default=None, description="requests a second, such as [0.5, 1, 2]")
    burstiness: Positive | None = Field(
        default=None, description="1 for Poisson, below it burstier, .inf for even spacing"
    )
    input_len: TokenLength | None = Field(default=None, description="tokens of a prompt")
    output_len: TokenLength | None = Field(default=None, description="tokens to generate")
    range_ratio: float = Field(default=0.0, ge=0, lt=1, description="spread of the lengths, 0.1 for 10 % up and down")
    shapes: list[Annotated[InstanceOf[Shape], BeforeValidator(_shape)]] | None = Field(
        default=None, description='kinds of requests, such as ["512/128:0.7", "4096/256:0.3"]'
    )
    sessions: TalkSection | None = Field(default=None, description="conversations: turns, user and output tokens")
    trace: str | None = Field(default=None, min_length=1, description="a file of recorded requests")
    trace_format: str | None = Field(default=None, description="the trace's format where the file does not tell")
    speed: Positive | None = Field(default=None, description="how much faster than recorded, 2 for twice as fast")
    think_time: Annotated[InstanceOf[ThinkTime], BeforeValidator(_think_time)] | None = Field(
        default=None, description="seconds, or exponential(2s), between an answer and the next request"
    )
    max_concurrency: int | None = Field(default=None, ge=1, description="most requests in flight of an open loop")
    rate_curve: Annotated[InstanceOf[RateCurve], BeforeValidator(_curve)] | None = Field(
        default=None, description="what multiplies the rate: ramp(...), bursts(...) or daily(...)"
    )
    duration: Annotated[float, BeforeValidator(_seconds), Field(gt=0)] | None = Field(
        default=None, description="seconds in which requests arrive, instead of num_prompts"
    )
    num_prompts: int | None = Field(default=None, ge=1, description="requests a level")
    requests_per_client: int | None = Field(default=None, ge=1, description="requests a level for each client")
    seed: int = Field(default=0, ge=0, description="a whole number; the same one draws the same load")

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        plan_load(self._requests(), self._levels())
        return self

    def workloads(self, folder: Path) -> list[Load]:
        """One load a level, or with `capacity` one level that stands for all. A trace's path starts from `folder`.

        Raises `TraceError` and `LoadError`.
        """
        requests = self._requests()
        if self.trace is not None:
            requests = read_trace(folder / self.trace, self.trace_format)
        return plan_load(requests, self._levels())

    def _levels(self) -> Levels:
        return Levels(
            concurrency=[1] if self.capacity == "clients" else self.concurrency,
            request_rate=[1.0] if self.capacity == "rate" else self.request_rate,
            burstiness=self.burstiness,
            think_time=self.think_time,
            max_concurrency=self.max_concurrency,
            rate_curve=self.rate_curve,
            num_prompts=self.num_prompts,
            requests_per_client=self.requests_per_client,
            duration=self.duration,
            speed=self.speed,
            seed=self.seed,
        )

    def _requests(self) -> list[Shape] | Talk | Trace:
        """What is asked for; some trace stands for that of the file, which is read when it is played."""
        uniform = bool(self.input_len or self.output_len or self.range_ratio)
        if uniform and self.shapes is not None:
            raise LoadError("give either shapes, or input_len, output_len and range_ratio")
        if (uniform or self.shapes is not None) + (self.sessions is not None) + (self.trace is not None) > 1:
            raise LoadError("give either lengths, or sessions, or a trace")
        if self.trace_format is not None and self.trace is None:
            raise LoadError("trace_format goes with a trace")
        self._check_capacity()
        if self.sessions is not None:
            return self.sessions.talk()
        if self.trace is not None:
            return Trace(self.trace, np.arange(2.0), np.ones(2, np.int64), np.ones(2, np.int64))
        if self.shapes is not None:
            return self.shapes
        if not self.input_len or not self.output_len:
            raise LoadError("give input_len and output_len, or shapes")
        return [uniform_shape(self.input_len, self.output_len, self.range_ratio)]

    def _check_capacity(self) -> None:
        stated = ("concurrency", "request_rate", "trace", "rate_curve", "max_concurrency", "requests_per_client")
        if self.capacity is not None and (given := [name for name in stated if getattr(self, name) is not None]):
            raise LoadError(f"give either capacity, which searches for the level, or {given[0]}")


# flags that decide about a server's memory and ranks, beside those of `EngineFlags`
_OF_SERVER = ("gpu_memory_utilization", "kv_cache_dtype", "tensor_parallel_size", "data_parallel_size")
_POOL_SIZE = {"gpu-memory-utilization", "kv-cache-memory-bytes", "num-gpu-blocks-override"}


def _known_flags(flags: dict[str, Any]) -> dict[str, Any]:
    of_server = {name: value for name, value in flags.items() if name.replace("-", "_") in _OF_SERVER}
    return parse_flags({name: value for name, value in flags.items() if name not in of_server}) | of_server


def _known_gpu(name: str) -> str:
    find_gpu(name)
    return name


def _known_router(name: str) -> str:
    make_router(name)
    return name


def _serve_line(value: object) -> object:
    return read_line(value) if isinstance(value, str) else value


def _over(earlier: ServeLine, later: ServeLine) -> ServeLine:
    """The server of `later`, with what it leaves out from `earlier`. The size of the pool is said in one way."""
    says_pool = any(flag.name in _POOL_SIZE for flag in later.flags)
    kept = {flag: value for flag, value in earlier.flags.items() if not (says_pool and flag.name in _POOL_SIZE)}
    return replace(later, flags=kept | later.flags, words=earlier.words | later.words)


class Scenario(Section):
    """A load on the server of a profile, or on several that are compared.

    `engine_flags` are those that differ from the profile's, and `alternatives` what differs from that server. `slo`
    holds targets in milliseconds, such as ``p99_ttft``.
    """

    schema_version: int = SCHEMA_VERSION
    name: str = Field(min_length=1, description="the scenario's name")
    description: str = ""
    profile: str = Field(min_length=1, description="the path of a profile, from this file, or a shipped profile's name")
    engine_flags: Annotated[dict[str, Any], AfterValidator(_known_flags)] = Field(default_factory=dict)
    gpu: Annotated[str, AfterValidator(_known_gpu)] | None = Field(default=None, description="another GPU's name")
    replicas: int = Field(default=1, ge=1, description="servers behind a router")
    router: Annotated[str, AfterValidator(_known_router)] | None = Field(
        default=None, description="who chooses among replicas, such as least-requests"
    )
    alternatives: Annotated[list[Annotated[InstanceOf[ServeLine], BeforeValidator(_serve_line)]], FailFast()] = Field(
        default_factory=list, description='lines of flags that differ, such as ["--max-num-seqs 64"]'
    )
    load: LoadSection
    slo: Annotated[dict[str, float], AfterValidator(check_targets)] = Field(
        default_factory=dict, description="milliseconds"
    )
    _path: Path = PrivateAttr(default_factory=Path)

    @field_validator("schema_version", mode="before")
    @classmethod
    def _is_readable(cls, version: object) -> int:
        return readable(version, SCHEMA_VERSION)

    @model_validator(mode="after")
    def _has_a_goal(self) -> Self:
        if self.load.capacity is not None and not self.slo:
            raise KeyProblem("load", "capacity is the highest level that meets slo; give slo, such as p95_ttft: 1000")
        return self

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The scenario in the file at `path`. Raises `ScenarioError`."""
        scenario = read_yaml(Path(path), cls, ScenarioError)
        scenario._path = Path(path)
        return scenario

    def load_profile(self, shipped: Path | None = None) -> Profile:
        """The profile that is named; `shipped` is the folder of shipped ones. Raises `DocumentError`."""
        places = [self._path.parent / self.profile]
        if shipped is not None and "/" not in self.profile:
            places.append(shipped / f"{self.profile}.yaml")
        for place in places:
            if place.is_file():
                return Profile.load(place)
        known = sorted(path.stem for path in shipped.glob("*.yaml")) if shipped is not None else []
        hint = f"; shipped are {', '.join(known)}" if known else ""
        raise ScenarioError(
            f"{self._path}: profile: there is no {places[0]}, give a path from the scenario's folder{hint}"
        )

    def servers(self, profile: Profile, given: Mapping[str, Value] | None = None) -> list[Alternative]:
        """The server in question, and then its alternatives.

        Flags that are `given` besides, as ``--max-num-seqs``, win over `engine_flags`. Raises `ScenarioError`.
        """
        own = _over(self._own_line(), ServeLine.of(given or {}))
        servers = [self._server("engine_flags", profile, own)]
        for number, line in enumerate(self.alternatives):
            named = replace(_over(own, line), name=line.label)
            servers.append(self._server(f"alternatives[{number}]", profile, named))
        return servers

    def workloads(self) -> list[Load]:
        """One load a level. Raises `ScenarioError`, `LoadError`, and `TraceError` for a file that is no trace."""
        if self.load.capacity is not None:
            raise ScenarioError(f"{self._path}: load: it searches for a level by capacity and states none")
        return self.load.workloads(self._path.parent)

    def searched_load(self) -> AnyLoad:
        """The load whose level is searched for."""
        (load,) = self.load.workloads(self._path.parent)
        assert isinstance(load, (Workload, Sessions))  # a trace has no capacity
        return load

    def _own_line(self) -> ServeLine:
        """The server in question, as one would start it."""
        given = {f"--{_WRITTEN.get(name, name)}": value for name, value in self.engine_flags.items()}
        line = ServeLine.of({name: value if isinstance(value, bool) else str(value) for name, value in given.items()})
        words = {"gpu": self.gpu, "replicas": str(self.replicas) if self.replicas > 1 else None, "router": self.router}
        return replace(line, words={name: word for name, word in words.items() if word is not None})

    def _server(self, key: str, profile: Profile, line: ServeLine) -> Alternative:
        if not line.flags and not line.words:
            return Alternative(BASELINE, profile)
        try:
            server = alternative(profile, line)
        except (DocumentError, FlagError, MemoryAccountError, ModelError, RouterError) as problem:
            raise ScenarioError(f"{self._path}: {key}: {problem}") from None
        if self.load.capacity is not None and server.fleet.engines > 1:
            raise ScenarioError(
                f"{self._path}: {key}: capacity is searched for one engine; for replicas state levels of load, or ask "
                "capsim optimize"
            )
        return server


_WRITTEN = {"num_gpu_blocks": "num_gpu_blocks_override"}  # names of vLLM's command line
