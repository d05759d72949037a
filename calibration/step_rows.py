"""What a fit of step times is held against: one row for what was observed, its terms and its seconds.

Every row is a sum over whole engine steps, so it is linear in the coefficients of `simulator.engine.step_time` but for
the computing that overlaps with the reading of weights, for which `Observations` keeps the tokens of every step.

A step with many prompt tokens reaches the clients late, by 1 to 3 us a prompt token on vLLM 0.32, and the next one does
not: its gap is too long, the next gap is too short by as much. So a step with prompt tokens is observed together with
the step of pure decode that follows, a lone prompt up to its third token, and the lateness of a lone first token apart:
it is that of the prompt's last chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from calibration.steps import all_steps, streams
from simulator.engine.cuda_graphs import DecodeGraphs
from simulator.engine.engine_flags import EngineFlags
from simulator.results.run import Level

TERMS = (
    "constant",
    "per_sequence",
    "per_kv_token",
    "per_prefill_token",
    "per_prefill_attention",
    "mixed_per_sequence",
    "per_padded_sequence",
    "without_graph",
    "weights",
    "per_request",
    "per_prompt_token",
)
HOST_TERMS = ("per_request", "per_prompt_token")
DECODE, MIXED, LONE, FIRST = KINDS = ("decode steps", "mixed steps", "lone prompts", "first tokens")
WORK = ("sequences", "kv_tokens", "prefill_tokens", "prefill_attention")  # columns, in the order of `Work.add`
LONGEST_WINDOW = 8  # mixed steps in a row that are observed as one, where no pure decode comes between
BLOCKS = 10  # of a level, in time: errors within one may belong together
TAIL = 2  # steps after the first token of a lone prompt

Array = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]


@dataclass
class Work:
    """The steps of one row: sums over them, and the tokens that each of them multiplies."""

    terms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TERMS, 0.0))
    tokens: list[int] = field(default_factory=list)
    sequences: int = 0  # of the largest step
    prompt_tokens: int = 0  # of the largest step

    def add(
        self, graphs: DecodeGraphs, sequences: int, kv_tokens: int, prefill_tokens: int = 0, attention: float = 0.0
    ) -> None:
        """One more step."""
        terms = self.terms
        terms["constant"] += 1
        terms["per_sequence"] += sequences
        terms["per_kv_token"] += kv_tokens
        terms["per_prefill_token"] += prefill_tokens
        terms["per_prefill_attention"] += attention
        if prefill_tokens:
            terms["mixed_per_sequence"] += sequences
        else:
            padding = graphs.padding(sequences)
            terms["without_graph"] += padding is None
            terms["per_padded_sequence"] += padding or 0
        self.tokens.append(sequences + prefill_tokens)
        self.sequences = max(self.sequences, sequences)
        self.prompt_tokens = max(self.prompt_tokens, prefill_tokens)


@dataclass(frozen=True)
class Row:
    """`cluster` is what the row's error is shared with, within its level."""

    work: Work
    seconds: float
    kind: str
    cluster: str


@dataclass(frozen=True)
class Observations:
    """All rows.

    Attributes
        terms: rows x `TERMS`; the column of `weights` is zero, see `design`
        seconds: of each row
        kinds: of each row, one of `KINDS`
        levels: number of the level that each row comes from
        clusters: numbers; rows with one number may share errors, they are of one level
        tokens, owners: of every step, the tokens that it multiplies and its row
        most_sequences, most_prompt_tokens: of the largest step
    """

    terms: Array
    seconds: Array
    kinds: npt.NDArray[np.str_]
    levels: Numbers
    clusters: Numbers
    tokens: Array
    owners: Numbers
    most_sequences: int
    most_prompt_tokens: int

    def design(self, knee: float | None) -> Array:
        """Rows x `TERMS`, where `knee` tokens take as long to compute as the weights to read; None for no overlap.

        For a given knee the model is linear: the column of per_prefill_token is the sum of hypot(knee, tokens) - knee.
        """
        if knee is None:
            return self.terms
        return self._with_column("per_prefill_token", np.hypot(knee, self.tokens) - knee)

    def slopes(self, knee: float | None) -> Array:
        """Rows x `TERMS`, by how much each coefficient moves the seconds of a row."""
        if knee is None:
            return self.terms
        slopes = self._with_column("per_prefill_token", self.tokens**2 / np.hypot(knee, self.tokens))
        slopes[:, TERMS.index("weights")] = self._summed(knee / np.hypot(knee, self.tokens) - 1)
        return slopes

    def _with_column(self, name: str, values: Array) -> Array:
        terms = self.terms.copy()
        terms[:, TERMS.index(name)] = self._summed(values)
        return terms

    def _summed(self, values: Array) -> Array:
        return np.bincount(self.owners, values, minlength=len(self.seconds)).astype(np.float64)


def observations(levels: Sequence[Level], flags: EngineFlags, request_delay: float) -> Observations:
    """Steps and lone prompts of all levels. `request_delay` as in `calibration.steps.reconstruct`."""
    rows = [
        (number, row)
        for number, level in enumerate(levels)
        for row in (*step_rows(level, flags, request_delay), *lone_rows(level, flags))
    ]
    clusters = {name: number for number, name in enumerate(dict.fromkeys((at, row.cluster) for at, row in rows))}
    works = [row.work for _, row in rows]
    return Observations(
        terms=np.array([[*work.terms.values()] for work in works], dtype=np.float64).reshape(-1, len(TERMS)),
        seconds=np.array([row.seconds for _, row in rows], dtype=np.float64),
        kinds=np.array([row.kind for _, row in rows], dtype=np.str_),
        levels=np.array([number for number, _ in rows], dtype=np.int64),
        clusters=np.array([clusters[number, row.cluster] for number, row in rows], dtype=np.int64),
        tokens=np.array([tokens for work in works for tokens in work.tokens], dtype=np.float64),
        owners=np.repeat(np.arange(len(works)), [len(work.tokens) for work in works]),
        most_sequences=max((work.sequences for work in works), default=0),
        most_prompt_tokens=max((work.prompt_tokens for work in works), default=0),
    )


def step_rows(level: Level, flags: EngineFlags, request_delay: float) -> Iterator[Row]:
    """Steps of pure decode, and steps with prompt tokens together with what follows; certain ones only."""
    graphs = DecodeGraphs(flags)
    seen = all_steps(level, flags, request_delay)
    block = max(1, -(-len(seen) // BLOCKS))
    works = zip(*(seen[name].tolist() for name in WORK), strict=True)
    window, seconds = Work(), 0.0
    for number, (work, duration, certain) in enumerate(
        zip(works, seen["duration"].tolist(), seen["certain"].tolist(), strict=True)
    ):
        cluster = f"block {number // block}"
        has_prompt = work[WORK.index("prefill_tokens")] > 0
        if not certain:
            window, seconds = Work(), 0.0
        elif has_prompt or window.tokens:
            window.add(graphs, *work)
            seconds += duration
            if not has_prompt or len(window.tokens) == LONGEST_WINDOW:
                yield Row(window, seconds, MIXED, cluster)
                window, seconds = Work(), 0.0
        else:
            single = Work()
            single.add(graphs, *work)
            yield Row(single, duration, DECODE, cluster)


def lone_rows(level: Level, flags: EngineFlags) -> Iterator[Row]:
    """Every request that had the engine to itself: until its third token, and how late its first one was."""
    graphs = DecodeGraphs(flags)
    sent = streams(level)
    busy_until = -np.inf
    for number, stream in enumerate(sent):
        next_sent = sent[number + 1].sent if number + 1 < len(sent) else np.inf
        alone = stream.sent >= busy_until and stream.tokens[: TAIL + 1] == [*range(1, TAIL + 2)]
        busy_until = max(busy_until, stream.times[-1])
        if not alone or next_sent < stream.times[TAIL]:
            continue
        first, third = stream.times[0], stream.times[TAIL]
        name = f"request {stream.request_id}"
        whole, tail = Work(), Work()
        _add_prompt(whole, graphs, stream.prompt_tokens, flags.max_num_batched_tokens)
        for token in range(TAIL):
            whole.add(graphs, 1, stream.prompt_tokens + token)
            tail.add(graphs, 1, stream.prompt_tokens + token)
        whole.terms["per_request"] = 1
        tail.terms["per_prompt_token"] = -((stream.prompt_tokens - 1) % flags.max_num_batched_tokens + 1)
        yield Row(whole, third - stream.sent, LONE, name)
        yield Row(tail, third - first, FIRST, name)


def _add_prompt(work: Work, graphs: DecodeGraphs, prompt: int, budget: int) -> None:
    """A prompt alone: chunks of the whole token budget, one step each."""
    for context in range(0, prompt, budget):
        tokens = min(budget, prompt - context)
        work.add(graphs, 1, 0, tokens, tokens * (context + tokens / 2))
