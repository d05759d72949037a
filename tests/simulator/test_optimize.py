"""Searches whose answer is known, who computes makes no difference, and what was computed is not computed again."""

from __future__ import annotations

import importlib.util
import math
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.engine.fleet import Fleet
from simulator.loads.lengths import Length
from simulator.loads.trace import Trace
from simulator.loads.workload import ClosedLoop, Load, OpenLoop, Shape, Workload
from simulator.planning import optimize
from simulator.planning.optimize import Found, OptimizeError, Optimizer, Play, missed_of, pareto_front, play
from simulator.planning.search_log import SearchLog, SearchLogError
from simulator.planning.search_space import (
    Configuration,
    SpaceError,
    configurations,
    parse_counts,
    parse_prices,
    parse_vary,
)
from simulator.planning.workers import Workers, WorkersError
from simulator.profile import Profile
from tests.conftest import PROFILE

TARGETS = {"p95_ttft": 500.0, "p95_tpot": 22.0}
LOAD = Workload(ClosedLoop(24), (Shape(Length(200, 400), Length(10, 30)),), 1)
SPACE = configurations({"max_num_seqs": ["4", "16"], "max_num_batched_tokens": ["256", "1024"]}, replicas=(1, 2, 3))


def search(profile: Profile, **options: object) -> Optimizer:
    return Optimizer(profile, LOAD, TARGETS, num_prompts=160, **options)  # type: ignore[arg-type]


def told(found: Found) -> str:
    """Everything that a search answers."""
    return repr([replace(one, server=None) for one in (*found.candidates, found.best, *found.front) if one])


@dataclass(frozen=True)
class Serial:
    """A search without other processes."""

    profile: Profile
    load: Load
    found: Found
    results: bytes


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Serial:
    path = tmp_path_factory.mktemp("serial")
    (path / "demo.yaml").write_text(PROFILE)
    profile = Profile.load(path / "demo.yaml")
    with SearchLog(path / "results.jsonl") as log:
        searched = search(profile, log=log)
        found = searched.find(SPACE)
    return Serial(profile, searched.load, found, sorted_lines(path / "results.jsonl"))


# --- the answer


def test_the_cheapest_of_those_that_meet_the_targets_is_found(serial: Serial) -> None:
    """By brute force: every configuration plays the whole load."""
    found = serial.found
    meeting = []
    for one in found.candidates:
        assert one.server is not None
        server = one.server
        times = server.profile.step_time, server.profile.host_time
        played = play(Play(serial.load, server.flags, *times, server.fleet))
        if not missed_of(played["figures"], TARGETS):
            meeting.append(one)
            assert one.meets
        else:
            assert one.verdict in ("misses", "out early")
    assert 0 < len(meeting) < len(SPACE)
    assert found.best is not None
    assert found.best.cost == min(one.cost for one in meeting)
    assert all(high <= TARGETS[name] for name, (_low, high) in found.best.intervals.items())


def test_who_is_bad_by_far_plays_only_a_few_requests(serial: Serial) -> None:
    verdicts = [one.verdict for one in serial.found.candidates]
    assert "out early" in verdicts
    whole = sum(verdict != "out early" for verdict in verdicts)
    draws = 8 * sum(verdict in ("sure", "unsure") for verdict in verdicts)
    assert len(serial.results.splitlines()) == len(SPACE) + whole + draws


def test_money_decides_where_gpus_have_prices(profile: Profile) -> None:
    """Two replicas on a cheap card or one on a dear one."""
    served = profile.model_copy(update={"gpu": "NVIDIA L4", "model": "Qwen/Qwen2.5-7B", "kv_bytes_per_token": 57344})
    space = [Configuration(gpu="L4", replicas=3), Configuration(gpu="H100-SXM")]
    loose = {"p95_ttft": 60_000.0}
    for prices, winner in (("L4=0.5/h,H100-SXM=3/h", 0), ("L4=2/h,H100-SXM=3/h", 1)):
        found = Optimizer(served, LOAD, loose, num_prompts=100, prices=parse_prices([prices])).find(space)
        assert found.best is found.candidates[winner], [one.reason for one in found.candidates]
    with pytest.raises(OptimizeError, match="H100 SXM has no price"):
        Optimizer(served, LOAD, loose, prices=parse_prices(["L4=1"])).find(space)


def test_what_vllm_refuses_is_refused_with_its_reason(profile: Profile) -> None:
    space = configurations({"max_num_seqs": ["8", "512"], "max_num_batched_tokens": ["256"]})
    refused = search(profile).find(space).candidates[1]
    assert refused.verdict == "refused"
    assert "must not be smaller than" in refused.reason


def test_a_rate_beyond_the_servers_has_no_steady_state(profile: Profile) -> None:
    fast = Workload(OpenLoop(60.0), LOAD.shapes, 1)
    found = Optimizer(profile, fast, {"p95_ttft": 1e6}, num_prompts=400).find(configurations({}, replicas=(1, 4)))
    assert found.candidates[0].verdict in ("out early", "misses")
    assert "steady state" in found.candidates[0].reason
    assert found.best is found.candidates[1]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_the_pareto_front_is_what_nothing_beats(points: Sequence[tuple[int, int]]) -> None:
    front = pareto_front(points)

    def beaten(place: int) -> bool:
        mine = points[place]
        return any(other != mine and other[0] <= mine[0] and other[1] <= mine[1] for other in points)

    assert {points[place] for place in front} == {points[place] for place in range(len(points)) if not beaten(place)}
    assert len(front) == len({points[place] for place in front})
    assert [points[place][0] for place in front] == sorted(points[place][0] for place in front)


def test_a_point_without_a_number_is_on_no_front() -> None:
    assert pareto_front([(math.nan, 0.0), (1.0, 2.0), (0.5, math.nan)]) == [1]


# --- who computes


def sorted_lines(path: Path) -> bytes:
    return b"".join(sorted(path.read_bytes().splitlines(keepends=True)))


def assert_same_bytes(serial: Serial, workers: Workers, path: Path) -> None:
    with SearchLog(path / "results.jsonl") as log:
        assert told(search(serial.profile, workers=workers, log=log).find(SPACE)) == told(serial.found)
    assert sorted_lines(path / "results.jsonl") == serial.results


@pytest.mark.slow
def test_two_processes_find_the_same(serial: Serial, tmp_path: Path) -> None:
    assert_same_bytes(serial, Workers(jobs=2), tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("distributed") is None, reason="Dask is not installed")
def test_a_dask_cluster_of_two_workers_finds_the_same(serial: Serial, tmp_path: Path) -> None:
    from distributed import LocalCluster

    cluster = LocalCluster(
        n_workers=2, threads_per_worker=1, processes=False, protocol="tcp://", dashboard_address=None
    )
    with cluster:
        assert_same_bytes(serial, Workers("dask", scheduler_address=cluster.scheduler_address), tmp_path)


def test_workers_that_cannot_be_had_are_refused() -> None:
    with pytest.raises(WorkersError, match="there are loky, dask, ray"):
        Workers("spark")
    with pytest.raises(WorkersError, match="goes with the backend dask or ray"):
        Workers(scheduler_address="tcp://127.0.0.1:8786")


# --- resume

KILLED = """
import os, signal, sys
from pathlib import Path
from simulator.planning import optimize
from simulator.loads.lengths import Length
from simulator.profile import Profile
from simulator.planning.search_log import SearchLog
from simulator.planning.search_space import configurations
from simulator.loads.workload import ClosedLoop, Shape, Workload

load = Workload(ClosedLoop(24), (Shape(Length(200, 400), Length(10, 30)),), 1)
space = configurations({"max_num_seqs": ["4", "16"], "max_num_batched_tokens": ["256", "1024"]}, replicas=(1, 2, 3))
targets = {"p95_ttft": 500.0, "p95_tpot": 22.0}

played = optimize.play
count = 0

def play_some(one):
    global count
    count += 1
    if count > 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return played(one)

optimize.play = play_some
log = SearchLog(Path(sys.argv[2]))
optimize.Optimizer(Profile.load(sys.argv[1]), load, targets, num_prompts=160, log=log).find(space)
"""


@pytest.mark.slow
def test_a_killed_search_goes_on_where_it_was(
    serial: Serial, profile_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.jsonl"
    root = Path(__file__).parents[2]
    killed = subprocess.run([sys.executable, "-c", KILLED, profile_file, path], cwd=root, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(path.read_bytes().splitlines()) == 5
    with path.open("ab") as file:
        file.write(b'{"key": "abc", "res')  # a line that it was about to write
    again: list[Play] = []
    played = optimize.play
    monkeypatch.setattr(optimize, "play", lambda one: again.append(one) or played(one))
    with SearchLog(path) as log:
        assert told(search(serial.profile, log=log).find(SPACE)) == told(serial.found)
    assert sorted_lines(path) == serial.results
    assert len(again) == len(serial.results.splitlines()) - 5


def test_a_file_of_other_things_is_not_written_to(tmp_path: Path) -> None:
    for content in ("hello\n", "no line end", '{"key": 1}\n'):
        (tmp_path / "notes.txt").write_text(content)
        with pytest.raises(SearchLogError, match=r"notes\.txt"):
            SearchLog(tmp_path / "notes.txt")
        assert (tmp_path / "notes.txt").read_text() == content


def test_another_simulation_has_another_key(profile: Profile) -> None:
    one = Play(LOAD, profile.engine_flags, profile.step_time, profile.host_time, Fleet(2))
    tokens = np.array([10, 20])
    trace = Trace("t", np.array([0.0, 1.0]), tokens, tokens)
    others = [
        replace(one, load=replace(LOAD, seed=1)),
        replace(one, flags=one.flags.changed(max_num_seqs=3)),
        replace(one, step_time=replace(one.step_time, constant=0.02)),
        replace(one, fleet=Fleet(2, "random")),
        replace(one, load=trace),
        replace(one, load=Trace("t", np.array([0.0, 1.5]), tokens, tokens)),
    ]
    assert len({one.key, *(other.key for other in others)}) == 7
    assert replace(one, load=replace(LOAD)).key == one.key


# --- the words


def test_values_are_lists_ranges_and_switches() -> None:
    found = parse_vary(
        ["--max-num-seqs=64,128", "max_num_batched_tokens=512..8k:log2", "--enable-prefix-caching=true,false"]
    )
    assert found["max_num_seqs"] == ["64", "128"]
    assert found["max_num_batched_tokens"] == ["512", "1024", "2048", "4096"]
    assert found["enable_prefix_caching"] == [True, False]
    assert parse_counts("--replicas", "1..4,8") == [1, 2, 3, 4, 8]
    assert parse_vary(["--max-num-seqs=10..30:+10"]) == {"max_num_seqs": ["10", "20", "30"]}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("--max-num-seqs", "is not a flag with values"),
        ("--max-num-seqs=8..4", "is not a range"),
        ("--max-num-seqs=1,,2", "empty value"),
        ("--kv-transfer-config={}", "prefill/decode disaggregation is not modelled"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, problem: str) -> None:
    with pytest.raises(SpaceError, match=problem):
        parse_vary([text])


def test_a_router_makes_no_difference_to_one_replica() -> None:
    space = configurations({}, replicas=(1, 2), routers=("round-robin", "least-kv"))
    assert [(one.replicas, one.router) for one in space] == [(1, "round-robin"), (2, "round-robin"), (2, "least-kv")]


@pytest.mark.parametrize("price", ["L4=-1", "L4=nan", "L4=inf", "L4=1e308", "L4=" + "9" * 400, "=1", "L4", "\0"])
def test_a_price_that_means_nothing_is_refused(price: str) -> None:
    with pytest.raises(SpaceError, match="is not a price such as"):
        parse_prices([price])


@pytest.mark.parametrize(
    "values",
    ["1..99999999999999999999", "1..nan", "-1..4", "0..8:log2", "1..8:+0", "1..10002", "\0..1", "9" * 5000 + "..1"],
)
def test_a_range_that_means_nothing_is_refused(values: str) -> None:
    with pytest.raises(SpaceError, match="is not a range"):
        parse_vary([f"--max-num-seqs={values}"])


def test_more_configurations_than_could_be_tried_are_refused() -> None:
    with pytest.raises(SpaceError, match="1,000,000 configurations are more than 100,000"):
        configurations(parse_vary(["--max-num-seqs=1..1000", "--block-size=1..1000"]))
