"""Several processes that load a server are as one."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace

import numpy as np
import pytest
from fake_server import Manners, serve

from calibration.client_processes import merged, processes_for, record_apart
from calibration.clients import Job, Progress, Recording, Share
from calibration.dialect import Dialect
from calibration.endpoint import Endpoint, EndpointError, discover
from calibration.load import level_of
from calibration.stream import Answer
from simulator.loads.arrivals import ThinkTime
from simulator.loads.workload import ClosedLoop, Length, OpenLoop, Shape, Workload

SHAPE = Shape(Length(32, 64), Length(8, 16))
FAR = Endpoint("http://far", "demo")


def closed(clients: int, requests: int) -> Workload:
    return Workload(ClosedLoop(clients), (SHAPE,), requests)


@pytest.mark.parametrize("arrivals", [ClosedLoop(5), OpenLoop(100.0)])
def test_a_level_of_two_processes_is_a_level(arrivals: ClosedLoop | OpenLoop) -> None:
    workload, told = Workload(arrivals, (SHAPE,), 20, seed=3), list[Progress]()
    with serve(Manners(token_seconds=0.005)) as server:
        job = Job(discover(server.url), workload, 1, processes=2)
        seen = record_apart(job, told.append)
        most, prompts = server.most_running, [tuple(request["prompt"]) for request in server.requests]
    level = level_of(job, seen)
    assert seen.processes == 2
    assert told[-1] == Progress(20, 0, int(workload.lengths()[1].sum()))
    assert len(set(prompts)) == len(prompts) == 21  # one trial for both
    by_number = level.completed.sort_values("request_id")
    assert by_number["request_id"].tolist() == list(range(20))
    assert by_number["prompt_tokens"].tolist() == workload.lengths()[0].tolist()
    assert level.requests["arrival"].is_monotonic_increasing
    assert not any("traffic" in note for note in level.notes)
    if isinstance(arrivals, ClosedLoop):
        assert most == 5
    else:
        times = workload.arrival_times()
        assert times is not None
        assert (level.requests["arrival"].to_numpy() >= times - 1e-9).all()


def test_shares_are_the_whole() -> None:
    for load in (closed(7, 30), replace(closed(7, 30), arrivals=OpenLoop(1.0))):
        parts = [Share(number, 3).requests(load) for number in range(3)]
        assert sorted(index for part in parts for index in part) == list(range(30))
    clients = [Share(number, 3).of_clients(7) for number in range(3)]
    assert clients == [3, 2, 2]
    busiest = [len(Share(number, 3).requests(closed(7, 70))) for number in range(3)]
    assert busiest == [30, 20, 20]  # as many a client in every process


def test_few_streams_need_one_process_and_many_need_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert processes_for(Job(FAR, closed(128, 256), 1)) == 1
    assert processes_for(Job(FAR, closed(512, 1024), 1)) == 3
    assert processes_for(Job(FAR, closed(9000, 9000), 1)) == 8
    assert processes_for(Job(FAR, closed(512, 3), 1)) == 1
    assert processes_for(Job(FAR, Workload(OpenLoop(2000.0), (SHAPE,), 4000), 1)) == 3  # of 12 tokens
    assert processes_for(Job(FAR, Workload(OpenLoop(float("inf"), max_concurrency=64), (SHAPE,), 4000), 1)) == 1


def test_the_slowest_process_says_whether_the_client_was_fast_enough() -> None:
    first = Recording(Dialect(), answers=[Answer(0, 1, 1, 0.0, sent=2.0)], loop_lags=[0.001] * 9, cpu_share=0.3)
    second = Recording(Dialect(), answers=[Answer(1, 1, 1, 0.0, sent=1.0)], loop_lags=[0.02] * 3, cpu_share=0.2)
    both = merged([first, second])
    assert ([answer.index for answer in both.answers], both.cpu_share) == ([1, 0], 0.3)
    assert both.loop_lags == [0.02] * 3


def test_an_error_of_the_first_process_is_the_levels() -> None:
    with serve(Manners(status=503)) as server, pytest.raises(EndpointError, match="is not ready"):
        record_apart(Job(discover(server.url), closed(2, 2), 1, processes=2))


def test_a_process_that_dies_says_what_it_died_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle, "dump", lambda message, pipe: pipe.write(b"no pickle"))
    with pytest.raises(RuntimeError, match=r"the load generator's process died \(1\): .*UnpicklingError"):
        record_apart(Job(FAR, closed(1, 1), 1))


def test_clients_think_between_an_answer_and_the_next_request() -> None:
    workload = Workload(ClosedLoop(1, think_time=ThinkTime(0.2)), (SHAPE,), 3)
    with serve() as server:
        level = level_of(job := Job(discover(server.url), workload, 1), record_apart(job))
    sent, ended = level.requests["arrival"].to_numpy(), (level.requests["arrival"] + level.requests["e2el"]).to_numpy()
    assert (sent[1:] - ended[:-1] >= 0.2).all()
    assert "output_throughput" not in level.intervals


def test_an_open_loop_may_be_capped() -> None:
    """Eight come at once and two are let in: who waits at the client has no latency yet, and is not called late."""
    workload = Workload(OpenLoop(float("inf"), max_concurrency=2), (Shape(Length.fixed(8), Length.fixed(8)),), 8)
    with serve(Manners(token_seconds=0.005)) as server:
        level = level_of(job := Job(discover(server.url), workload, 1, processes=2), record_apart(job))
        assert server.most_running == 2
    assert level.records is not None
    np.testing.assert_allclose(level.records["scheduled"], 0, atol=1e-9)
    assert level.records["sent"].max() > 0.1
    assert level.completed["ttft"].max() < 0.1
    assert not any("after their time" in note for note in level.notes)
