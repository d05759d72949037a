"""How long an engine step takes, and what the host adds outside of it.

The terms are those on which independent teams converge for GPU inference: a constant (weights read from memory, kernel
launches), a cost of each sequence, of each KV token that attention reads, of each prefill token (compute) and of
prefill attention, which grows with the square of the prompt. A step that carries prefill and decode pays the constant
once.

Matrix multiplications read the weights once and compute for every token. The two overlap: few tokens take as long as
reading the weights, many take what computing them takes. This is the roofline model (Williams, Waterman and Patterson,
2009, doi 10.1145/1498765.1498785) with its corner rounded: hypot(weights, computing) instead of the larger of the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

LEAST_STEP = 1e-9  # s


@dataclass(frozen=True)
class StepTime:
    """Duration of one engine step, in seconds: linear in what the step does, but for `weights`.

    Attributes
        constant: s a step
        per_sequence: s for each sequence in the step
        per_kv_token: s for each token of context that decoding sequences read
        per_prefill_token: s for each prompt token computed
        per_prefill_attention: s for each unit of ``tokens * (context + tokens / 2)`` of a prefill chunk
        mixed_per_sequence: s for each sequence of a step with prompt tokens (full CUDA graphs serve pure decode)
        per_padded_sequence: s for each empty place of the CUDA graph that a batch of pure decode runs as
        without_graph: s more for a step of pure decode that no captured CUDA graph is large enough for
        weights: s of `constant` in which the weights are read, hidden behind which tokens are computed. A step of
            `tokens`, prompt tokens and sequences together, then takes hypot(weights, per_prefill_token * tokens) -
            weights to compute. Zero is no such overlap: prompt tokens cost `per_prefill_token` each, and the computing
            of decoding sequences is a part of `per_sequence`.
    """

    constant: float
    per_sequence: float = 0.0
    per_kv_token: float = 0.0
    per_prefill_token: float = 0.0
    per_prefill_attention: float = 0.0
    mixed_per_sequence: float = 0.0
    per_padded_sequence: float = 0.0
    without_graph: float = 0.0
    weights: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise ValueError(f"step time: {field.name} must be a finite number of seconds >= 0, got {value}")
        if self.constant + self.per_sequence < LEAST_STEP:
            raise ValueError("step time: constant and per_sequence are both zero; a step cannot take no time")

    def duration(
        self, sequences: int, kv_tokens: int, prefill_tokens: int = 0, prefill_attention: float = 0.0
    ) -> float:
        """Seconds for a step of `sequences` sequences that reads `kv_tokens` tokens of context to decode and computes
        `prefill_tokens` prompt tokens, whose chunks sum up to `prefill_attention` = sum of t * (context + t / 2)."""
        seconds = self.constant + self.per_sequence * sequences + self.per_kv_token * kv_tokens
        if self.weights:
            seconds += math.hypot(self.weights, self.per_prefill_token * (prefill_tokens + sequences)) - self.weights
        if prefill_tokens:
            seconds += (
                (0.0 if self.weights else self.per_prefill_token * prefill_tokens)
                + self.per_prefill_attention * prefill_attention
                + self.mixed_per_sequence * sequences
            )
        return seconds

    def graph_cost(self, padding: int | None) -> float:
        """Seconds more for a step of pure decode in a CUDA graph with `padding` empty places; None is no graph."""
        return self.without_graph if padding is None else self.per_padded_sequence * padding

    def decode_growth(self, sequences: int) -> float:
        """Seconds by which each further step of the same `sequences` decoding sequences takes longer."""
        return self.per_kv_token * sequences


NOISE_PERCENTILES = (0.1, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)


@dataclass(frozen=True)
class HostTime:
    """What a client sees besides engine steps.

    Attributes
        per_request_serial: s for which the API server, one Python thread, is busy with a request before the engine has
            it (HTTP, tokenizing, hand-over), while others wait
        per_request: s for the rest, once a request: the way back of its answer
        per_prompt_token: s by which what a step brings reaches the client later, for each of its prompt tokens, while
            the engine goes on; 1 to 3 us on vLLM 0.32
        gap_noise: s, the `NOISE_PERCENTILES` of what the way to the client adds to a token gap, about zero on average;
            empty for none
    """

    per_request: float = 0.0
    per_request_serial: float = 0.0
    per_prompt_token: float = 0.0
    gap_noise: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("per_request", "per_request_serial", "per_prompt_token"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"host time: {name} must be a finite number of seconds >= 0, got {value}")
        if self.gap_noise and len(self.gap_noise) != len(NOISE_PERCENTILES):
            raise ValueError(
                f"host time: gap_noise needs {len(NOISE_PERCENTILES)} percentiles, got {len(self.gap_noise)}"
            )
        if list(self.gap_noise) != sorted(self.gap_noise):
            raise ValueError("host time: the percentiles of gap_noise must not decrease")
