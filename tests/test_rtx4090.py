"""The shipped RTX 4090 profile against the published sweep."""

import pytest

from benchmarks import rtx4090
from simulator.profile import Profile
from simulator.scenario import Scenario

SCENARIOS = rtx4090.PROFILE.parents[1]


@pytest.fixture(scope="module")
def profile():
    return Profile.load(rtx4090.PROFILE)


def test_figures_that_the_fit_has_not_seen_are_predicted_within_their_goals(profile):
    errors = rtx4090.check(rtx4090.predict(profile.step_time, profile.host_time))
    missed = [
        f"{item.clients} clients, {item.metric}: {error:+.1%}"
        for item, error in zip(rtx4090.CHECKS, errors, strict=True)
        if item.goal is not None and abs(error) > item.goal
    ]
    assert not missed


def test_the_fit_sees_at_most_eight_clients():
    assert all(figure.workload.arrivals.concurrency <= 8 for figure in rtx4090.STATED)
    assert any(item.clients > 8 for item in rtx4090.CHECKS)


@pytest.mark.slow
def test_the_shipped_profile_is_what_a_fresh_fit_writes(profile):
    fresh = rtx4090.profile_of(rtx4090.fit())
    for terms in ("step_time", "host_time"):
        shipped, fitted = getattr(profile.coefficients, terms), getattr(fresh.coefficients, terms)
        assert {name: term.value for name, term in shipped.items()} == pytest.approx(
            {name: term.value for name, term in fitted.items()}, rel=2e-3
        )
        assert {name: term.origin for name, term in shipped.items()} == {
            name: term.origin for name, term in fitted.items()
        }
    assert profile.engine_flags == fresh.engine_flags
    assert profile.assumed == fresh.assumed


def test_requests_that_fit_the_pool(profile):
    assert rtx4090.ceiling(profile.engine_flags) == 67
    _, bigger, _ = Scenario.read(SCENARIOS / "rtx4090-kv-cache-memory.yaml").servers(profile)
    assert bigger.flags == rtx4090.bigger_pool()
    assert rtx4090.ceiling(bigger.flags) == 89


def test_levels_add_up_to_the_requests_that_the_report_states():
    assert sum(rtx4090.NUM_PROMPTS) == 1332
    for variant in rtx4090.VARIANTS:
        assert sum(variant.num_prompts) == 1332, variant.name


def test_the_shipped_scenario_plays_the_levels_of_the_check():
    played = Scenario.read(SCENARIOS / "rtx4090-qwen2.5-7b.yaml").workloads()
    assert played[3:] == [rtx4090.level(clients) for clients in (8, 16, 32, 64)]
