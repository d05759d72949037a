"""Recorded traffic: when requests arrived and how long they were, to be played again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from simulator.workload import Load


class TraceError(ValueError):
    """A file that is not a trace of a known format."""


@dataclass(frozen=True, eq=False)
class Trace(Load):
    """Requests in the order of arrival.

    Attributes
        name: what a report calls it
        times: seconds from the first arrival, not decreasing
        prompt_tokens, generated_tokens: lengths, at least 1
    """

    name: str
    times: npt.NDArray[np.float64]
    prompt_tokens: npt.NDArray[np.int64]
    generated_tokens: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        if not len(self.times) == len(self.prompt_tokens) == len(self.generated_tokens) > 0:
            raise TraceError("a trace needs at least one request, and a time and two lengths for each")
        if np.any(np.diff(self.times) < 0):
            raise TraceError("a trace's arrivals must be in order of time")
        if self.prompt_tokens.min() < 1 or self.generated_tokens.min() < 1:
            raise TraceError("a trace's requests must have at least one prompt and one generated token")

    @property
    def num_prompts(self) -> int:
        return len(self.times)

    @property
    def concurrency(self) -> None:
        return None

    def lengths(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return self.prompt_tokens, self.generated_tokens

    def arrival_times(self) -> npt.NDArray[np.float64]:
        return self.times

    def describe(self) -> str:
        return f"{self.name}, {self.num_prompts} requests"

    def faster(self, factor: float) -> Trace:
        """The same requests at `factor` times the rate."""
        return replace(self, times=self.times / factor)


def read_azure(path: Path) -> Trace:
    """A trace of the Azure LLM inference datasets of 2023 and 2024 (CSV, also compressed).

    Requests without generated tokens are left out. Raises `TraceError`.
    """
    table = pd.read_csv(path)
    wanted = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
    if missing := [name for name in wanted if name not in table.columns]:
        raise TraceError(f"{path.name} has no column {missing[0]!r}; an Azure trace has {', '.join(wanted)}")
    table = table[(table["ContextTokens"] > 0) & (table["GeneratedTokens"] > 0)]
    moments = pd.to_datetime(table["TIMESTAMP"])
    seconds = np.asarray((moments - moments.min()).dt.total_seconds(), dtype=np.float64)
    order = np.argsort(seconds, kind="stable")
    return Trace(
        path.name.split(".")[0],
        seconds[order],
        table["ContextTokens"].to_numpy(dtype=np.int64)[order],
        table["GeneratedTokens"].to_numpy(dtype=np.int64)[order],
    )
