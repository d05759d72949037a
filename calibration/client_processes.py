"""Processes that load a server and do nothing else, so that nothing here delays them."""

from __future__ import annotations

import math
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from time import perf_counter
from types import TracebackType
from typing import Self

import numpy as np

from calibration.clients import Finished, Job, Progress, Ready, Recording, Share
from calibration.endpoint import EndpointError
from calibration.secrecy import environment_without_secrets

TOKENS_PER_PROCESS = 10_000  # a second: a fifth of a slow core, and little enough that a burst is read in 5 ms
USUAL_PACE = 50.0  # tokens a second of a stream, before it is known
HEAD_START = 0.05  # s, for the message that says when to begin
SILENCE = 300  # s, after which a process that says nothing is stuck; it says every five that it is well
ENDING = 10.0  # s, for a process to end


class LoadGeneratorError(RuntimeError):
    """A process that loads the server has failed. The message is one line."""


def record_apart(job: Job, on_progress: Callable[[Progress], None] | None = None) -> Recording:
    """Play a level from processes of their own. Raises `EndpointError` where the server cannot be measured at all."""
    with ExitStack() as stack:
        processes = [stack.enter_context(ClientProcess()) for _ in range(job.processes or processes_for(job))]
        return _Crew(job, processes, on_progress).play()


def processes_for(job: Job) -> int:
    """As many as the tokens that may come need, up to one a core."""
    load = job.workload
    streams = min(load.concurrency or load.max_concurrency or load.num_prompts, load.num_prompts)
    tokens = streams * USUAL_PACE
    if load.concurrency is None and load.request_rate is not None:
        tokens = min(tokens, load.request_rate * float(load.lengths()[1].mean()))
    return max(1, min(os.cpu_count() or 1, math.ceil(tokens / TOKENS_PER_PROCESS), streams))


def merged(recordings: Sequence[Recording]) -> Recording:
    """What several processes saw as one. The first saw the server; the slowest says whether we were fast enough."""
    latest = max(recordings, key=lambda seen: float(np.percentile(seen.loop_lags, 99)) if seen.loop_lags else 0.0)
    answers = [answer for seen in recordings for answer in seen.answers]
    return replace(
        recordings[0],
        answers=sorted(answers, key=lambda answer: (answer.sent, answer.index)),
        loop_lags=latest.loop_lags,
        cpu_share=max(seen.cpu_share for seen in recordings),
        processes=len(recordings),
    )


class _Crew:
    """Processes that begin a level together, once all are ready, and go on together, once all have finished."""

    def __init__(
        self, job: Job, processes: Sequence[ClientProcess], on_progress: Callable[[Progress], None] | None
    ) -> None:
        self._job, self._processes, self._on_progress = job, processes, on_progress
        self._heard: queue.Queue[tuple[int, object]] = queue.Queue()
        self._at_work = self._ready = self._finished = 0
        self._progress = [Progress(0, 0, 0)] * len(processes)
        self._recordings: dict[int, Recording] = {}
        self._silent = [0] * len(processes)  # s, that each has said nothing

    def play(self) -> Recording:
        for number, process in enumerate(self._processes):
            threading.Thread(target=process.listen, args=(number, self._heard), daemon=True).start()
        self._give(self._job)
        tick = perf_counter()
        while len(self._recordings) < len(self._processes):
            with suppress(queue.Empty):
                self._take(*self._heard.get(timeout=1.0))
            if perf_counter() - tick >= 1.0:
                tick = perf_counter()
                self._grow_silent()
        return merged([self._recordings[number] for number in range(len(self._processes))])

    def _give(self, job: Job) -> None:
        """Set the next process to work."""
        self._processes[self._at_work].send((job, Share(self._at_work, len(self._processes))))
        self._at_work += 1

    def _grow_silent(self) -> None:
        """A second has passed. Seconds are counted, so that hours in which all of us were stopped are one."""
        for number in range(self._at_work):
            self._silent[number] += number not in self._recordings
        if max(self._silent) > SILENCE:
            raise LoadGeneratorError(
                f"a load generator's process is stuck, it has said nothing for {SILENCE} s: "
                "is this machine out of memory or processor time?"
            )

    def _take(self, number: int, message: object) -> None:
        self._silent[number] = 0
        match message:
            case Exception():
                raise message
            case Progress():
                self._progress[number] = message
                if self._on_progress is not None:
                    self._on_progress(_sum(self._progress))
            case Ready():
                self._begin_when_ready(number, message)
            case Finished():
                self._finished += 1
                if self._finished == len(self._processes):
                    self._tell_all(None)
            case Recording():
                self._recordings[number] = message

    def _begin_when_ready(self, number: int, message: Ready) -> None:
        """The first process learns how the server wants to be asked; the others are told."""
        if number == 0:
            taught = replace(self._job, dialect=message.dialect)
            while self._at_work < len(self._processes):
                self._give(taught)
        self._ready += 1
        if self._ready == len(self._processes):
            self._tell_all(perf_counter() + HEAD_START)

    def _tell_all(self, message: float | None) -> None:
        for process in self._processes:
            process.send(message)


def _sum(parts: Sequence[Progress]) -> Progress:
    return Progress(
        sum(part.requests_done for part in parts),
        sum(part.requests_failed for part in parts),
        sum(part.tokens_done for part in parts),
    )


class ClientProcess:
    """A process that runs `calibration.clients.main` until the block ends."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", "from calibration.clients import main; main()"]
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115, closed by __exit__
        self._process = subprocess.Popen(  # noqa: S603, this interpreter with words of ours
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            env=environment_without_secrets() | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            start_new_session=True,  # Ctrl-C is for us; we end it
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING)
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._complaints.close()

    def send(self, message: object) -> None:
        """By pipe: the key shows neither in the arguments nor in the environment. Nobody waits until it is read."""
        threading.Thread(target=self._write, args=(message,), daemon=True).start()

    def _write(self, message: object) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # a process that has died is heard of by `listen`
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()

    def listen(self, number: int, heard: queue.Queue[tuple[int, object]]) -> None:
        """Put everything that the process says on the queue, with its number; its death as an exception."""
        assert self._process.stdout is not None
        with self._process.stdout as output:
            message: object = None
            try:
                while not isinstance(message, (Recording, EndpointError)):
                    message = pickle.load(output)  # noqa: S301, of our own child
                    heard.put((number, message))
            except Exception as problem:  # noqa: BLE001, whoever waits for the queue must hear of it
                heard.put((number, self._death(problem)))

    def _death(self, problem: Exception) -> LoadGeneratorError:
        """What a process died of, by its own last words or else by what became of its messages."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING)
        if self._complaints.closed:
            return LoadGeneratorError("the load generator's process was ended")
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").strip().splitlines()
        code = self._process.returncode
        words = lines[-1] if lines else "out of memory, perhaps" if code == -9 else f"it said nothing ({problem})"
        return LoadGeneratorError(f"the load generator's process died ({code}): {words}")
