"""90 % intervals hold the true coefficients; `benchmarks.accuracy.recovery` has more runs."""

from __future__ import annotations

import pytest

from benchmarks.accuracy.recovery import NOISES, SERVERS, Recovered, coverage, recover


@pytest.mark.slow
def test_intervals_hold_the_truth_on_every_kind_of_server() -> None:
    found = [item for seed, name in enumerate(SERVERS) for item in recover(name, NOISES[1], seed, clients=(1, 8))]
    assert coverage(found) >= 0.8
    spread = [item.stderr / item.truth for item in found if item.truth and not item.dropped]
    assert sorted(spread)[len(spread) // 2] < 0.12, "an interval that says nothing always holds the truth"
    assert not [item for item in found if item.term == "weights" and item.dropped != (item.truth == 0)]


def test_coverage_counts_what_is_there_and_was_found() -> None:
    inside, outside, absent, lost = (
        Recovered("s", "constant", truth, value, 1e-3, dropped)
        for truth, value, dropped in ((5e-3, 6e-3, False), (5e-3, 9e-3, False), (0.0, 0.0, True), (5e-3, 0.0, True))
    )
    assert coverage([inside, outside, absent, lost]) == 0.5
