"""Progress on stderr: a bar on a terminal, a line for each level elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from capsim.tables import console

if TYPE_CHECKING:
    from calibration.sweep import SweepProgress
    from simulator.engine_flags import EngineFlags
    from simulator.fleet import Fleet
    from simulator.profile import Profile
    from simulator.run import Run
    from simulator.workload import Load


def predict_with_progress(
    profile: Profile,
    workloads: Sequence[Load],
    flags: EngineFlags,
    with_intervals: bool = False,
    fleet: Fleet | None = None,
) -> Run:
    """`simulator.prediction.predict` with a bar that counts levels."""
    from simulator.prediction import predict

    screen = console(stderr=True)
    if not screen.is_terminal:
        return predict(profile, workloads, flags, with_intervals=with_intervals, fleet=fleet)
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TextColumn("levels"), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True) as progress:
        task = progress.add_task("", total=len(workloads))

        def tell(done: int) -> None:
            progress.update(task, completed=done)

        return predict(profile, workloads, flags, tell, with_intervals, fleet)


@contextmanager
def sweep_progress(budget: float | None = None) -> Iterator[Callable[[SweepProgress], None]]:
    """A listener for `calibration.sweep.run_sweep`: level, requests done, time left, of `budget` seconds if given."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield _line_a_level(screen, budget)
        return
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, console=screen, transient=True) as progress:
        task = progress.add_task("asking the server", total=None, left="")

        def tell(seen: SweepProgress) -> None:
            load = _load(seen).rpartition(",")[0]  # the bar counts the requests
            progress.update(
                task,
                description=f"{_where(seen)}: {load}",
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
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} left"
