"""Simulated time on the clock of the machine, at its pace or faster."""

from __future__ import annotations

from time import perf_counter


class Clock:
    """Simulated seconds since the clock was made: `speed` of them pass in a second."""

    def __init__(self, speed: float = 1.0) -> None:
        if not 0 < speed < float("inf"):
            raise ValueError(f"the speed must be a positive number, got {speed}")
        self.speed = speed
        self._start = perf_counter()

    def now(self) -> float:
        """Simulated seconds."""
        return (perf_counter() - self._start) * self.speed

    def left(self, moment: float) -> float:
        """Seconds of the machine until a simulated moment, negative when it has passed."""
        return moment / self.speed + self._start - perf_counter()
