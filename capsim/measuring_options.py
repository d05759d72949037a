"""Options of the commands that measure: the load that they send, and the server that they send it to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capsim.options import (
    ENGINE_OPTIONS,
    LEVEL_OPTIONS,
    ApiKeyFile,
    DcgmUrl,
    Insecure,
    Model,
    NumPrompts,
    RequestsPerClient,
    ServerLog,
    integers,
    read_key,
    reals,
    request_shapes,
    set_flags,
    with_options,
)

if TYPE_CHECKING:
    from simulator.loads.workload import Workload

CLIENTS = "1,2,4,8,16"  # unless a load is given


@dataclass(frozen=True)
class LoadOptions:
    """The levels of load as the command line states them, under the names of its options."""

    concurrency: str | None = None
    request_rate: str | None = None
    burstiness: float = 1.0
    input_len: int | None = None
    output_len: int | None = None
    range_ratio: float = 0.0
    shapes: str | None = None
    num_prompts: int | None = None
    requests_per_client: int | None = None

    @property
    def is_given(self) -> bool:
        return self.concurrency is not None or self.request_rate is not None

    @property
    def is_paced(self) -> bool:
        """Whether the server's pace decides how many requests the levels get."""
        return self.num_prompts is None and self.requests_per_client is None

    def levels(self) -> list[Workload]:
        """Closed loops first, then open ones; `CLIENTS` where neither is given."""
        from simulator.loads.levels import LoadError, plan_levels

        if self.requests_per_client is not None and self.request_rate is not None:
            raise LoadError("--requests-per-client goes with --concurrency alone; give --num-prompts")
        shapes = request_shapes(self.input_len, self.output_len, self.range_ratio, self.shapes)
        concurrency = self.concurrency if self.is_given else CLIENTS
        found: list[Workload] = []
        if concurrency is not None:
            found += plan_levels(
                shapes,
                concurrency=integers("--concurrency", concurrency),
                num_prompts=self.num_prompts,
                requests_per_client=self.requests_per_client,
            )
        if self.request_rate is not None:
            found += plan_levels(
                shapes,
                request_rate=reals("--request-rate", self.request_rate),
                burstiness=self.burstiness,
                num_prompts=self.num_prompts,
            )
        return found


@dataclass(frozen=True)
class ServerOptions:
    """How to ask a server, and what its owner says of it. `flags` are the engine flags that are stated."""

    model: str | None
    api_key: str | None = field(repr=False)
    insecure: bool
    flags: Mapping[str, object]
    server_log: Path | None = None
    dcgm_url: str | None = None


def with_load(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of the load to measure; its parameter `load` is a `LoadOptions`."""
    options: dict[str, tuple[Any, Any]] = {
        **LEVEL_OPTIONS,
        "num_prompts": (NumPrompts, None),
        "requests_per_client": (RequestsPerClient, None),
    }
    return with_options(command, "load", options, lambda values: LoadOptions(**values))


def with_server(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of the server to measure, but for its address; its parameter `server` is a
    `ServerOptions`."""
    options: dict[str, tuple[Any, Any]] = {
        "model": (Model, None),
        "api_key_file": (ApiKeyFile, None),
        "insecure": (Insecure, False),
        "server_log": (ServerLog, None),
        "dcgm_url": (DcgmUrl, None),
    }
    return with_options(command, "server", options | ENGINE_OPTIONS, _server)


def _server(values: Mapping[str, Any]) -> ServerOptions:
    return ServerOptions(
        model=values["model"],
        api_key=read_key(values["api_key_file"]),
        insecure=values["insecure"],
        flags=set_flags(values),
        server_log=values["server_log"],
        dcgm_url=values["dcgm_url"],
    )
