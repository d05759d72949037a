"""A prediction is as uncertain as the coefficients behind it."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.prediction import predict
from simulator.profile import Coefficient, Profile
from simulator.run import Level
from simulator.summary import summarize
from simulator.uncertainty import drawn_times, intervals
from simulator.workload import ClosedLoop, Length, OpenLoop, Shape, Workload

SHAPE = (Shape(Length.fixed(200), Length.fixed(40)),)
LOAD = Workload(ClosedLoop(4), SHAPE, 40)


def known_to(profile: Profile, relative: float, correlations: list[tuple[str, str, float]] | None = None) -> Profile:
    """The profile with every coefficient known to a relative standard error."""
    terms = profile.coefficients
    changed = {
        kind: {
            name: Coefficient(value=term.value, stderr=relative * term.value)
            for name, term in getattr(terms, kind).items()
        }
        for kind in ("step_time", "host_time")
    }
    return profile.model_copy(
        update={"coefficients": terms.model_copy(update={**changed, "correlations": correlations or []})}
    )


def test_certain_coefficients_and_a_fixed_load_leave_no_doubt(profile: Profile) -> None:
    found = intervals(known_to(profile, 0.0), LOAD)
    assert all(low == pytest.approx(high, nan_ok=True) for low, high in found.values())


def test_the_interval_grows_with_the_error_and_holds_the_prediction(profile: Profile) -> None:
    narrow, wide = (intervals(known_to(profile, error), LOAD) for error in (0.01, 0.05))
    (level,) = predict(profile, [LOAD]).levels
    predicted = summarize(level).flat()
    for name in ("output_throughput", "p50_itl", "p50_e2el"):
        assert narrow[name][0] < float(predicted[name] or 0) < narrow[name][1]
        assert np.ptp(wide[name]) > 2 * np.ptp(narrow[name])


def test_random_arrivals_are_part_of_the_doubt(profile: Profile) -> None:
    low, high = intervals(known_to(profile, 0.0), Workload(OpenLoop(5.0), SHAPE, 40))["p99_ttft"]
    assert high > 1.05 * low


def test_errors_that_move_together_are_drawn_together(profile: Profile) -> None:
    one, other = list(profile.coefficients.step_time)[:2]
    linked = known_to(profile, 0.1, [(one, other, -1.0)])
    drawn = [step_time for step_time, _ in drawn_times(linked, 50)]
    values = np.array([[getattr(step_time, one), getattr(step_time, other)] for step_time in drawn])
    assert np.corrcoef(values.T)[0, 1] == pytest.approx(-1.0, abs=1e-6)


def test_the_same_profile_gives_the_same_interval(profile: Profile) -> None:
    assert intervals(known_to(profile, 0.03), LOAD) == intervals(known_to(profile, 0.03), LOAD)


def test_a_prediction_carries_its_intervals_when_asked(profile: Profile) -> None:
    level: Level
    (level,) = predict(known_to(profile, 0.02), [LOAD], with_intervals=True).levels
    assert level.intervals["p50_ttft"][0] < level.intervals["p50_ttft"][1]
