"""The profile: what was fitted on one server, with its uncertainty and where it may be trusted.

A YAML file that people read and keep under version control. Times are seconds, lengths are tokens.
"""

from __future__ import annotations

import math
import os
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    InstanceOf,
    PlainSerializer,
    ValidationInfo,
    field_validator,
    model_validator,
)

from simulator.engine.engine_flags import EngineFlags, FlagError
from simulator.engine.step_time import HostTime, StepTime
from simulator.flags.vllm_flags import change_flags, parse_flags
from simulator.loads.workload import Load
from simulator.schema_version import readable
from simulator.yaml_file import DocumentError, KeyProblem, Section, read_yaml, suggestion

SCHEMA_VERSION = 1
MOST_SECONDS = 1e6  # of a coefficient
MOST_COUNT = 2**40  # of anything that is counted
MOST_ERROR = 1e6  # relative

# flags that a profile must state: a default would make up a server
NEEDED_FLAGS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_gpu_blocks", "block_size")


class ProfileError(DocumentError):
    """A file that is not a profile, or not one that this version reads. The message is one line."""


class Coefficient(Section):
    """One fitted number. `low` and `high` bound it with 90 % confidence."""

    value: float = Field(ge=0, le=MOST_SECONDS, description="seconds")
    stderr: float | None = Field(default=None, ge=0, le=MOST_SECONDS, description="seconds, standard error")
    low: float | None = Field(default=None, description="seconds, lower end of the 90 % interval")
    high: float | None = Field(default=None, description="seconds, upper end of the 90 % interval")
    origin: Literal["measured", "assumed"] = Field(default="measured", description="'measured' or 'assumed'")
    note: str = ""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.low is not None and self.high is not None and self.low > self.high:
            raise KeyProblem("low", f"the lower bound {self.low:g} lies above the upper bound {self.high:g}")
        return self


def _of_step_time(coefficients: dict[str, Coefficient]) -> dict[str, Coefficient]:
    _check_names(coefficients, StepTime)
    StepTime(**{name: coefficient.value for name, coefficient in coefficients.items()})
    return coefficients


def _of_host_time(coefficients: dict[str, Coefficient]) -> dict[str, Coefficient]:
    _check_names(coefficients, HostTime)
    return coefficients


def _of_correlations(pairs: list[Correlation]) -> list[Correlation]:
    known = {field.name for kind in (StepTime, HostTime) for field in fields(kind)}
    for one, other, value in pairs:
        if strangers := [name for name in (one, other) if name not in known]:
            raise ValueError(f"{strangers[0]!r} is no coefficient")
        if not -1 <= value <= 1:
            raise ValueError(f"a correlation lies between -1 and 1, got {value}")
    return pairs


def _of_gap_noise(percentiles: list[float]) -> list[float]:
    if any(abs(seconds) > MOST_SECONDS for seconds in percentiles):
        raise ValueError(f"gap_noise is in seconds, up to {MOST_SECONDS:g}")
    HostTime(gap_noise=tuple(percentiles))
    return percentiles


def _check_names(coefficients: dict[str, Coefficient], kind: type[StepTime | HostTime]) -> None:
    known = {field.name for field in fields(kind)} - {"gap_noise"}  # not one number but a list of its own
    for name in coefficients:
        if name not in known:
            raise KeyProblem(name, f"unknown coefficient; {suggestion(name, known)}")
    for field in fields(kind):
        if field.default is MISSING and field.name not in coefficients:
            raise ValueError(f"the coefficient {field.name!r} is missing")


def _triple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Correlation = Annotated[tuple[str, str, float], BeforeValidator(_triple)]


class Coefficients(Section):
    """The terms of `simulator.engine.step_time`, by name; one that is left out is zero."""

    step_time: Annotated[dict[str, Coefficient], AfterValidator(_of_step_time)]
    host_time: Annotated[dict[str, Coefficient], AfterValidator(_of_host_time)] = Field(default_factory=dict)
    correlations: Annotated[list[Correlation], AfterValidator(_of_correlations)] = Field(
        default_factory=list, description="pairs of coefficients whose errors move together, each [name, name, -1 to 1]"
    )
    gap_noise: Annotated[list[float], AfterValidator(_of_gap_noise)] = Field(
        default_factory=list, description="seconds that the way to the client adds to a token gap, by percentile"
    )


def _pair(value: object) -> object:
    if isinstance(value, (list, tuple)) and len(value) == 2:
        low, high = value
        if isinstance(low, (int, float)) and isinstance(high, (int, float)) and not 0 <= low <= high <= MOST_COUNT:
            raise ValueError(f"a range is written [low, high], from 0 to {MOST_COUNT}, got [{low}, {high}]")
        return (low, high)
    return value


Range = Annotated[tuple[int, int], BeforeValidator(_pair)]


class MeasuredRange(Section):
    """The conditions under which the coefficients were measured, each from the lowest to the highest seen."""

    concurrency: Range = Field(description="requests in the system")
    sequences: Range = Field(description="sequences in one step")
    context_tokens: Range = Field(description="prompt and generated tokens of one request")
    prompt_chunk_tokens: Range = Field(description="prompt tokens computed in one step")


RelativeError = Annotated[float, Field(ge=-MOST_ERROR, le=MOST_ERROR)]


class LevelErrors(Section):
    """How far the prediction of one measured level is off.

    `errors` are (predicted - measured) / measured, by metric.
    """

    level: str
    num_prompts: int = Field(ge=1, le=MOST_COUNT, description="number of requests")
    errors: dict[str, RelativeError] = Field(
        description="relative errors by metric, 0.02 for 2 % above the measurement"
    )


class Provenance(Section):
    """Where the profile comes from."""

    created: str = Field(default="", description="date and time of the measurement, ISO 8601")
    capsim_version: str = Field(default="", description="which fitted it")
    source: str = Field(default="", description="what was measured, or which publication it was fitted to")


def _engine_flags(value: object, info: ValidationInfo) -> object:
    version = info.data.get("engine_version", EngineFlags.engine_version)
    if isinstance(value, EngineFlags):
        return replace(value, engine_version=version)
    if not isinstance(value, dict):
        return value
    flags = parse_flags(value)
    for name in ("engine_version", "kv_cache_memory_bytes"):
        if name in flags:
            raise KeyProblem(name, "does not belong among the flags of a profile")
    for name in NEEDED_FLAGS:
        if name not in flags:
            raise FlagError(f"{name} is missing; a profile states the flags of the server that was measured")
    return EngineFlags(**flags, engine_version=version)


def _plain_flags(flags: EngineFlags) -> dict[str, Any]:
    return {name: value for name, value in asdict(flags).items() if name != "engine_version"}


class Profile(Section):
    """One model on one engine and GPU, as fitted.

    `engine_flags` are those of the server that was measured. `assumed` are sentences on what was taken for granted and
    not measured.
    """

    schema_version: int = SCHEMA_VERSION
    name: str = Field(min_length=1, description="the profile's name")
    model: str = Field(description="the model's name")
    gpu: str | None = None
    engine_version: str = Field(pattern=r"^\d+\.\d+", description="vLLM's version, such as 0.32.0")
    kv_bytes_per_token: int | None = Field(
        default=None, ge=1, le=MOST_COUNT, description="bytes of KV cache per token, all layers"
    )
    gpu_memory_utilization: float | None = Field(
        default=None, gt=0, le=1, description="the server's --gpu-memory-utilization, where it is known"
    )
    engine_flags: Annotated[InstanceOf[EngineFlags], BeforeValidator(_engine_flags), PlainSerializer(_plain_flags)]
    coefficients: Coefficients
    measured_range: MeasuredRange
    fit: list[LevelErrors] = Field(default_factory=list)
    hold_out: list[LevelErrors] = Field(default_factory=list)
    noise: dict[str, Annotated[float, Field(ge=0, le=MOST_ERROR)]] = Field(
        default_factory=dict, description="range of a metric over repeats of a level by its mean, 0.02 for 2 %"
    )
    assumed: list[str] = Field(default_factory=list)
    provenance: Provenance = Field(default_factory=Provenance)

    @field_validator("schema_version", mode="before")
    @classmethod
    def _is_readable(cls, version: object) -> int:
        return readable(version, SCHEMA_VERSION)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The profile in the file at `path`. Raises `ProfileError`."""
        return read_yaml(Path(path), cls, ProfileError)

    def save(self, path: str | Path) -> None:
        """Write the profile; the same profile gives the same bytes."""
        path = Path(path)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(self.to_yaml(), encoding="utf-8")
        os.replace(partial, path)  # in one move: a reader never sees half a profile

    def to_yaml(self) -> str:
        data = self.model_dump(mode="json", exclude_none=True)
        coefficients = data["coefficients"]
        for name in ("correlations", "gap_noise"):
            if not coefficients[name]:
                del coefficients[name]
        for terms in (coefficients["step_time"], coefficients["host_time"]):
            for coefficient in terms.values():
                if not coefficient["note"]:
                    del coefficient["note"]
        if not data["noise"]:
            del data["noise"]
        name = "".join(letter if letter.isprintable() else " " for letter in self.name)
        header = f"# capsim profile of {name}; times in seconds, lengths in tokens\n"
        return header + yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)

    @property
    def step_time(self) -> StepTime:
        return StepTime(**{name: term.value for name, term in self.coefficients.step_time.items()})

    @property
    def host_time(self) -> HostTime:
        terms: dict[str, Any] = {name: term.value for name, term in self.coefficients.host_time.items()}
        return HostTime(**terms, gap_noise=tuple(self.coefficients.gap_noise))

    def with_flags(self, **changes: object) -> EngineFlags:
        """`engine_flags` with some changed; ``kv_cache_memory_bytes`` is known too. Raises `FlagError`."""
        return change_flags(self.engine_flags, changes, self.kv_bytes_per_token)

    def outside_range(
        self, workload: Load, flags: EngineFlags | None = None, peak_running: int | None = None
    ) -> list[str]:
        """What of `workload` lies outside the measured conditions, a sentence each.

        `flags` default to the profile's. `peak_running` is the largest number of requests that ran at once; without it,
        an open loop is not judged by it.
        """
        return [str(condition) for condition in self._outside(workload, flags or self.engine_flags, peak_running)]

    def doublings_outside(
        self, workload: Load, flags: EngineFlags | None = None, peak_running: int | None = None
    ) -> float:
        """How often the conditions of `outside_range` double, or halve, beyond the measured range, summed up."""
        outside = self._outside(workload, flags or self.engine_flags, peak_running)
        return sum(condition.doublings for condition in outside)

    def _outside(self, workload: Load, flags: EngineFlags, peak_running: int | None) -> list[Outside]:
        measured, clients, found = self.measured_range, workload.concurrency, []
        if clients is not None:
            found = _outside("concurrency", clients, measured.concurrency)
            peak_running = peak_running or min(clients, flags.max_num_seqs, workload.num_prompts)
        if peak_running is not None and not found:
            found += _above("sequences in a step", peak_running, measured.sequences)
        prompt, longest = workload.longest()
        found += _above("tokens of a request", longest, measured.context_tokens)
        chunk = min(prompt, flags.max_num_batched_tokens)
        found += _outside("prompt tokens in a step", chunk, measured.prompt_chunk_tokens)
        return found


class Outside(NamedTuple):
    """A condition of a load beyond the measured range."""

    what: str
    value: int
    measured: tuple[int, int]

    @property
    def doublings(self) -> float:
        """How often the end of the range must be doubled, or halved, to reach the value."""
        low, high = self.measured
        return abs(math.log2(self.value / max(1, high if self.value > high else low)))

    def __str__(self) -> str:
        low, high = self.measured
        return f"{self.what} {self.value:,}, measured {low:,} to {high:,}"


def _outside(what: str, value: int, measured: tuple[int, int]) -> list[Outside]:
    if value < measured[0]:
        return [Outside(what, value, measured)]
    return _above(what, value, measured)


def _above(what: str, value: int, measured: tuple[int, int]) -> list[Outside]:
    return [Outside(what, value, measured)] if value > measured[1] else []


class _Dumper(yaml.SafeDumper):
    """Block style, but pairs of numbers on one line."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        short = len(sequence) in (2, 3) and not any(isinstance(item, (list, dict)) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=short)

    def ignore_aliases(self, data: Any) -> bool:
        return True
