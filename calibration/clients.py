"""The clients that load a server, in processes of their own (`main`): they send, note times, and do nothing else.

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
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter, process_time

import aiohttp

from calibration.dialect import Dialect, learn_dialect
from calibration.endpoint import AnswerTooLong, Endpoint, EndpointError, headers, metrics_in, read_answer
from calibration.metrics import GAUGES_PATH, MetricsSnapshot, only_gauges
from calibration.stream import PATIENCE, Answer, Patience, ask
from simulator.loads.workload import Load

LAG_EVERY = 0.01  # s
PROGRESS_EVERY = 0.25  # s
ALIVE_EVERY = 5.0  # s, between two signs that a process is well
MOST_GAUGES = 1 << 17  # bytes of them that a sample may have: a hundred engines have some ten thousand
FULL_METRICS_PAUSE = 4  # times longer between samples where the server gives only all of /metrics, which disturbs it
PREPARED_BYTES = 64 << 20  # of request bodies built ahead in an open loop
FAILURES_HELD = 1000  # after which memory matters more than that nothing holds up the event loop
AFTER_SEND = 0.02  # s, when a body has been sent and the loop is likely idle


@dataclass(frozen=True)
class Job:
    """A level to be played. Without a `dialect` it is learnt first; `seed` makes the prompts.

    `processes` share the clients between them; None for as many as the load needs.
    """

    endpoint: Endpoint
    workload: Load
    seed: int
    dialect: Dialect | None = None
    patience: Patience = PATIENCE
    sample_every: float = 0.5  # s, between readings of /metrics
    processes: int | None = None

    def __post_init__(self) -> None:
        if self.workload.conversations() is not None:
            raise ValueError("a load of sessions can be simulated, but not played on a live server")


@dataclass(frozen=True)
class Share:
    """What one of several processes plays: every `of`-th client of a closed loop and its requests, or every `of`-th
    request of an open one. The first process, number 0, also talks to the server before, meanwhile and after."""

    number: int = 0
    of: int = 1

    def requests(self, load: Load) -> list[int]:
        """Which of the load's requests are ours: request k of a closed loop is for client k modulo their number."""
        clients = load.concurrency or load.num_prompts
        return [index for index in range(load.num_prompts) if index % clients % self.of == self.number]

    def of_clients(self, clients: int) -> int:
        """How many of so many clients are ours."""
        return len(range(self.number, clients, self.of))


WHOLE = Share()


@dataclass(frozen=True)
class Ready:
    """A process can begin."""

    dialect: Dialect


@dataclass(frozen=True)
class Alive:
    """A process has not got stuck."""


@dataclass(frozen=True)
class Finished:
    """A process has all its answers."""


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
    cpu_share: float = 0.0  # of one core, over the level; of the busiest process
    processes: int = 1  # that had the clients between them


class Parent:
    """The process that wants the load: it hears us by our standard output and answers by our standard input."""

    def __init__(self) -> None:
        self._output, sys.stdout = sys.stdout.buffer, sys.stderr
        self._loop = asyncio.get_running_loop()
        self._answers: asyncio.Queue[float | None] = asyncio.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    async def tell_alive(self) -> None:
        """Again and again, whatever else we wait for."""
        while True:
            self.tell(Alive())
            await asyncio.sleep(ALIVE_EVERY)

    def tell(self, message: Progress | Ready | Alive | Finished | Recording | EndpointError) -> None:
        pickle.dump(message, self._output)
        self._output.flush()

    async def ask(self, message: Ready | Finished) -> float | None:
        """What the parent says to that: when to begin, on the clock of `time.perf_counter`, or merely to go on."""
        self.tell(message)
        return await self._answers.get()

    def _listen(self) -> None:
        """Standard input ends when the parent does, however it dies: no load without someone who wants it."""
        try:
            while True:
                self._loop.call_soon_threadsafe(self._answers.put_nowait, pickle.load(sys.stdin.buffer))  # noqa: S301, of our own parent
        finally:
            os._exit(1)


async def record(
    job: Job, report: Callable[[Progress], None], share: Share = WHOLE, parent: Parent | None = None
) -> Recording:
    """Play a share of the job's workload, when `parent` says so or at once, and return what was seen."""
    # servers drop idle connections after 5 s
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0, ssl=not job.endpoint.insecure)
    async with aiohttp.ClientSession(
        connector=connector,
        headers={"Content-Type": "application/json", "Accept-Encoding": "identity"} | headers(job.endpoint.api_key),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=job.patience.connect),
        read_bufsize=1 << 20,
    ) as session:
        dialect = job.dialect or await learn_dialect(session, job.endpoint, job.seed, job.patience)
        clients = Clients(session, job, dialect, share)
        seen = clients.recording
        if share.number == 0:
            seen.was_idle, seen.before = await clients.wait_until_idle(job.patience.idle)
        clients.requests.prepare()
        await clients.play(report, await parent.ask(Ready(dialect)) if parent else None)
        if parent:
            await parent.ask(Finished())
        if share.number == 0:
            _, seen.after = await clients.wait_until_idle(min(5.0, job.patience.idle))  # counters lag behind streams
        return seen


class Requests:
    """The workload's requests in order, some of them built ahead so that building never delays a send."""

    def __init__(self, job: Job, dialect: Dialect, share: Share) -> None:
        self._job, self._dialect = job, dialect
        self._inputs, self._outputs = job.workload.lengths()
        self._built: deque[tuple[Answer, bytes]] = deque()
        self._to_build = deque(share.requests(job.workload))
        clients = job.workload.concurrency
        self._ahead = len(self._to_build) if clients is None else share.of_clients(clients)
        self._bytes = 0

    def prepare(self) -> None:
        while len(self._built) < self._ahead and self._bytes < PREPARED_BYTES and self.prepare_one():
            pass

    def prepare_one(self) -> bool:
        """Build the next request, if there is one."""
        if not self._to_build:
            return False
        index = self._to_build.popleft()
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

    @property
    def left(self) -> bool:
        """Whether any have not been taken."""
        return bool(self._built or self._to_build)


class Clients:
    """Clients that share a session and a record."""

    def __init__(self, session: aiohttp.ClientSession, job: Job, dialect: Dialect, share: Share) -> None:
        self.session, self.job, self.share = session, job, share
        self.requests = Requests(job, dialect, share)
        self.recording = Recording(dialect)
        self._url = f"{job.endpoint.url}{dialect.path}"
        self._in_flight: dict[int, Answer] = {}
        self._done = self._failed = self._tokens = 0

    async def play(self, report: Callable[[Progress], None], begin: float | None = None) -> None:
        """Send the share and wait for every answer, watching the server and ourselves meanwhile.

        `begin` is when, on the clock of `time.perf_counter`; None for at once.
        """
        seen = self.recording
        watchers = [asyncio.create_task(self._watch_loop()), asyncio.create_task(self._report(report))]
        if self.job.endpoint.has_metrics and self.share.number == 0:
            watchers.append(asyncio.create_task(self._sample_metrics()))
        gc.collect()
        gc.freeze()
        gc.disable()
        seen.started, cpu = begin or perf_counter(), process_time()
        try:
            await asyncio.sleep(seen.started - perf_counter())
            clients = self.job.workload.concurrency
            await (self._open() if clients is None else self._closed(self.share.of_clients(clients)))
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
            metrics = metrics_in(text.decode(errors="replace"))
            if metrics is None or metrics.idle or perf_counter() >= until:
                return metrics is None or metrics.idle, metrics
            await asyncio.sleep(0.1)

    async def _closed(self, clients: int) -> None:
        think_times = self.job.workload.think_times()

        async def client() -> None:
            while request := self.requests.take():
                request[0].scheduled = perf_counter()
                await self._send(*request)
                if think_times is not None and self.requests.left:
                    await asyncio.sleep(float(think_times[request[0].index]))

        await asyncio.gather(*(client() for _ in range(clients)))

    async def _open(self) -> None:
        load = self.job.workload
        times, most = load.arrival_times(), load.max_concurrency
        assert times is not None
        room = asyncio.Semaphore(self.share.of_clients(most) if most else load.num_prompts)

        async def send(answer: Answer, body: bytes) -> None:
            async with room:
                await self._send(answer, body)

        async with asyncio.TaskGroup() as group:
            for index in self.share.requests(load):
                due = self.recording.started + float(times[index])
                await asyncio.sleep(due - perf_counter())
                request = self.requests.take()
                assert request is not None
                request[0].scheduled = due
                group.create_task(send(*request))

    async def _send(self, answer: Answer, body: bytes) -> None:
        self.recording.answers.append(answer)
        self._in_flight[answer.index] = answer
        await ask(self.session, self._url, body, answer, self.job.patience)
        del self._in_flight[answer.index]
        self._done += 1
        self._tokens += answer.tokens
        if answer.error:
            self._failed += 1
            if self._failed % FAILURES_HELD == 0:
                gc.collect()  # 14 kB of exceptions and connections, which refer to each other, were left by each

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
            if 0 < len(gauges) <= MOST_GAUGES:
                self.recording.samples.append(((asked + perf_counter()) / 2, gauges))
            elif path == GAUGES_PATH:
                path, every = "/metrics", every * FULL_METRICS_PAUSE
                continue
            await asyncio.sleep(max(0.0, asked + every - perf_counter()))

    async def _get(self, path: str) -> bytes:
        """What the server answers at `path`; nothing where it does not."""
        with suppress(aiohttp.ClientError, OSError, TimeoutError, AnswerTooLong):
            url, limit = f"{self.job.endpoint.url}{path}", aiohttp.ClientTimeout(total=self.job.patience.connect)
            async with self.session.get(url, timeout=limit, allow_redirects=False) as response:
                return await read_answer(response) if response.status == 200 else b""
        return b""


def main() -> None:
    """Read a `Job` and a `Share` from standard input, then answer to the `Parent` until the `Recording` is told."""
    job, share = pickle.load(sys.stdin.buffer)  # noqa: S301, of our own parent
    _allow_many_sockets()

    async def play() -> None:
        parent = Parent()
        alive = asyncio.create_task(parent.tell_alive())
        try:
            parent.tell(await record(job, parent.tell, share, parent))
        except EndpointError as error:
            parent.tell(error)
        finally:
            alive.cancel()

    status = 0
    try:
        asyncio.run(play())
    except Exception:  # noqa: BLE001, whatever it was is printed, and ends us
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)  # the usual end would need standard input, which `Parent` listens to


def _allow_many_sockets() -> None:
    """One a stream, where the usual limit is 1024 open files."""
    with suppress(ImportError, ValueError, OSError):  # where there is such a limit
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
