"""The outcome of a load, measured on a server or simulated: the same tables, columns and units for both.

A `Run` holds one `Level` for every level of load. All times are seconds; times of a level count from its start.

Definitions
    TTFT  first token minus send
    E2EL  last token minus send
    TPOT  (E2EL - TTFT) / (output tokens - 1), one value a request; NaN for a single token
    ITL   the gap between two successive tokens of a request, pooled over requests
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from simulator.loads.workload import Load

SCHEMA_VERSION = 1

REQUEST_COLUMNS = {
    "request_id": "int64",
    "arrival": "float64",  # s, when the client sent it
    "prompt_tokens": "int64",
    "output_tokens": "int64",
    "ttft": "float64",  # s
    "tpot": "float64",  # s
    "e2el": "float64",  # s
    "queue_time": "float64",  # s, from reaching the engine to being scheduled first; NaN where it cannot be seen
    "preemptions": "int64",  # -1 where it cannot be seen
    "finish_reason": "object",  # "length", "stop"; "" for a failed request
    "error": "object",  # "" for a success, else a short kind such as "http 500", "timeout", "stream broken"
}
GAP_COLUMNS = {
    "time": "float64",  # s, when the later token of the pair arrived
    "gap": "float64",  # s
    "count": "int64",  # how many equal gaps this row stands for
}
TIMELINE_COLUMNS = {
    "time": "float64",  # s
    "running": "int64",  # requests in the engine's running list
    "waiting": "int64",
    "kv_tokens": "float64",  # tokens whose KV is held
    "active_tokens": "float64",  # prompt + generated tokens of every running request
}
STEP_COLUMNS = (
    "time",  # s, when it was planned
    "running",  # requests in the engine's running list once the step is planned
    "waiting",  # requests that were there and were not admitted
    "held_tokens",  # tokens whose KV is held
    "steps",  # how many equal steps this row stands for
    "decodes",  # requests that decode in the rhythm of the batch
    "sequences",  # requests that the step computes something for
    "kv_tokens",  # tokens of context that decoding requests read, mean of the equal steps
    "tokens",  # tokens computed, what --max-num-batched-tokens limits
    "prefill_tokens",  # prompt tokens among them
    "prefill_attention",  # sum of tokens * (context + tokens / 2) over their chunks
)
TOKEN_COLUMNS = {
    "request_id": "int64",
    "time": "float64",  # s, when a chunk arrived
    "tokens": "int64",  # tokens of the request received so far, this chunk included
}

RECORD_COLUMNS = {
    "request_id": "int64",
    "scheduled": "float64",  # s, when it was due; in a closed loop when its client became free
    "sent": "float64",  # s
    "headers": "float64",  # s, when the answer began, before any token; NaN where it never did
    "ended": "float64",  # s, when nothing more was waited for
    "asked_prompt_tokens": "int64",
    "asked_output_tokens": "int64",
    "counted_prompt_tokens": "int64",  # by the server; -1 where it does not say
    "counted_output_tokens": "int64",  # likewise
    "detail": "object",  # the server's own words on an error
}


@dataclass
class Level:
    """One level of load and what came of it.

    Tables have the columns of `REQUEST_COLUMNS`, `GAP_COLUMNS`, `TIMELINE_COLUMNS` and `TOKEN_COLUMNS`. `tokens` is the
    raw record of a measured level and None for a simulated one; so are `records`, with `RECORD_COLUMNS`. `steps` is
    what a simulated engine did, an array for each of `STEP_COLUMNS`; not saved. `duration` runs from the first send to
    the last end.
    `notes` are sentences a reader must know before trusting the numbers. `server_means` are a measured level's means by
    the server's own clock, in seconds, where it tells them: "queue_time", "prefill_time", "decode_time", "ttft".
    `intervals` are 90 % intervals by the names of `simulator.results.summary.Summary.flat`: of a predicted level where
    they were asked for, of a measured one for what its requests are enough for (`simulator.results.resampling`).
    `cached_tokens` are the prompt tokens of a simulated level that came from the prefix cache. `replica_tokens` are the
    prompt and output tokens that each engine of a simulated fleet served (`simulator.engine.fleet`); not saved.
    `held_rate` are the requests a second of an open loop that the server can hold, where a prediction looked for them
    (`simulator.engine.saturation`).
    """

    workload: Load
    duration: float
    requests: pd.DataFrame
    gaps: pd.DataFrame
    timeline: pd.DataFrame
    tokens: pd.DataFrame | None = None
    notes: list[str] = field(default_factory=list)
    server_means: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    records: pd.DataFrame | None = None
    steps: dict[str, npt.NDArray[np.float64]] | None = None
    cached_tokens: int | None = None
    replica_tokens: list[int] | None = None
    held_rate: float | None = None

    @property
    def completed(self) -> pd.DataFrame:
        """The requests that ended without an error."""
        return self.requests[self.requests["error"] == ""]


@dataclass
class Run:
    """Levels of load on one server, in the order they were run.

    `server` says what served it: model, engine version, flags, KV pool, GPU, as far as known. `source` tells a
    measurement from a simulation.
    """

    source: Literal["measured", "simulated"]
    levels: list[Level]
    server: dict[str, object] = field(default_factory=dict)
    started_at: str = ""  # ISO 8601, empty for a simulation (same inputs, same bytes)
