"""The clients that load a server, in a process of their own (`main`): they send, note times, and do nothing else.

Everything that costs time, from building prompts to reading /metrics, is done before or after a level, ahead of need,
or put off. What cannot be put off is measured: how late the event loop runs, and the share of a core it takes.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter, process_time

import aiohttp

from calibration.dialect import Dialect, learn_dialect
from calibration.endpoint import Endpoint, EndpointError, headers
from calibration.metrics import GAUGES_PATH, MetricsSnapshot, only_gauges, parse_metrics
from calibration.stream import PATIENCE, Answer, Patience, ask
from simulator.workload import ClosedLoop, Workload

LAG_EVERY = 0.01  # s
PROGRESS_EVERY = 0.25  # s
FULL_METRICS_PAUSE = 4  # times longer between samples where the server gives only all of /metrics, which disturbs it
PREPARED_BYTES = 64 << 20  # of request bodies built ahead in an open loop
AFTER_SEND = 0.02  # s, when a body has been sent and the loop is likely idle


@dataclass(frozen=True)
class Job:
    """A level to be played. Without a `dialect` it is learnt first; `seed` makes the prompts."""

    endpoint: Endpoint
    workload: Workload
    seed: int
    dialect: Dialect | None = None
    patience: Patience = PATIENCE
    sample_every: float = 0.5  # s, between readings of /metrics


@dataclass(frozen=True)
class Progress:
    """How far a level is."""

    requests_done: int
    requests_failed: int
    tokens_done: int


@dataclass
class Recording:
    """What the clients saw. Times are seconds on the clock of `time.perf_counter`."""

    dialect: Dialect
    started: float = 0.0
    answers: list[Answer] = field(default_factory=list)  # in the order of sending
    samples: list[tuple[float, bytes]] = field(default_factory=list)  # lines of /metrics with the gauges
    before: MetricsSnapshot | None = None
    after: MetricsSnapshot | None = None
    was_idle: bool = True  # whether the server had nothing else to do when the level began
    loop_lags: list[float] = field(default_factory=list)  # s, how late the event loop called back
    cpu_share: float = 0.0  # of one core, over the level


async def record(job: Job, report: Callable[[Progress], None]) -> Recording:
    """Play the job's workload and return what was seen."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)  # servers drop idle connections after 5 s
    async with aiohttp.ClientSession(
        connector=connector,
        headers={"Content-Type": "application/json", "Accept-Encoding": "identity"} | headers(job.endpoint.api_key),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=job.patience.connect),
        read_bufsize=1 << 20,
    ) as session:
        dialect = job.dialect or await learn_dialect(session, job.endpoint, job.seed, job.patience)
        clients = Clients(session, job, dialect)
        seen = clients.recording
        seen.was_idle, seen.before = await clients.wait_until_idle(job.patience.idle)
        clients.requests.prepare()
        await clients.play(report)
        _, seen.after = await clients.wait_until_idle(min(5.0, job.patience.idle))  # counters lag behind streams
        return seen


class Requests:
    """The workload's requests in order, some of them built ahead so that building never delays a send."""

    def __init__(self, job: Job, dialect: Dialect) -> None:
        self._job, self._dialect = job, dialect
        self._inputs, self._outputs = job.workload.lengths()
        self._built: deque[tuple[Answer, bytes]] = deque()
        self._next = 0
        arrivals = job.workload.arrivals
        self._ahead = arrivals.concurrency if isinstance(arrivals, ClosedLoop) else job.workload.num_prompts
        self._bytes = 0

    def prepare(self) -> None:
        while len(self._built) < self._ahead and self._bytes < PREPARED_BYTES and self.prepare_one():
            pass

    def prepare_one(self) -> bool:
        """Build the next request, if there is one."""
        if self._next == self._job.workload.num_prompts:
            return False
        index, self._next = self._next, self._next + 1
        prompt_tokens, output_tokens = int(self._inputs[index]), int(self._outputs[index])
        body = self._dialect.body(self._job.endpoint.model, prompt_tokens, output_tokens, (self._job.seed, index))
        self._built.append((Answer(index, prompt_tokens, output_tokens, 0.0), body))
        self._bytes += len(body)
        return True

    def take(self) -> tuple[Answer, bytes] | None:
        """The next request; the one that takes its place is built a little later."""
        if not self._built and not self.prepare_one():
            return None
        answer, body = self._built.popleft()
        self._bytes -= len(body)
        asyncio.get_running_loop().call_later(AFTER_SEND, self.prepare_one)
        return answer, body


class Clients:
    """Clients that share a session and a record."""

    def __init__(self, session: aiohttp.ClientSession, job: Job, dialect: Dialect) -> None:
        self.session, self.job = session, job
        self.requests = Requests(job, dialect)
        self.recording = Recording(dialect)
        self._in_flight: dict[int, Answer] = {}
        self._done = self._failed = self._tokens = 0

    async def play(self, report: Callable[[Progress], None]) -> None:
        """Send the workload and wait for every answer, watching the server and ourselves meanwhile."""
        seen = self.recording
        watchers = [asyncio.create_task(self._watch_loop()), asyncio.create_task(self._report(report))]
        if self.job.endpoint.has_metrics:
            watchers.append(asyncio.create_task(self._sample_metrics()))
        gc.collect()
        gc.freeze()
        gc.disable()
        seen.started, cpu = perf_counter(), process_time()
        try:
            arrivals = self.job.workload.arrivals
            await (self._closed(arrivals.concurrency) if isinstance(arrivals, ClosedLoop) else self._open())
            seen.cpu_share = (process_time() - cpu) / (perf_counter() - seen.started)
        finally:
            gc.enable()
            gc.unfreeze()
            for watcher in watchers:
                watcher.cancel()
        report(self._progress())

    async def wait_until_idle(self, patience: float) -> tuple[bool, MetricsSnapshot | None]:
        """Whether the server became idle in time, and its counters then."""
        if not self.job.endpoint.has_metrics:
            return True, None
        until = perf_counter() + patience
        while True:
            text = await self._get("/metrics")
            metrics = parse_metrics(text.decode(errors="replace")) if text else None
            if metrics is None or metrics.idle or perf_counter() >= until:
                return metrics is None or metrics.idle, metrics
            await asyncio.sleep(0.1)

    async def _closed(self, concurrency: int) -> None:
        async def client() -> None:
            while request := self.requests.take():
                request[0].scheduled = perf_counter()
                await self._send(*request)

        await asyncio.gather(*(client() for _ in range(concurrency)))

    async def _open(self) -> None:
        times = self.job.workload.arrival_times()
        assert times is not None
        async with asyncio.TaskGroup() as group:
            for time in times.tolist():
                due = self.recording.started + time
                await asyncio.sleep(max(0.0, due - perf_counter()))
                request = self.requests.take()
                assert request is not None
                request[0].scheduled = due
                group.create_task(self._send(*request))

    async def _send(self, answer: Answer, body: bytes) -> None:
        self.recording.answers.append(answer)
        self._in_flight[answer.index] = answer
        await ask(self.session, f"{self.job.endpoint.url}/v1/completions", body, answer, self.job.patience)
        del self._in_flight[answer.index]
        self._done += 1
        self._failed += answer.error != ""
        self._tokens += answer.tokens

    def _progress(self) -> Progress:
        streaming = sum(answer.tokens for answer in self._in_flight.values())
        return Progress(self._done, self._failed, self._tokens + streaming)

    async def _report(self, report: Callable[[Progress], None]) -> None:
        while True:
            report(self._progress())
            await asyncio.sleep(PROGRESS_EVERY)

    async def _watch_loop(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_EVERY
            await asyncio.sleep(LAG_EVERY)
            self.recording.loop_lags.append(loop.time() - due)

    async def _sample_metrics(self) -> None:
        path, every = GAUGES_PATH, self.job.sample_every
        while True:
            asked = perf_counter()
            gauges = only_gauges(await self._get(path))
            if gauges:
                self.recording.samples.append(((asked + perf_counter()) / 2, gauges))
            elif path == GAUGES_PATH:
                path, every = "/metrics", every * FULL_METRICS_PAUSE
                continue
            await asyncio.sleep(max(0.0, asked + every - perf_counter()))

    async def _get(self, path: str) -> bytes:
        """What the server answers at `path`; nothing where it does not."""
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            limit = aiohttp.ClientTimeout(total=self.job.patience.connect)
            async with self.session.get(f"{self.job.endpoint.url}{path}", timeout=limit) as response:
                return await response.read() if response.status == 200 else b""
        return b""


def main() -> None:
    """Read a `Job` from standard input; write `Progress`, and at last a `Recording` or an error, to standard output."""
    job = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _allow_many_sockets()
    output, sys.stdout = sys.stdout.buffer, sys.stderr

    def send(message: Progress | Recording | EndpointError) -> None:
        pickle.dump(message, output)
        output.flush()

    try:
        send(asyncio.run(record(job, send)))
    except EndpointError as error:
        send(error)


def _allow_many_sockets() -> None:
    """One a stream, where the usual limit is 1024 open files."""
    with suppress(ImportError, ValueError, OSError):  # where there is such a limit
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _end_with_parent() -> None:
    """Standard input ends when the parent does, however it dies: no load without someone who wants it."""
    sys.stdin.buffer.read()
    os._exit(1)
