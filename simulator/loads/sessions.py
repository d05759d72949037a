"""Conversations: every turn's prompt is all that was said before and what the user says now."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from simulator.loads.arrivals import Arrivals, ClosedLoop, OpenLoop, ThinkTime
from simulator.loads.bounds import MOST_REQUESTS, MOST_TOKENS
from simulator.loads.lengths import Length, parse_length
from simulator.loads.workload import Integers, Load, Reals, drawn_think_times

SESSION_BITS = 32  # a KV block's content is its session's number and, in so many bits, its place
SYSTEM_PROMPT = -1  # the number in the place of a session's


@dataclass(frozen=True)
class Talk:
    """What a session is made of, in tokens.

    Attributes
        turns: requests of a session
        user: what the user adds with every turn
        output: what is generated in every turn
        system: system prompt that all sessions begin with
        max_context: a session ends before the turn whose prompt and output would be longer; None for no limit
    """

    turns: Length
    user: Length
    output: Length
    system: int = 0
    max_context: int | None = None

    def __post_init__(self) -> None:
        if self.system < 0:
            raise ValueError(f"a system prompt must have at least 0 tokens, got {self.system}")
        if self.system > MOST_TOKENS:
            raise ValueError(f"a system prompt may have up to {MOST_TOKENS:,} tokens, got {self.system}")
        first = self.system + self.user.high + self.output.high
        if self.max_context is not None and first > self.max_context:
            raise ValueError(f"a first turn may have {first} tokens, more than max_context {self.max_context}")

    def __str__(self) -> str:
        system = f"{self.system}+" if self.system else ""
        return f"{self.turns}x({system}{self.user}/{self.output})"


@dataclass(frozen=True)
class Sessions(Load):
    """`num_sessions` conversations, of which `arrivals` says when they begin.

    In a closed loop every client is a user who has one session after the other, and `arrivals.think_time` passes
    between sessions; in an open loop `arrivals.request_rate` counts sessions a second. `think_time` passes between an
    answer and the session's next turn. Requests are numbered session by session.
    """

    arrivals: Arrivals
    talk: Talk
    num_sessions: int
    think_time: ThinkTime | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_sessions < 1:
            raise ValueError(f"num_sessions must be at least 1, got {self.num_sessions}")
        if self.num_sessions * self.talk.turns.mean > MOST_REQUESTS:
            raise ValueError(
                f"{self.num_sessions} sessions of {self.talk.turns} turns are more than {MOST_REQUESTS:,} requests"
            )
        if isinstance(self.arrivals, OpenLoop) and self.arrivals.max_concurrency is not None:
            raise ValueError("max_concurrency goes with single requests; bound sessions by a number of users")

    @property
    def num_prompts(self) -> int:
        return len(self._drawn.prompts)

    @property
    def concurrency(self) -> int | None:
        return self.arrivals.concurrency if isinstance(self.arrivals, ClosedLoop) else None

    @property
    def request_rate(self) -> float | None:
        """Mean requests a second while sessions begin."""
        if isinstance(self.arrivals, ClosedLoop):
            return None
        return self.arrivals.request_rate * self.num_prompts / self.num_sessions

    def lengths(self) -> tuple[Integers, Integers]:
        return self._drawn.prompts, self._drawn.outputs

    def arrival_times(self) -> Reals | None:
        """Seconds from the start at which each session begins; None in a closed loop."""
        return self.arrivals.times(self.num_sessions, self.seed) if isinstance(self.arrivals, OpenLoop) else None

    def conversations(self) -> Sequence[int]:
        return [int(number) for number in self._drawn.turns]

    def think_times(self) -> Reals | None:
        """After every answer; the last one of a session is followed by the time between sessions."""
        between = drawn_think_times(self.arrivals, self.num_sessions, self.seed)
        if self.think_time is None and between is None:
            return None
        rng = np.random.default_rng([self.seed, 3])
        times = np.zeros(self.num_prompts) if self.think_time is None else self.think_time.draw(rng, self.num_prompts)
        times[np.cumsum(self._drawn.turns) - 1] = 0.0 if between is None else between
        return times

    def prefix(self, number: int, block_size: int) -> tuple[int, ...]:
        """All full blocks of prompt and output: the next turn finds them, and other sessions the system prompt's."""
        tokens = int(self._drawn.prompts[number] + self._drawn.outputs[number])
        blocks, shared = tokens // block_size, self.talk.system // block_size
        own, everyone = int(self._drawn.session[number]) << SESSION_BITS, SYSTEM_PROMPT << SESSION_BITS
        return (*range(everyone, everyone + shared), *range(own + shared, own + blocks))

    @property
    def label(self) -> str:
        return self.arrivals.label + (" sessions" if isinstance(self.arrivals, OpenLoop) else "")

    @property
    def lengths_label(self) -> str:
        return str(self.talk)

    def describe(self) -> str:
        think = f", think {self.think_time}" if self.think_time else ""
        return (
            f"{self.arrivals}, {self.num_sessions} sessions of {self.talk.turns} turns{think}, "
            f"{self.talk.user}/{self.talk.output} tokens a turn, system prompt {self.talk.system}, "
            f"{self.num_prompts} requests"
        )

    @property
    def is_random(self) -> bool:
        lengths = (self.talk.turns, self.talk.user, self.talk.output)
        thinks = self.think_time is not None and self.think_time.kind == "exponential"
        return self.arrivals.is_random or thinks or any(length.low != length.high for length in lengths)

    def redrawn(self, number: int) -> Sessions:
        return replace(self, seed=self.seed + number)

    @cached_property
    def _drawn(self) -> _Turns:
        return _draw(self.talk, self.num_sessions, self.seed)


@dataclass(frozen=True, eq=False)
class _Turns:
    """Every turn of every session, session by session; `turns` has one entry a session."""

    turns: Integers
    session: Integers
    prompts: Integers
    outputs: Integers


def _draw(talk: Talk, sessions: int, seed: int) -> _Turns:
    rng = np.random.default_rng([seed, 0])
    turns = talk.turns.draw(rng, sessions)
    total = int(turns.sum())
    users, outputs = talk.user.draw(rng, total), talk.output.draw(rng, total)
    session = np.repeat(np.arange(sessions, dtype=np.int64), turns)
    first = np.cumsum(turns) - turns
    said = np.cumsum(users + outputs)
    ends = talk.system + said - (said - users - outputs)[first][session]  # tokens of the session after each turn
    if talk.max_context is not None:
        kept = ends <= talk.max_context
        turns = np.bincount(session[kept], minlength=sessions).astype(np.int64)
        session, ends, outputs = session[kept], ends[kept], outputs[kept]
    return _Turns(turns, session, ends - outputs, outputs)


def parse_talk(text: str) -> Talk:
    """A talk written ``turns=3-8,user=50-200,output=200,system=1000``. Raises `ValueError`.

    Lengths are written as `simulator.loads.lengths.parse_length` reads them; ``max_context`` may be given too.
    """
    words: dict[str, str] = {}
    for part in split_outside_brackets(text):
        name, equals, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name in words:
            raise ValueError(f"{part!r} of the sessions: write turns=3-8,user=50-200,output=200,system=1000")
        words[name] = value
    return talk_of(words)


def talk_of(words: dict[str, str]) -> Talk:
    """A talk from texts by the names of its attributes. Raises `ValueError`."""
    known = ("turns", "user", "output", "system", "max_context")
    if unknown := [name for name in words if name not in known]:
        raise ValueError(f"sessions have no {unknown[0]!r}; known are {', '.join(known)}")
    if missing := [name for name in known[:3] if name not in words]:
        raise ValueError(f"sessions need {', '.join(missing)}, such as turns=3-8,user=50-200,output=200")
    turns, user, output = (parse_length(words[name]) for name in known[:3])
    context = _tokens(words, "max_context") if "max_context" in words else None
    return Talk(turns, user, output, _tokens(words, "system"), context)


def _tokens(words: dict[str, str], name: str) -> int:
    text = words.get(name, "0").strip()
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError(f"{name} must be a whole number of tokens, up to {MOST_TOKENS:,}; got {text!r}")
    return int(text)


def split_outside_brackets(text: str) -> list[str]:
    """The parts between those commas that stand in no bracket."""
    commas, inside = [-1], False
    for found in re.finditer(r"[,()]", text):
        if found[0] != ",":
            inside = found[0] == "("
        elif not inside:
            commas.append(found.start())
    return [text[start + 1 : end] for start, end in pairwise([*commas, len(text)])]
