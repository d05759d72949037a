"""EXPERIMENT: a step-time model with a term that `simulator.step_time.StepTime` lacks. Not a part of capsim.

Matrix multiplications read the weights once and compute for every token. The two overlap, so few tokens cost almost
nothing, and many cost what computing takes: the root of the sum of squares goes smoothly from one to the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from simulator.step_time import StepTime


@dataclass(frozen=True)
class RooflineStepTime(StepTime):
    """`StepTime`, where computing overlaps with the reading of the weights.

    Attributes
        weights: s of `constant` in which the weights are read
    """

    weights: float = 0.0

    def duration(
        self, sequences: int, kv_tokens: int, prefill_tokens: int = 0, prefill_attention: float = 0.0
    ) -> float:
        """As `StepTime.duration`; a decoding sequence is one token to multiply, like each prompt token."""
        computing = self.per_prefill_token * (prefill_tokens + sequences)
        seconds = self.constant + self.per_sequence * sequences + self.per_kv_token * kv_tokens
        seconds += math.hypot(self.weights, computing) - self.weights
        if prefill_tokens:
            seconds += self.per_prefill_attention * prefill_attention + self.mixed_per_sequence * sequences
        return seconds
