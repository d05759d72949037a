"""Decode steps that follow each other at once, each longer than the last one by the same time.

Such steps end at moments that are counted from where their rhythm began. So it makes no difference, to the last bit,
whether they are taken one by one or many at once.
"""

from __future__ import annotations

import math

SAME = 1e-12  # relative; no two durations that differ in what is computed are as close


class Rhythm:
    """Steps are numbered from 1.

    Attributes
        start: s, when the first step began
        first: s, how long it took
        growth: s by which each further step takes longer
        size: requests that decode
        steps: how many have been given to the device
    """

    __slots__ = ("first", "growth", "size", "start", "steps")

    def __init__(self, start: float, first: float, growth: float, size: int) -> None:
        self.start, self.first, self.growth, self.size = start, first, growth, size
        self.steps = 1

    def goes_on(self, size: int, duration: float) -> bool:
        """Whether a step of `size` sequences that takes `duration` seconds would be the next one."""
        return size == self.size and abs(duration - self.first - self.growth * self.steps) <= SAME * duration

    def duration(self, number: int) -> float:
        """Seconds of a step."""
        return self.first + self.growth * (number - 1)

    def end(self, number: int) -> float:
        """When a step ends; when the first one began for 0."""
        return self.start + (self.first * number + self.growth * (number * (number - 1) // 2))

    def steps_until(self, moment: float, done: int, most: int) -> int:
        """How many steps after `done` there are until one ends at `moment` or later; 1 at least, `most` at most."""
        if self.end(done + most) <= moment:
            return most
        b, seconds = self.first + self.growth * (done - 0.5), moment - self.end(done)
        steps = min(1 + int(2 * seconds / (b + math.sqrt(b * b + 2 * self.growth * seconds))), most)
        while steps > 1 and self.end(done + steps - 1) >= moment:
            steps -= 1
        while self.end(done + steps) < moment:
            steps += 1
        return steps
