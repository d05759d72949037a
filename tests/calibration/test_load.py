"""A level of load measures the server and not itself, and says when it cannot."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import time
from dataclasses import replace

import aiohttp
import numpy as np
import pytest
from fake_server import FakeServer, Manners, serve
from played_levels import SHORT, closed, measure

from calibration import clients
from calibration.clients import Job, Progress, Recording, record
from calibration.dialect import Dialect
from calibration.endpoint import EndpointError, discover
from calibration.load import level_of, play
from calibration.stream import Answer, Patience
from calibration.token_times import TokenTimes
from simulator.loads.workload import ClosedLoop, Length, OpenLoop, Shape, Workload
from simulator.results.run import GAP_COLUMNS, RECORD_COLUMNS, REQUEST_COLUMNS, TIMELINE_COLUMNS, TOKEN_COLUMNS, Level


def test_a_level_has_the_servers_pace() -> None:
    """40 tokens 5 ms apart after 64 prompt tokens of 1 ms: measured from a process of its own."""
    with serve(Manners(token_seconds=0.005, prefill_seconds=0.001)) as server:
        level = play(discover(server.url), closed(2, 6, output=40), sample_every=0.05)
    requests = level.completed
    assert len(requests) == 6
    assert requests["ttft"].min() >= 0.069  # more where the machine is busy
    assert requests["tpot"].min() >= 0.0045  # a first token that is read late shortens the rest
    np.testing.assert_allclose(requests["tpot"], (requests["e2el"] - requests["ttft"]) / 39, atol=1e-8)
    assert level.duration == pytest.approx(3 * requests["e2el"].median(), rel=0.2)
    assert (requests["finish_reason"] == "length").all()
    assert level.gaps["count"].sum() == 6 * 39
    assert level.tokens is not None
    assert level.tokens.groupby("request_id")["tokens"].max().tolist() == [40] * 6
    for table, columns in (
        (level.requests, REQUEST_COLUMNS),
        (level.gaps, GAP_COLUMNS),
        (level.timeline, TIMELINE_COLUMNS),
        (level.tokens, TOKEN_COLUMNS),
    ):
        assert {name: str(kind) for name, kind in table.dtypes.items()} == columns


def test_a_closed_loop_keeps_its_clients_busy_and_no_more() -> None:
    with serve() as server:
        level = measure(server, closed(5, 20))
        assert server.most_running == 5
    busy = level.completed["e2el"].sum() / level.duration
    assert busy == pytest.approx(5, rel=0.15)


def test_more_streams_than_a_http_client_allows_by_default() -> None:
    with serve(Manners(token_seconds=0.05)) as server:
        level = measure(server, closed(120, 120, output=4), Patience())
        assert server.most_running == 120
    assert len(level.completed) == 120


def test_an_open_loop_sends_at_its_times() -> None:
    workload = replace(closed(1, 20, output=4), arrivals=OpenLoop(100.0, burstiness=float("inf")))
    with serve() as server:
        level = measure(server, workload)
    times = workload.arrival_times()
    assert times is not None
    np.testing.assert_allclose(level.requests["arrival"], times, atol=0.03)
    assert (level.requests["arrival"].to_numpy() >= times).all()


def test_prompts_are_new_every_time_and_end_where_asked() -> None:
    with serve() as server:
        job = Job(discover(server.url), closed(2, 4), seed=1)
        asyncio.run(record(job, lambda _: None))
        asyncio.run(record(replace(job, seed=2), lambda _: None))
        prompts = [tuple(request["prompt"]) for request in server.requests]
        assert len(set(prompts)) == len(prompts) == 10  # a trial and four requests, twice
        assert len({prompt[:16] for prompt in prompts}) == 10  # no common first block for a prefix cache
        body = server.requests[-1]
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"], body["temperature"]) == (16, 16, True, 0)
    assert all(3 <= token < 8192 for prompt in prompts for token in prompt)


def test_lengths_are_those_of_the_workload_in_the_order_of_sending() -> None:
    workload = Workload(ClosedLoop(3), (Shape(Length(10, 90), Length(2, 9)),), 12, seed=5)
    with serve() as server:
        level = measure(server, workload)
    inputs, outputs = workload.lengths()
    assert level.requests["prompt_tokens"].tolist() == inputs.tolist()
    assert level.requests["output_tokens"].tolist() == outputs.tolist()


def test_several_tokens_in_an_event_share_the_gap() -> None:
    with serve(Manners(token_seconds=0.004, tokens_per_event=4)) as server:
        level = measure(server, closed(1, 2))
    assert level.completed["output_tokens"].tolist() == [16, 16]
    assert set(level.gaps["count"]) == {4}
    assert level.tokens is not None
    between = level.tokens.groupby("request_id")["time"].diff().dropna()
    np.testing.assert_allclose(level.gaps.sort_values("time")["gap"], between / 4, atol=1e-8)


def test_the_first_token_is_the_first_that_is_counted() -> None:
    with serve(Manners(token_seconds=0.02, empty_events=True)) as server:
        level = measure(server, closed(1, 1, output=4))
    assert level.completed["ttft"].min() > 0.02
    assert level.gaps["count"].sum() == 3


@pytest.mark.parametrize(
    ("manners", "usage"),
    [
        (Manners(empty_events=True), "continuous"),
        (Manners(empty_events=False, knows_continuous_usage=False), "final"),
        (Manners(empty_events=False, knows_stream_options=False), "none"),
    ],
)
def test_a_server_is_asked_in_the_way_that_it_takes(manners: Manners, usage: str) -> None:
    with serve(manners) as server:
        job = Job(discover(server.url), closed(1, 2), seed=1)
        seen = asyncio.run(record(job, lambda _: None))
    assert seen.dialect.usage == usage
    level = level_of(job, seen)
    assert level.completed["output_tokens"].tolist() == [16, 16]
    assert any("sends no usage" in note for note in level.notes) == (usage == "none")


def test_a_small_vocabulary_gets_small_token_ids() -> None:
    with serve(Manners(vocabulary=512)) as server:
        level = measure(server, closed(1, 1))
        assert max(server.requests[-1]["prompt"]) < 512
    assert len(level.completed) == 1
    nothing_else = Manners(vocabulary=3, has_chat=False)
    with serve(nothing_else) as server, pytest.raises(EndpointError, match="takes no prompt of token ids"):
        measure(server, closed(1, 1))


@pytest.mark.parametrize("manners", [Manners(streams=False), Manners(tokens_per_event=99)])
def test_a_server_that_does_not_stream_is_refused(manners: Manners) -> None:
    with serve(manners) as server, pytest.raises(EndpointError, match="does not stream"):
        measure(server, closed(1, 1))


def test_a_proxy_that_buffers_is_refused() -> None:
    with serve(Manners(buffers=True, token_seconds=0.02)) as server, pytest.raises(EndpointError, match="at once"):
        measure(server, closed(1, 1), Patience())


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "wants an API key"),
        (404, "has neither /v1/completions nor /v1/chat/completions for 'demo': no luck today"),
        (429, "limits the rate"),
        (500, r"answers HTTP 500 \(no luck today\)"),
        (503, "is not ready"),
    ],
)
def test_a_server_that_refuses_everything_is_refused_in_one_line(status: int, message: str) -> None:
    with serve(Manners(status=status)) as server, pytest.raises(EndpointError, match=message) as caught:
        measure(server, closed(1, 1))
    assert "\n" not in str(caught.value)


def test_the_load_process_hands_its_error_on() -> None:
    with serve(Manners(status=503)) as server, pytest.raises(EndpointError, match="is not ready"):
        play(discover(server.url), closed(1, 1))


def test_a_slow_first_token_is_no_buffering_proxy() -> None:
    with serve(Manners(prefill_seconds=0.02)) as server:  # 0.3 s for the trial's prompt, then 16 tokens in 32 ms
        assert len(measure(server, closed(1, 1, prompt=16), Patience()).completed) == 1


def test_failures_are_rows_that_touch_no_latency() -> None:
    with serve(Manners(fail_every=3)) as server:
        level = measure(server, closed(2, 12))
    failed = level.requests[level.requests["error"] != ""]
    assert set(failed["error"]) == {"http 500"}
    assert len(failed) == 4
    assert failed[["ttft", "tpot", "e2el"]].isna().all(axis=None)
    assert len(level.completed) == 8
    assert level.tokens is not None
    together = level.tokens.groupby("request_id")["tokens"].first() - 1  # a busy client reads several tokens at once
    assert level.gaps["count"].sum() + together.sum() == 8 * 15
    assert "4 of 12 requests failed: http 500 (4); the first said: CUDA error" in level.notes
    assert level.records is not None
    assert (level.records["detail"] == "CUDA error").sum() == 4


def after_the_trial(server: FakeServer, workload: Workload, **manners: object) -> Level:
    """Play against a server whose manners change once its dialect is known."""
    job = Job(discover(server.url), workload, 1, Dialect(), SHORT)
    for name, value in manners.items():
        setattr(server.manners, name, value)
    return level_of(job, asyncio.run(record(job, lambda _: None)))


def test_a_stream_that_dies_is_broken() -> None:
    with serve() as server:
        level = after_the_trial(server, closed(1, 2), dies_after=5)
    assert level.requests["error"].tolist() == ["stream broken"] * 2
    assert level.requests["output_tokens"].tolist() == [5, 5]
    assert level.gaps.empty


def test_a_connection_that_is_reset_is_told_from_a_stream_that_breaks() -> None:
    with serve() as server:
        level = after_the_trial(server, closed(1, 2), resets=True)
    assert level.requests["error"].tolist() == ["connection reset"] * 2
    assert len(server.requests) == 2  # and none was sent again


@pytest.mark.parametrize("status", [401, 403, 404, 429, 503])
def test_refusals_are_counted_by_their_status(status: int) -> None:
    with serve() as server:
        level = after_the_trial(server, closed(1, 3), status=status)
    assert level.requests["error"].tolist() == [f"http {status}"] * 3
    assert len(server.requests) == 3
    assert level.completed.empty
    assert level.intervals == {}


@pytest.mark.parametrize("tokens", [0, 5])
def test_a_stream_that_hangs_is_given_up(tokens: int) -> None:
    with serve() as server:
        began = time.monotonic()
        level = after_the_trial(server, closed(2, 2), hangs_after=tokens)
        assert time.monotonic() - began < 3
    assert level.requests["error"].tolist() == ["timeout"] * 2


@pytest.mark.slow
def test_a_long_stream_that_moves_is_not_given_up() -> None:
    with serve(Manners(token_seconds=0.05)) as server:
        level = measure(server, closed(1, 1, output=20), replace(SHORT, first_token=1.0))
    assert len(level.completed) == 1
    assert level.duration > 1.0


def test_a_server_that_goes_away_leaves_failures() -> None:
    with serve() as server:
        endpoint = discover(server.url)
    job = Job(replace(endpoint, has_metrics=False), closed(1, 2), 1, Dialect(), SHORT)
    level = level_of(job, asyncio.run(record(job, lambda _: None)))
    assert level.requests["error"].tolist() == ["no connection"] * 2


def test_wrong_counts_are_errors() -> None:
    with serve(Manners(added_prompt_tokens=6)) as server:
        level = measure(server, closed(1, 2))
    assert set(level.requests["error"]) == {"prompt miscounted"}
    assert level.notes[0].endswith("the first said: 70 tokens instead of 64")
    with serve(Manners(forgotten_tokens=2)) as server:
        level = measure(server, closed(1, 2))
    assert set(level.requests["error"]) == {"ended early"}
    assert level.completed.empty
    assert level.notes[0] == "2 of 2 requests failed: ended early (2); the first said: 14 tokens instead of 16"


def test_events_cut_anywhere_lose_nothing() -> None:
    with serve(Manners(cut=37)) as server:
        level = measure(server, closed(2, 4))
    assert level.completed["output_tokens"].tolist() == [16] * 4


def test_the_timeline_is_the_servers() -> None:
    with serve(Manners(token_seconds=0.02)) as server:
        level = measure(server, closed(3, 3), replace(SHORT, first_token=5))
        assert sum(path.startswith("/metrics/?name[]=") for path in map(_plain, server.metrics_paths)) >= 4
    middle = level.timeline.iloc[1:-1]
    assert (middle["running"] == 3).all()
    assert (middle["waiting"] == 0).all()
    np.testing.assert_allclose(middle["kv_tokens"], 0.3 * 16000)
    assert middle["active_tokens"].between(3 * 64, 3 * 80).all()
    assert middle["active_tokens"].is_monotonic_increasing
    assert level.server_means == pytest.approx({"ttft": 0.25, "queue_time": 0.125})


def _plain(path: str) -> str:
    return path.replace("%5B", "[").replace("%5D", "]")


def test_a_server_that_cannot_filter_its_metrics_is_asked_for_all() -> None:
    with serve(Manners(token_seconds=0.02, filters_metrics=False)) as server:
        level = measure(server, closed(2, 2), replace(SHORT, first_token=5))
    assert (level.timeline["running"].iloc[1:-1] == 2).all()
    assert len(level.timeline) >= 2


def test_without_metrics_the_timeline_is_the_clients() -> None:
    with serve(Manners(token_seconds=0.02, shows_metrics=False)) as server:
        level = measure(server, closed(2, 2), replace(SHORT, first_token=5))
    assert (level.timeline["running"].iloc[1:] == 2).all()
    assert (level.timeline["waiting"] == -1).all()
    assert level.timeline["kv_tokens"].isna().all()
    assert any("shows no /metrics" in note for note in level.notes)


def test_waiting_requests_hold_no_active_tokens() -> None:
    """Of two requests without a token, the one sent last is the one that waits."""
    running = Answer(0, 100, 9, 0.0, sent=0.0, ended=9.0, arrivals=TokenTimes([(1.0, 1), (2.0, 2), (9.0, 9)]))
    prefilled = Answer(1, 200, 9, 0.0, sent=1.0, ended=9.0, arrivals=TokenTimes([(5.0, 1), (9.0, 9)]))
    waits = Answer(2, 400, 9, 0.0, sent=1.5, ended=9.0, arrivals=TokenTimes([(6.0, 1), (9.0, 9)]))
    gauges = b"vllm:num_requests_running 2\nvllm:num_requests_waiting 1\n"
    with serve() as server:
        job = Job(discover(server.url), closed(3, 3), 1)
    seen = Recording(Dialect(), answers=[running, prefilled, waits], samples=[(2.5, gauges)])
    assert level_of(job, seen).timeline["active_tokens"].tolist() == [100 + 2 + 200]


def test_every_request_is_recorded_with_its_times_and_counts() -> None:
    with serve(Manners(prefill_seconds=0.001, token_seconds=0.005)) as server:
        level = measure(server, closed(2, 6))
    records = level.records
    assert records is not None
    assert {name: str(kind) for name, kind in records.dtypes.items()} == RECORD_COLUMNS
    assert records["sent"].tolist() == level.requests["arrival"].tolist()
    times = records[["scheduled", "sent", "headers", "ended"]].to_numpy()
    assert (np.diff(times, axis=1) >= 0).all()
    assert (records["headers"] <= records["sent"] + level.requests["ttft"]).all()
    assert records["counted_prompt_tokens"].tolist() == records["asked_prompt_tokens"].tolist() == [64] * 6
    assert records["counted_output_tokens"].tolist() == records["asked_output_tokens"].tolist() == [16] * 6


def test_failed_requests_are_not_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors refer to each other in circles, and the collector of such circles is off while a level is played."""
    monkeypatch.setattr(clients, "FAILURES_HELD", 20)
    monkeypatch.setattr(clients, "PROGRESS_EVERY", 0.02)
    held = []

    def look(_progress: Progress) -> None:
        held.append(sum(isinstance(thing, aiohttp.ClientConnectorError) for thing in gc.get_objects()))

    with serve() as server:
        job = Job(discover(server.url), closed(4, 400), 1, Dialect(), SHORT)
    seen = asyncio.run(record(job, look))  # the server has gone
    assert [answer.error for answer in seen.answers] == ["no connection"] * 400
    assert max(held) < 20 + 4


@pytest.mark.slow
def test_progress_is_told_as_it_comes() -> None:
    told: list[Progress] = []
    with serve(Manners(token_seconds=0.02)) as server:
        play(discover(server.url), closed(1, 2), on_progress=told.append)
    assert told[-1] == Progress(requests_done=2, requests_failed=0, tokens_done=32)
    assert 0 < told[len(told) // 2].tokens_done < 32


@pytest.mark.slow
def test_load_ends_with_whoever_wanted_it() -> None:
    """The process that asked is killed outright: its clients stop too, and the server is free again."""
    with serve(Manners(token_seconds=0.05)) as server:
        script = (
            "from calibration.endpoint import discover; from calibration.load import play\n"
            "from simulator.loads.workload import *\n"
            "shape = Shape(Length.fixed(8), Length.fixed(4000))\n"
            f"play(discover('{server.url}'), Workload(ClosedLoop(2), (shape,), 2))\n"
        )
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        asker = subprocess.Popen([sys.executable, "-c", script], env=environment)
        _until(lambda: server.running == 2)
        asker.kill()
        asker.wait()
        _until(lambda: server.running == 0)


def _until(condition: object, patience: float = 10.0) -> None:
    assert callable(condition)
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
