"""The scenario: a question to the simulator. Which server, under which flags, bears which load, against which targets.

name: long-prompts
profile: profiles/rtx4090-qwen2.5-7b.yaml   # beside the scenario, or the name of a shipped profile
engine_flags:
  max-num-seqs: 64                          # vLLM's names; the profile's flags hold for the rest
  kv-cache-memory-bytes: 6.12GiB
load:
  concurrency: [1, 2, 4, 8]                 # clients, with think_time; or request_rate, requests a second, with
                                            # burstiness, rate_curve and max_concurrency
  input_len: 1024                           # tokens; or {low: 512, high: 2048}, or lognormal(1000,600); or shapes:
  output_len: 256                           # ["512/128:0.7", ...]; or sessions: {turns: 5, user: 100, output: 200};
                                            # or trace: a file, from the scenario's folder, with speed
  num_prompts: 1000                         # requests a level; or requests_per_client, or duration in seconds
slo:
  p99_ttft: 2000                            # milliseconds
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf, PrivateAttr, model_validator

from simulator.arrivals import RateCurve, parse_curve, parse_seconds, parse_think_time
from simulator.engine_flags import EngineFlags, FlagError
from simulator.lengths import FORMS, parse_length
from simulator.levels import Levels, LoadError, parse_shape, plan_load, uniform_shape
from simulator.profile import Profile
from simulator.sessions import Talk
from simulator.targets import check_targets
from simulator.trace import Trace
from simulator.trace_files import read_trace
from simulator.vllm_flags import parse_flags
from simulator.workload import Length, Load, Shape, ThinkTime
from simulator.yaml_file import DocumentError, KeyProblem, Section, read_yaml


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
        """One load a level. A trace's path starts from `folder`. Raises `TraceError` and `LoadError`."""
        requests = self._requests()
        if self.trace is not None:
            requests = read_trace(folder / self.trace, self.trace_format)
        return plan_load(requests, self._levels())

    def _levels(self) -> Levels:
        return Levels(
            concurrency=self.concurrency,
            request_rate=self.request_rate,
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
        if self.sessions is not None:
            return self.sessions.talk()
        if self.trace is not None:
            return Trace(self.trace, np.arange(2.0), np.ones(2, np.int64), np.ones(2, np.int64))
        if self.shapes is not None:
            return self.shapes
        if not self.input_len or not self.output_len:
            raise LoadError("give input_len and output_len, or shapes")
        return [uniform_shape(self.input_len, self.output_len, self.range_ratio)]


def _known_flags(flags: dict[str, Any]) -> dict[str, Any]:
    return parse_flags(flags)


class Scenario(Section):
    """A load on the server of a profile.

    `engine_flags` are those that differ from the profile's. `slo` holds targets in milliseconds, such as ``p99_ttft``.
    """

    schema_version: Literal[1] = 1
    name: str = Field(min_length=1, description="the scenario's name")
    description: str = ""
    profile: str = Field(min_length=1, description="the path of a profile, from this file, or a shipped profile's name")
    engine_flags: Annotated[dict[str, Any], AfterValidator(_known_flags)] = Field(default_factory=dict)
    load: LoadSection
    slo: Annotated[dict[str, float], AfterValidator(check_targets)] = Field(
        default_factory=dict, description="milliseconds"
    )
    _path: Path = PrivateAttr(default_factory=Path)

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

    def flags(self, profile: Profile) -> EngineFlags:
        """The engine's flags in this scenario. Raises `ScenarioError`."""
        try:
            return profile.with_flags(**self.engine_flags)
        except FlagError as problem:
            raise ScenarioError(f"{self._path}: engine_flags: {problem}") from None

    def workloads(self) -> list[Load]:
        """One load a level. Raises `LoadError`, and `TraceError` for a file that is no trace."""
        return self.load.workloads(self._path.parent)
