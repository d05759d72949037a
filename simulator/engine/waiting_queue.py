"""Requests that wait for admission, in the order of the scheduling policy (`v1/core/sched/request_queue.py`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from simulator.engine.request import Request


class FCFSQueue(deque[Request]):
    """First come, first served; a preempted request goes back to the head."""

    prepend = deque.appendleft

    @property
    def head(self) -> Request:
        return self[0]


class PriorityQueue:
    """Lowest priority value first, then earliest arrival, then lowest request id."""

    def __init__(self) -> None:
        self._requests: list[tuple[int, float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in sorted(self._requests))

    @property
    def head(self) -> Request:
        return self._requests[0][-1]

    def append(self, request: Request) -> None:
        heappush(self._requests, (request.priority, request.arrival_time, request.request_id, request))

    prepend = append

    def popleft(self) -> Request:
        return heappop(self._requests)[-1]

    def remove(self, request: Request) -> None:
        self._requests = [entry for entry in self._requests if entry[-1] is not request]
        heapify(self._requests)
