"""The scenario: a question to the simulator. Which server, under which flags, bears which load, against which targets.

name: long-prompts
profile: profiles/rtx4090-qwen2.5-7b.yaml   # beside the scenario, or the name of a shipped profile
engine_flags:
  max-num-seqs: 64                          # vLLM's names; the profile's flags hold for the rest
  kv-cache-memory-bytes: 6.12GiB
load:
  concurrency: [1, 2, 4, 8]                 # clients; or request_rate, requests a second, with burstiness
  input_len: 1024                           # tokens; or {low: 512, high: 2048}; or shapes: ["512/128:0.7", ...]
  output_len: 256
  num_prompts: 1000                         # requests a level; or requests_per_client
slo:
  p99_ttft: 2000                            # milliseconds
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf, PrivateAttr, model_validator

from simulator.engine_flags import EngineFlags, FlagError
from simulator.levels import LoadError, parse_shape, plan_levels, uniform_shape
from simulator.profile import Profile
from simulator.targets import check_targets
from simulator.vllm_flags import parse_flags
from simulator.workload import Length, Shape, Workload
from simulator.yaml_file import DocumentError, KeyProblem, Section, read_yaml


class ScenarioError(DocumentError):
    """A file that is not a scenario, or one that cannot be run. The message is one line."""


def _length(value: object) -> object:
    """A number of tokens, or ``{low: ..., high: ...}``."""
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
    if type(value) is not int:
        raise ValueError(f"must be a whole number of tokens or {{low: ..., high: ...}}, got {value!r}")
    return Length.fixed(value)


def _shape(value: object) -> object:
    return parse_shape(value) if isinstance(value, str) else value


Positive = Annotated[float, Field(gt=0, allow_inf_nan=True)]
TokenLength = Annotated[InstanceOf[Length], BeforeValidator(_length)]


class LoadSection(Section):
    """Levels of load, and the requests that make them up."""

    concurrency: list[int] | None = Field(default=None, description="numbers of clients, such as [1, 2, 4]")
    request_rate: list[Positive] | None = Field(default=None, description="requests a second, such as [0.5, 1, 2]")
    burstiness: Positive = Field(default=1.0, description="1 for Poisson, below it burstier, .inf for even spacing")
    input_len: TokenLength | None = Field(default=None, description="tokens of a prompt")
    output_len: TokenLength | None = Field(default=None, description="tokens to generate")
    range_ratio: float = Field(default=0.0, ge=0, lt=1, description="spread of the lengths, 0.1 for 10 % up and down")
    shapes: list[Annotated[InstanceOf[Shape], BeforeValidator(_shape)]] | None = Field(
        default=None, description='kinds of requests, such as ["512/128:0.7", "4096/256:0.3"]'
    )
    num_prompts: int | None = Field(default=None, ge=1, description="requests a level")
    requests_per_client: int | None = Field(default=None, ge=1, description="requests a level for each client")
    seed: int = Field(default=0, ge=0, description="a whole number; the same one draws the same load")

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        self.workloads()
        return self

    def workloads(self) -> list[Workload]:
        """One workload a level."""
        return plan_levels(
            self._kinds(),
            concurrency=self.concurrency,
            request_rate=self.request_rate,
            burstiness=self.burstiness,
            num_prompts=self.num_prompts,
            requests_per_client=self.requests_per_client,
            seed=self.seed,
        )

    def _kinds(self) -> list[Shape]:
        if self.shapes is not None:
            if self.input_len or self.output_len or self.range_ratio:
                raise LoadError("give either shapes, or input_len, output_len and range_ratio")
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

    def workloads(self) -> list[Workload]:
        return self.load.workloads()
