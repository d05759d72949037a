"""Progress on stderr: a bar on a terminal, a line for each level elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from capsim.tables import console
from capsim.terminal import printable

if TYPE_CHECKING:
    from calibration.sweep import SweepProgress
    from simulator.engine.engine_flags import EngineFlags
    from simulator.engine.fleet import Fleet
    from simulator.loads.workload import Load
    from simulator.planning.replications import Trial
    from simulator.profile import Profile
    from simulator.results.run import Run

COARSE = 0.02  # of a level, the step at which a search for the capacity may end
AFTERWARDS = 3  # levels that a search tries once it is narrow: where to fall back to, and a curve


def predict_with_progress(
    profile: Profile,
    workloads: Sequence[Load],
    flags: EngineFlags,
    with_intervals: bool = False,
    fleet: Fleet | None = None,
) -> Run:
    """`simulator.prediction.predict` with the time left; the intervals of a level are part of it."""
    from simulator.prediction import predict

    with status_line("simulating") as tell:

        def tell_level(done: float) -> None:
            tell(*level_of(done, len(workloads)))

        return predict(profile, workloads, flags, tell_level, with_intervals, fleet)


def level_of(done: float, levels: int) -> tuple[str, float]:
    """What is simulated after `done` of so many levels, a begun one counting in part; and the share that is done."""
    return f"simulating level {min(int(done) + 1, levels)} of {levels}", done / levels


class Tell(Protocol):
    """Takes what is being done and, where that is known, which share of it is done."""

    def __call__(self, text: str, /, share: float | None = None) -> None: ...


@contextmanager
def status_line(first: str) -> Iterator[Tell]:
    """A line on a terminal that says what is being done and how long it still takes; nothing elsewhere.

    A share below the last one begins another piece of work.
    """
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield _say_nothing
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(20), _TimeLeft())
    with Progress(*columns, console=screen, transient=True) as progress:
        task = progress.add_task(first, total=None, ends=None)
        began, last = monotonic(), 0.0

        def tell(text: str, /, share: float | None = None) -> None:
            nonlocal began, last
            progress.update(task, description=printable(text))
            if share is None:
                return
            if share < last:
                began = monotonic()
            last = share
            ends = began + (monotonic() - began) / share if share else None
            progress.update(task, completed=share, total=1.0, ends=ends)

        yield tell


@contextmanager
def search_progress() -> Iterator[Callable[[Trial], None]]:
    """A listener for `CapacitySearch`: the last verdict, between what the answer lies, time left."""
    with status_line("simulating") as tell:
        yield _Narrowing(tell)


class _Narrowing:
    """Tells how near a search is to its end. Each level halves what lies between the best and the worst so far."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._tried = 0
        self._low, self._high = 0.0, math.inf

    def __call__(self, trial: Trial) -> None:
        self._tried += 1
        if trial.verdict == "meets":
            self._low = max(self._low, trial.value)
        else:
            self._high = min(self._high, trial.value)
        text = f"simulating: {trial.load.label} {trial.verdict}"
        if not 0 < self._low < self._high < math.inf:
            self._tell(text)
            return
        span = (self._high - self._low) / max(1.0, COARSE * self._low)
        self._tell(text, self._tried / (self._tried + math.ceil(math.log2(max(2.0, span))) + AFTERWARDS))


def _say_nothing(_text: str, /, share: float | None = None) -> None:
    """Progress is for terminals."""


class _TimeLeft(ProgressColumn):
    """The time left until a task's field `ends`, which counts down between two shares; else the time that passed."""

    def render(self, task: Task) -> Text:
        ends = task.fields["ends"]
        return Text(f"{_clock(task.elapsed or 0.0)} so far" if ends is None else _left(max(0.0, ends - monotonic())))


@contextmanager
def sweep_progress(budget: float | None = None) -> Iterator[Callable[[SweepProgress], None]]:
    """A listener for `calibration.sweep.run_sweep`: level, requests done, time left, of `budget` seconds if given."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield _line_a_level(screen, budget)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=screen, transient=True) as progress:
        task = progress.add_task("asking the server", total=None, left="")

        def tell(seen: SweepProgress) -> None:
            load = _load(seen).rpartition(",")[0]  # the bar counts the requests
            progress.update(
                task,
                description=printable(f"{_where(seen)}: {load}"),
                completed=seen.requests_done,
                total=seen.requests,
                left=_left(_remaining(seen, budget)),
            )

        yield tell


def _line_a_level(screen: Console, budget: float | None) -> Callable[[SweepProgress], None]:
    announced = -1

    def tell(seen: SweepProgress) -> None:
        nonlocal announced
        if seen.level != announced:
            announced = seen.level
            screen.print(f"{_where(seen)}: {_load(seen)}, {_left(_remaining(seen, budget))}", markup=False)

    return tell


def _remaining(seen: SweepProgress, budget: float | None) -> float | None:
    """Seconds: those of the known levels or, where levels are chosen within a budget, what is left of it."""
    return seen.remaining if budget is None else max(0.0, budget - seen.elapsed)


def _where(seen: SweepProgress) -> str:
    return f"level {seen.level}/{seen.levels}" if seen.level else "warm-up"


def _load(seen: SweepProgress) -> str:
    return seen.description.removeprefix("warm-up: ")


def _left(seconds: float | None) -> str:
    if seconds is None:
        return "time left not known yet"
    return f"{_clock(seconds)} left"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
