"""Replays a dump of vLLM's own scheduler with ours and writes down the same events.

A dump is ``{"head": {"config": ..., "vllm": ...}, "workload": [...], "events": [...]}``: one run of vLLM's `Scheduler` or
`AsyncScheduler`, driven step by step by the engine's own step function on a made-up clock.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simulator.engine_flags import EngineFlags
from simulator.request import Request
from simulator.scheduler import Scheduler, Step

Event = dict[str, Any]


def load_dump(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)  # type: ignore[no-any-return]


def flags_of(head: dict[str, Any]) -> EngineFlags:
    config = head["config"]
    return EngineFlags(
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        max_model_len=config["max_model_len"],
        num_gpu_blocks=config["num_blocks"],
        block_size=config["block_size"],
        enable_chunked_prefill=config["chunked_prefill"],
        enable_prefix_caching=config["prefix_caching"],
        long_prefill_token_threshold=config["long_prefill_token_threshold"],
        long_prefill_token_threshold_adaptive=config["long_prefill_token_threshold_adaptive"],
        scheduling_policy=config["policy"],
        watermark=config["watermark"],
        scheduler_reserve_full_isl=config["reserve_full_isl"],
        async_scheduling=config["async"],
        engine_version=head["vllm"],
    )


class Replay:
    """One dump, played again."""

    def __init__(self, dump: dict[str, Any]) -> None:
        self.head = dump["head"]
        self.flags = flags_of(self.head)
        self.scheduler = Scheduler(self.flags)
        # vLLM breaks ties of priority by its request ids, which are strings
        self.names = sorted(entry["id"] for entry in dump["workload"])
        numbers = {name: number for number, name in enumerate(self.names)}
        self.pending = [self._request(numbers[entry["id"]], entry) for entry in dump["workload"]]
        self.steps_of = {numbers[entry["id"]]: entry.get("arrival_step", 0) for entry in dump["workload"]}
        self._samples: list[list[Request]] = []
        self.steps = 0

    def _request(self, number: int, entry: dict[str, Any]) -> Request:
        arrival = entry.get("arrival_time", entry.get("arrival_step", 0))
        shared = entry.get("prefix_len", 0) // self.flags.block_size
        output = min(entry["output_len"], entry.get("stop_len", entry["output_len"]))
        return Request(
            number,
            entry["prompt_len"],
            output,
            entry["output_len"],
            entry.get("priority", 0),
            float(arrival),
            tuple((entry.get("prefix_id"), block) for block in range(shared)),
        )

    def schedule(self, iteration: int) -> tuple[Step, Event]:
        scheduler = self.scheduler
        resumed_before = {request for request in scheduler.waiting if request.preempted}
        step = scheduler.schedule()
        self.steps += 1
        chunks = {chunk.request: chunk.tokens for chunk in step.chunks}
        tokens = {
            request: chunks.get(request, 1)
            for request in scheduler.running
            if request in chunks or (request.decoding and step.decodes)
        }
        sampling = set(step.samplers) | set(step.joined)
        samples = [request for request in tokens if request in sampling or request not in chunks]
        event = {
            "ev": "schedule",
            "step": self.steps,
            "it": iteration,
            "n": {self.names[request.request_id]: n for request, n in tokens.items()},
            "total": sum(tokens.values()),
            "samples": self._names(samples),
            "new": self._names(r for r in step.admitted if r not in resumed_before),
            "resumed": sorted(self._names(r for r in step.admitted if r in resumed_before)),
            "admitted": self._names(step.admitted),
            "preempted": self._names(step.preempted),
            "running": self._names(scheduler.running),
            "waiting": self._names(scheduler.waiting),
            "free": scheduler.kv_cache.free_blocks,
        }
        self._samples.append(samples)
        return step, event

    def update(self, step: Step, number: int, iteration: int) -> Event:
        samples = [request for request in self._samples.pop(0) if not request.finished]
        finished = self.scheduler.update(step)
        return {
            "ev": "update",
            "step": number,
            "it": iteration,
            "tokens": self._names(samples),
            "finished": self._names(finished),
            "free": self.scheduler.kv_cache.free_blocks,
        }

    def _names(self, requests: Any) -> list[str]:
        return [self.names[request.request_id] for request in requests]

    def arrivals(self, iteration: int) -> list[Request]:
        chosen = [r for r in self.pending if self.steps_of[r.request_id] <= iteration]
        self.pending = [r for r in self.pending if self.steps_of[r.request_id] > iteration]
        return chosen


def replay(dump: dict[str, Any]) -> Iterator[Event]:
    """The events of a dump whose requests arrive at numbered iterations, in the order of the engine's step function."""
    play = Replay(dump)
    depth = 2 if play.flags.async_scheduling else 1
    queue: list[tuple[int, Step]] = []
    iteration = 0
    while play.pending or queue or play.scheduler.has_requests:
        if not queue and not play.scheduler.has_requests:
            iteration = max(iteration, min(play.steps_of[r.request_id] for r in play.pending))
        if arrived := play.arrivals(iteration):
            for request in arrived:
                play.scheduler.add(request)
            yield {"ev": "add", "it": iteration, "ids": play._names(arrived)}
        if play.scheduler.has_requests:
            step, event = play.schedule(iteration)
            queue.append((play.steps, step))
            yield event
            if not step.is_empty and len(queue) < depth:
                iteration += 1
                continue
        if queue:
            number, step = queue.pop(0)
            yield play.update(step, number, iteration)
        iteration += 1
