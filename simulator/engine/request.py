"""A request as the engine sees it: what it asks for, and how far it has come."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


class Request:
    """One request in the engine. Field names in brackets are vLLM's (`v1/request.py`).

    Attributes set by whoever sends it
        request_id: number of the request
        prompt_tokens: length of its prompt
        max_tokens: most tokens it may generate
        output_tokens: tokens after which it really stops: `max_tokens`, or fewer if a stop token ends it
        priority, arrival_time: order under ``--scheduling-policy priority``; lower goes first
        prefix: contents of the first full KV blocks of prompt and output, equal where the tokens up to there are equal;
            blocks beyond are like no other request's

    Attributes kept by the scheduler. While `decoding`, the `DecodeBatch` counts for the request: `computed` and
    `output` hold what they were when it joined.
        computed: tokens whose KV is computed or scheduled (`num_computed_tokens`)
        output: generated tokens delivered to the scheduler (`num_output_tokens`)
        in_flight: sampled tokens not delivered yet (`num_output_placeholders`)
        blocks: KV blocks held
        cached: prompt tokens that the prefix cache held when it was first admitted
        position: place in the running list, growing with every admission
        last_step: decode clock of the step that samples the last token

    Attributes kept by the engine
        sent, arrived, scheduled, first_token, last_token, ended: s; NaN until they are known
        late_tokens: prompt tokens of the step that brought the last token
    """

    __slots__ = (
        "arrival_time",
        "arrived",
        "blocks",
        "cached",
        "computed",
        "decoding",
        "ended",
        "finished",
        "first_token",
        "in_flight",
        "joined",
        "last_step",
        "last_token",
        "late_tokens",
        "max_tokens",
        "output",
        "output_tokens",
        "position",
        "preempted",
        "preemptions",
        "prefix",
        "priority",
        "prompt_tokens",
        "request_id",
        "scheduled",
        "sent",
    )

    def __init__(
        self,
        request_id: int,
        prompt_tokens: int,
        output_tokens: int,
        max_tokens: int | None = None,
        priority: int = 0,
        arrival_time: float = 0.0,
        prefix: Sequence[Hashable] = (),
    ) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.max_tokens = output_tokens if max_tokens is None else max_tokens
        self.priority = priority
        self.arrival_time = arrival_time
        self.prefix = prefix
        self.computed = 0
        self.output = 0
        self.in_flight = 0
        self.blocks = 0
        self.cached = 0
        self.position = 0
        self.joined = 0
        self.last_step = 0
        self.decoding = False
        self.preempted = False
        self.finished = False
        self.preemptions = 0
        self.late_tokens = 0
        self.sent = self.arrived = arrival_time
        self.scheduled = self.first_token = self.last_token = self.ended = float("nan")

    def block_content(self, index: int) -> Hashable:
        """What the `index`-th full KV block holds: equal for two blocks iff all tokens up to their ends are equal."""
        return self.prefix[index] if index < len(self.prefix) else (self, index)

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.prompt_tokens}/{self.output_tokens})"
