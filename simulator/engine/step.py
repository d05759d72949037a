"""One step of the engine as the scheduler plans it."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.engine.request import Request


class Chunk:
    """Tokens of one request scheduled one by one: a part of a prompt, a recompute, or a delayed decode token."""

    __slots__ = ("context", "request", "tokens")

    def __init__(self, request: Request, tokens: int, context: int) -> None:
        self.request = request
        self.tokens = tokens
        self.context = context  # tokens computed before this step

    @property
    def is_prefill(self) -> bool:
        """Whether prompt tokens are computed, or several tokens at once (recompute after a preemption)."""
        return self.tokens > 1 or self.context < self.request.prompt_tokens


class Work:
    """What the chunks of a step compute.

    Attributes
        tokens: what ``--max-num-batched-tokens`` limits
        prefill_tokens, prefill_attention: prompt tokens, and the sum of t * (context + t / 2) over their chunks
        kv_tokens: context that the other chunks read
    """

    __slots__ = ("kv_tokens", "prefill_attention", "prefill_tokens", "tokens")

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        kv_tokens = tokens = prefill_tokens = 0
        attention = 0.0
        for chunk in chunks:
            tokens += chunk.tokens
            if chunk.is_prefill:
                prefill_tokens += chunk.tokens
                attention += chunk.tokens * (chunk.context + chunk.tokens / 2)
            else:
                kv_tokens += chunk.context
        self.kv_tokens, self.tokens = kv_tokens, tokens
        self.prefill_tokens, self.prefill_attention = prefill_tokens, attention


class Step:
    """One step of the engine, as planned.

    Attributes
        decodes, decode_kv_tokens: requests of the decode batch, one token each, and the KV tokens they read
        chunks: all other scheduled tokens, in the order of the running list
        admitted, preempted: requests that entered and left the running list in this step
        samplers: requests outside the batch that sample a token in this step
        joined: requests that sample in this step and decode in the batch from the next one on
        finishing: requests of the batch whose last token this step samples
        left: requests that fell out of the batch in this step, before their end
        tokens_out: tokens that the batch delivers with this step
        work: of the chunks; the engine adds it up once the step is planned, None without chunks
    """

    __slots__ = (
        "admitted",
        "chunks",
        "decode_kv_tokens",
        "decodes",
        "finishing",
        "joined",
        "left",
        "preempted",
        "samplers",
        "tokens_out",
        "work",
    )

    def __init__(self) -> None:
        self.decodes = 0
        self.decode_kv_tokens = 0
        self.tokens_out = 0
        self.work: Work | None = None
        self.chunks: list[Chunk] = []
        self.admitted: list[Request] = []
        self.preempted: list[Request] = []
        self.samplers: list[Request] = []
        self.joined: list[Request] = []
        self.finishing: list[Request] = []
        self.left: list[Request] = []

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.chunks

    @property
    def is_steady(self) -> bool:
        """Whether the step does nothing but give every request of the batch a token that is not its last."""
        return bool(self.decodes) and not (
            self.chunks or self.admitted or self.preempted or self.finishing or self.left or self.samplers
        )
