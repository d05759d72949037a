"""When the tokens of an answer came, kept small: there are millions in a long level."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt


class TokenTimes:
    """Pairs of a time in seconds and the tokens received by then, one for each read that brought tokens.

    16 bytes a pair, where a list of tuples takes about 120, here and again in the process that hears of it.
    """

    __slots__ = ("_times", "_tokens")

    def __init__(self, pairs: Iterable[tuple[float, int]] = ()) -> None:
        self._times, self._tokens = array("d"), array("q")
        for pair in pairs:
            self.append(pair)

    def append(self, pair: tuple[float, int]) -> None:
        self._times.append(pair[0])
        self._tokens.append(pair[1])

    def pop(self) -> tuple[float, int]:
        """Take the last pair away and return it."""
        return self._times.pop(), self._tokens.pop()

    def __len__(self) -> int:
        return len(self._times)

    def __iter__(self) -> Iterator[tuple[float, int]]:
        return zip(self._times, self._tokens, strict=True)

    def __getitem__(self, place: int) -> tuple[float, int]:
        return self._times[place], self._tokens[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (TokenTimes, list)) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        return repr(list(self))

    @property
    def tokens(self) -> int:
        """All that were received."""
        return self._tokens[-1] if self._tokens else 0

    def received_by(self, time: float) -> int:
        """Tokens at that moment."""
        place = bisect_right(self._times, time)
        return self._tokens[place - 1] if place else 0

    def arrays(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Times and tokens."""
        return np.array(self._times, np.float64), np.array(self._tokens, np.int64)
