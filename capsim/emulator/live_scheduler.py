"""The simulator's scheduler with what only a live server needs: answers while they grow, and clients that leave."""

from __future__ import annotations

from simulator.engine.request import Request
from simulator.engine.scheduler import Scheduler


class LiveScheduler(Scheduler):
    """A scheduler whose requests have someone waiting for each token."""

    def delivered(self, request: Request) -> int:
        """Tokens of a request's answer whose steps have been processed."""
        if not request.decoding:
            return request.output
        sampled = request.computed + self.batch.clock - request.joined + 1 - request.prompt_tokens
        return min(sampled - len(self._unprocessed), request.output_tokens)

    def abort(self, request: Request) -> None:
        """End a request whose client has left, between two steps, as `finish_requests` of vLLM does.

        Its tokens in flight are thrown away. One that has ended already stays as it is.
        """
        if request.finished:
            return
        for step in self._unprocessed:
            if request in step.finishing:
                step.finishing.remove(request)
        if request in self.running:
            self._leave_running(request)
        else:
            self.waiting.remove(request)
        self.kv_cache.release(request)
        request.finished = True
        self._flush = True

    def _leave_running(self, request: Request) -> None:
        if request.decoding:
            self.batch.leave(request)
            self.kv_cache.store(request, request.computed - len(self._unprocessed))
        elif request in self._others:
            self._others.remove(request)
        del self.running[request]
