"""Servers side by side: common random numbers, intervals of differences, and the reason why."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from simulator.engine.simulation import simulate_level
from simulator.flags.serve_line import read_line
from simulator.loads.sessions import Sessions, Talk
from simulator.loads.workload import ClosedLoop, Length, OpenLoop, Shape, Workload
from simulator.planning.alternative import Alternative, alternative
from simulator.planning.paired_draws import paired_times
from simulator.planning.unmodelled import AlternativeError
from simulator.planning.what_if import METRICS, Change, Comparison, what_if
from simulator.profile import Coefficient, Profile
from simulator.results.summary import summarize
from simulator.uncertainty import even_draws

CHATS = (Shape(Length(128, 512), Length(16, 64)),)


def clients(count: int, prompt: int = 256, output: int = 32, requests: int = 100) -> Workload:
    return Workload(ClosedLoop(count), (Shape(Length.fixed(prompt), Length.fixed(output)),), requests)


def compared(profile: Profile, load: Workload | Sessions, *texts: str, with_intervals: bool = True) -> Comparison:
    others = [alternative(profile, read_line(text)) for text in texts]
    return what_if(Alternative("as measured", profile), others, [load], with_intervals)[0]


def unsure(profile: Profile, share: float, errors: bool = False) -> Profile:
    """The profile with every coefficient uncertain by a share of it."""

    def with_error(terms: dict[str, Coefficient]) -> dict[str, Coefficient]:
        return {name: Coefficient(value=term.value, stderr=share * term.value) for name, term in terms.items()}

    old = profile.coefficients
    coefficients = old.model_copy(
        update={"step_time": with_error(old.step_time), "host_time": with_error(old.host_time)}
    )
    kept: dict[str, object] = {} if errors else {"hold_out": [], "fit": [], "noise": {}}
    return profile.model_copy(update={"coefficients": coefficients, **kept})


# --- draws


def test_the_same_profile_gets_the_same_times_in_every_draw(profile: Profile) -> None:
    drawn = list(paired_times([unsure(profile, 0.1)] * 2))
    assert len(drawn) == 8
    assert all(one == other for one, other in drawn)
    constants = np.array([step.constant for (step, _), _ in drawn])
    assert constants.mean() == pytest.approx(0.01)
    assert constants.std() == pytest.approx(0.001)


def test_what_an_alternative_is_less_sure_of_is_drawn_apart(profile: Profile) -> None:
    base = unsure(profile, 0.03)
    step = base.coefficients.step_time | {"constant": Coefficient(value=0.02, stderr=0.02 * 0.05)}
    other = base.model_copy(update={"coefficients": base.coefficients.model_copy(update={"step_time": step})})
    drawn = list(paired_times([base, other]))
    ratios = np.log([two.constant / one.constant for (one, _), (two, _) in drawn])
    assert math.exp(ratios.mean()) == pytest.approx(2)
    assert ratios.std() == pytest.approx(0.04)  # 5 % and 3 % differ by that in squares
    assert all(two.per_kv_token == one.per_kv_token for (one, _), (two, _) in drawn)


def test_without_uncertainty_there_is_nothing_to_draw(profile: Profile) -> None:
    sure = unsure(profile, 0.0)
    assert list(paired_times([sure, sure])) == []
    assert len(list(paired_times([sure, sure], at_least_one=True))) == 8


# --- differences


def test_a_flag_that_plays_no_part_changes_nothing_at_all(profile: Profile) -> None:
    random = Workload(OpenLoop(4.0), CHATS, 60)
    for load in (clients(4), random):
        (changes,) = compared(unsure(profile, 0.05, errors=True), load, "--max-num-seqs 31").changes
        assert set(changes) == set(METRICS)
        for change in changes.values():
            assert (change.relative, change.low, change.high, change.is_clear) == (0, 0, 0, False)


def test_a_difference_is_surer_than_what_it_is_the_difference_of(profile: Profile) -> None:
    comparison = compared(unsure(profile, 0.1), clients(32), "--max-num-seqs 16")
    change = comparison.changes[0]["output_throughput"]
    low, high = comparison.baseline.intervals["output_throughput"]
    assert math.log((1 + change.high) / (1 + change.low)) < 0.3 * math.log(high / low)
    assert change.is_clear
    assert change.low < change.relative < change.high < 0


@pytest.mark.slow
def test_the_interval_of_a_difference_holds_the_truth(profile: Profile) -> None:
    """Coefficients of true servers are drawn from the profile's uncertainty; their difference is simulated."""
    vague, load = unsure(profile, 0.15), clients(24, requests=72)
    small = "--max-num-batched-tokens 256"
    (changes,) = compared(vague, load, small).changes
    other = alternative(vague, read_line(small))
    hits: dict[str, list[bool]] = {name: [] for name in ("output_throughput", "p50_ttft", "p50_tpot", "p50_e2el")}
    rng = np.random.default_rng(1)
    for _ in range(25):
        factors = {name: max(rng.normal(1, 0.15), 0.1) for name in vague.coefficients.step_time}
        step = replace(
            vague.step_time, **{name: getattr(vague.step_time, name) * share for name, share in factors.items()}
        )
        host = replace(vague.host_time, per_request=vague.host_time.per_request * max(rng.normal(1, 0.15), 0.1))
        before, after = (
            summarize(simulate_level(load, flags, step, host)).flat() for flags in (vague.engine_flags, other.flags)
        )
        for name, held in hits.items():
            was, became = before[name], after[name]
            assert was is not None
            assert became is not None
            held.append(changes[name].low <= became / was - 1 <= changes[name].high)
    shares = {name: np.mean(held) for name, held in hits.items()}
    assert min(shares.values()) >= 0.75, shares  # 90 % of 25, less twice its own error


def test_without_intervals_differences_stand_alone(profile: Profile) -> None:
    comparison = compared(profile, clients(32), "--max-num-seqs 8", with_intervals=False)
    change = comparison.changes[0]["p50_ttft"]
    assert change.relative > 1
    assert change.is_clear is None
    assert comparison.baseline.intervals == {}


def test_a_change_of_nothing_has_no_relative_size() -> None:
    assert Change(0.0, 3.0, math.nan).is_clear is None
    assert Change(1.0, 1.1, 0.1, 0.02, 0.2).is_clear
    assert not Change(1.0, 1.1, 0.1, -0.02, 0.2).is_clear


def test_every_server_gets_the_same_requests(profile: Profile) -> None:
    comparison = compared(profile, Workload(OpenLoop(6.0), CHATS, 50), "--max-num-seqs 4", with_intervals=False)
    before, after = comparison.baseline.numbers, comparison.alternatives[0].numbers
    assert before["completed"] == after["completed"] == 50
    tokens = [round(numbers["output_throughput"] * numbers["duration"]) for numbers in (before, after)]  # type: ignore[operator]
    assert tokens[0] == tokens[1]


def test_the_same_question_gives_the_same_answer(profile: Profile) -> None:
    load = Workload(OpenLoop(6.0), CHATS, 40)
    first, again = (compared(unsure(profile, 0.1), load, "--max-num-seqs 4").changes for _ in range(2))
    assert first == again


# --- why


def test_more_slots_help_where_slots_were_the_limit(profile: Profile) -> None:
    few = profile.model_copy(update={"engine_flags": profile.engine_flags.changed(max_num_seqs=4)})
    comparison = compared(few, clients(32), "--max-num-seqs 32")
    assert comparison.baseline.limits is not None
    assert comparison.baseline.limits.name == "slots"
    assert comparison.alternatives[0].ceilings.slots == 32
    assert "less for waiting for a slot (--max-num-seqs)" in comparison.reasons[0]


def test_a_larger_pool_helps_where_the_pool_was_the_limit(profile: Profile) -> None:
    tight = profile.model_copy(update={"engine_flags": profile.engine_flags.changed(num_gpu_blocks=600)})
    comparison = compared(tight, clients(24, prompt=1024, output=64), "--num-gpu-blocks-override 4000")
    assert "less for waiting for room in the KV pool" in comparison.reasons[0]
    assert comparison.changes[0]["p99_ttft"].high < 0


def test_a_larger_pool_is_idle_where_it_is_not_full(profile: Profile) -> None:
    comparison = compared(profile, clients(4), "--num-gpu-blocks-override 4000")
    assert "change little" in comparison.reasons[0]
    assert "the baseline's KV pool is 7% full at most" in comparison.reasons[0]


def test_a_larger_step_budget_helps_where_prompts_waited_for_it(profile: Profile) -> None:
    narrow = profile.model_copy(update={"engine_flags": profile.engine_flags.changed(max_num_batched_tokens=64)})
    comparison = compared(narrow, clients(16, prompt=1024, output=8, requests=48), "--max-num-batched-tokens 2048")
    assert "less for waiting for the step token budget" in comparison.reasons[0]


def test_prefix_caching_helps_chats_and_says_where_nothing_is_shared(profile: Profile) -> None:
    caching = "--enable-prefix-caching"
    assert "no request of this load shares a prefix" in compared(profile, clients(4), caching).reasons[0]
    talk = Talk(turns=Length.fixed(4), user=Length.fixed(200), output=Length.fixed(20), system=600)
    chats = Sessions(ClosedLoop(4), talk, 8)
    comparison = compared(profile, chats, caching)
    assert comparison.changes[0]["p50_ttft"].high < 0
    assert "less for computing prompt and output tokens" in comparison.reasons[0]


def test_a_priority_that_no_request_has_changes_nothing(profile: Profile) -> None:
    assert (
        "no request of this load has a priority"
        in compared(profile, clients(8), "--scheduling-policy priority").reasons[0]
    )


def test_two_engines_serve_what_waited_for_one(profile: Profile) -> None:
    few = profile.model_copy(update={"engine_flags": profile.engine_flags.changed(max_num_seqs=4)})
    comparison = compared(few, clients(8), "-dp 2", "--replicas 2")
    for outcome, changes, reason in zip(comparison.alternatives, comparison.changes, comparison.reasons, strict=True):
        assert changes["output_throughput"].low > 0.5
        assert outcome.ceilings.slots == 8
        assert "each of 2 engines has 3." in reason
        assert not outcome.notes  # each engine has four clients, and eight were measured
    assert "waiting for a slot" in comparison.reasons[0]


def test_what_leaves_the_measured_range_is_told_for_each_server(profile: Profile) -> None:
    comparison = compared(profile, clients(6, prompt=4096, output=8, requests=12), "--max-num-batched-tokens 4096")
    assert not any("prompt tokens in a step" in note for note in comparison.baseline.notes)
    assert "prompt tokens in a step 4,096, measured 64 to 2,048" in comparison.alternatives[0].notes


def test_a_request_that_never_fits_names_the_server(profile: Profile) -> None:
    with pytest.raises(AlternativeError, match="--max-model-len 512: "):
        compared(profile, clients(2, prompt=1024), "--max-model-len 512")


def test_even_draws_have_room_for_what_is_drawn_apart() -> None:
    points = even_draws(3, 8)
    assert np.allclose(points.T @ points / 8, np.eye(3))
