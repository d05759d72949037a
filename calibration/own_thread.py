"""Questions to a server from a thread of their own, since a notebook has an event loop already."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def answer_of(questions: Coroutine[Any, Any, T]) -> T:
    """What `questions` return. An interrupt ends them too, so that nobody waits for a server that says nothing."""
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = []

    async def ask() -> T:
        running.append((asyncio.get_running_loop(), asyncio.current_task()))
        return await questions

    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(asyncio.run, ask())
        try:
            return answer.result()
        except KeyboardInterrupt:
            for loop, task in running:
                if task is not None and not answer.done():
                    loop.call_soon_threadsafe(task.cancel)
            raise
