"""Progress on a terminal: what is being done, and the time left; elsewhere nothing."""

from __future__ import annotations

from dataclasses import dataclass
from io import StringIO

import pytest
from rich.console import Console

from capsim import progress
from simulator.loads.levels import plan_levels, uniform_shape
from simulator.loads.workload import Length, Workload
from simulator.prediction import predict
from simulator.profile import Profile

SHAPE = uniform_shape(Length.fixed(256), Length.fixed(16), 0.2)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> StringIO:
    """A terminal of 80 columns."""
    written = StringIO()
    terminal = Console(file=written, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(progress, "console", lambda stderr: terminal)
    return written


def test_intervals_count_as_part_of_their_level(profile: Profile) -> None:
    told: list[float] = []
    loads = plan_levels([SHAPE], concurrency=[1, 2], num_prompts=4)
    predict(profile, loads, on_level=told.append, with_intervals=True)
    assert told == sorted(told)
    assert {1, 2} < set(told)
    assert any(0 < done < 1 for done in told)
    assert any(1 < done < 2 for done in told)


def test_a_prediction_shows_level_and_time_left(screen: StringIO, profile: Profile) -> None:
    progress.predict_with_progress(
        profile, plan_levels([SHAPE], concurrency=[1, 2], num_prompts=4), profile.engine_flags, with_intervals=True
    )
    assert "simulating level 2 of 2" in screen.getvalue()
    assert "0:00 left" in screen.getvalue()


def test_work_of_unknown_length_shows_the_time_so_far(screen: StringIO) -> None:
    with progress.status_line("fitting") as tell:
        tell("fitting [harder]")  # no markup
    assert "fitting [harder]" in screen.getvalue()
    assert "0:00 so far" in screen.getvalue()


@dataclass(frozen=True)
class Tried:
    """What a search tells of a level."""

    load: Workload
    value: float
    verdict: str


def test_a_search_comes_nearer_to_its_end_with_every_level(profile: Profile) -> None:
    shares: list[float] = []

    def tell(_text: str, /, share: float | None = None) -> None:
        if share is not None:
            shares.append(share)

    listener = progress._Narrowing(tell)
    for clients, verdict in ((1, "meets"), (8, "meets"), (64, "misses"), (32, "meets"), (48, "misses"), (40, "misses")):
        (load,) = plan_levels([SHAPE], concurrency=[clients], num_prompts=4)
        listener(Tried(load, clients, verdict))  # type: ignore[arg-type]
    assert len(shares) == 4, "none before both ends are known"
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] < 1


def test_nothing_is_shown_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str], profile: Profile) -> None:
    loads = plan_levels([SHAPE], concurrency=[1], num_prompts=4)
    progress.predict_with_progress(profile, loads, profile.engine_flags, with_intervals=True)
    assert capsys.readouterr() == ("", "")
