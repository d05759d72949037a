"""Results of vllm bench serve: what is in them, and what their versions got wrong."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest
from result_files import sample, vllm_bench, vllm_bench_plain, write

from calibration.imports import ImportFileError, NoRequestsError, import_aggregates, import_files, import_stated
from simulator.loads.workload import ClosedLoop, OpenLoop
from simulator.results.run_files import load_run, save_run
from simulator.results.summary import summarize


def test_the_real_completions_file_gives_its_own_mean_tpot_and_the_true_concurrency() -> None:
    summary = summarize(import_files([sample("vllm/vllm_bench_0.32.0_detailed.json")]).levels[0])
    assert summary.tpot.mean * 1000 == pytest.approx(8.746, abs=0.001)
    assert summary.mean_concurrency == pytest.approx(3.96, abs=0.01)
    assert summary.peak_concurrency == 4  # the file says 20


def test_the_real_chat_file_of_0_32_has_its_itl_put_right() -> None:
    level = import_files([sample("vllm/vllm_bench_0.32.0_chat_detailed.json")]).levels[0]
    summary = summarize(level)
    assert summary.itl.mean * 1000 == pytest.approx(8.785, abs=0.001)  # the file says 8.346
    assert summary.tpot.mean == pytest.approx(summary.itl.mean, rel=1e-6)
    assert any("role chunk" in note for note in level.notes)


def test_the_real_chat_file_of_0_33_needs_nothing() -> None:
    level = import_files([sample("vllm/vllm_bench_0.33.0_chat_detailed.json")]).levels[0]
    assert summarize(level).itl.mean * 1000 == pytest.approx(8.792, abs=0.001)
    assert not any("role chunk" in note for note in level.notes)


def test_a_detailed_result_is_a_measured_level_with_its_raw_tokens(tmp_path: Path) -> None:
    run = import_files([write(tmp_path, "r.json", vllm_bench())])
    (level,) = run.levels
    assert (run.source, run.started_at, run.server["model"]) == ("measured", "2026-01-02T03:04:05", "m")
    assert level.workload.describe() == "C=2, 100/4 tokens, 3 requests"
    assert level.requests["arrival"].tolist() == [0.0, 0.0, 0.08]
    assert level.duration == pytest.approx(0.16)
    assert level.tokens is not None
    assert len(level.tokens) == 12
    assert level.tokens["tokens"].tolist() == [1, 2, 3, 4] * 3


def test_an_imported_run_is_saved_and_read_like_any_other(tmp_path: Path) -> None:
    run = import_files([write(tmp_path, "r.json", vllm_bench())])
    save_run(run, tmp_path / "run")
    back = load_run(tmp_path / "run").levels[0]
    assert (back.workload, back.duration, back.notes) == (run.levels[0].workload, 0.16, run.levels[0].notes)
    for name in ("requests", "gaps", "timeline", "tokens"):
        pd.testing.assert_frame_equal(getattr(back, name), getattr(run.levels[0], name))


def test_appended_results_are_levels_one_after_the_other(tmp_path: Path) -> None:
    path = write(tmp_path, "r.json", vllm_bench(max_concurrency=1), vllm_bench(max_concurrency=2))
    assert [level.workload.concurrency for level in import_files([path]).levels] == [1, 2]
    combined = write(tmp_path, "summary.json", [vllm_bench(), vllm_bench()])  # as vllm bench sweep writes
    assert len(import_files([combined]).levels) == 2


def test_a_role_chunk_is_the_first_token_of_none_but_chat_answers(tmp_path: Path) -> None:
    gaps = {"itls": [[0.00001, 0.01, 0.01, 0.01]] * 3, "latencies": [0.08001] * 3}
    chat = import_files([write(tmp_path, "c.json", vllm_bench(backend="openai-chat", **gaps))]).levels[0]
    assert chat.gaps["gap"].tolist() == pytest.approx([0.01] * 9)
    assert chat.requests["ttft"].tolist() == pytest.approx([0.05001] * 3)


def test_tokens_that_came_in_one_chunk_share_its_gap(tmp_path: Path) -> None:
    """Speculative decoding: two tokens every 20 ms are 10 ms a token."""
    result = vllm_bench(output_lens=[8, 8, 8], itls=[[0.02] * 3] * 3, latencies=[0.11] * 3)
    level = import_files([write(tmp_path, "r.json", result)]).levels[0]
    assert level.gaps["gap"].tolist() == pytest.approx([0.01] * 9)
    assert level.gaps["count"].unique().tolist() == [2]
    assert level.tokens is None
    assert any("can validate, cannot calibrate" in note for note in level.notes)


def test_failed_requests_are_rows_with_an_error_and_no_times(tmp_path: Path) -> None:
    trouble = "Traceback (most recent call last):\n  File x\naiohttp.client_exceptions.ServerDisconnectedError: gone"
    result = vllm_bench(
        errors=["", trouble, ""], output_lens=[4, 0, 4], ttfts=[0.05, 0, 0.05], itls=[[0.01] * 3, [], [0.01] * 3]
    )
    level = import_files([write(tmp_path, "r.json", result)]).levels[0]
    assert level.requests["error"].tolist() == ["", "ServerDisconnectedError", ""]
    assert math.isnan(level.requests["ttft"][1])
    assert len(level.completed) == 2
    assert any("1 of 3 requests failed: ServerDisconnectedError" in note for note in level.notes)


def test_before_0_30_a_latency_is_the_first_token_and_all_gaps(tmp_path: Path) -> None:
    level = import_files([write(tmp_path, "r.json", vllm_bench(latencies="absent"))]).levels[0]
    assert level.requests["e2el"].tolist() == pytest.approx([0.08] * 3)


def test_before_0_15_sending_times_are_not_told_so_steps_cannot_be_seen(tmp_path: Path) -> None:
    result = vllm_bench(latencies="absent", start_times="absent", backend="absent")
    result["request_goodput:"] = result.pop("request_goodput")  # 0.8.5's slip
    run = import_files([write(tmp_path, "r.json", result)])
    assert run.server["source_version"] == "0.8.5"
    assert run.levels[0].tokens is None
    assert run.levels[0].duration == pytest.approx(0.16)
    assert summarize(run.levels[0]).itl.mean == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("changes", "arrivals"),
    [
        ({"request_rate": 5.0, "max_concurrency": None}, OpenLoop(5.0)),
        ({"request_rate": 5.0, "burstiness": 0.5, "max_concurrency": 100}, OpenLoop(5.0, 0.5)),
        ({"request_rate": 500.0, "max_concurrency": 1}, ClosedLoop(1)),
        ({"request_rate": "inf", "max_concurrency": None}, OpenLoop(math.inf)),
    ],
)
def test_a_bound_on_concurrency_makes_a_closed_loop_where_it_binds(
    tmp_path: Path, changes: dict, arrivals: object
) -> None:
    assert import_files([write(tmp_path, "r.json", vllm_bench(**changes))]).levels[0].workload.arrivals == arrivals


def test_metadata_that_names_flags_tells_the_server(tmp_path: Path) -> None:
    server = import_files([write(tmp_path, "r.json", vllm_bench(max_num_seqs="64", tp="2"))]).server
    assert server["max_num_seqs"] == 64
    assert server["metadata"] == {"tp": "2"}


def test_the_servers_own_queue_times_are_kept(tmp_path: Path) -> None:
    level = import_files([write(tmp_path, "r.json", vllm_bench(server_queue_times=[0.0, 0.004, 0.0]))]).levels[0]
    assert level.requests["queue_time"].tolist() == [0.0, 0.004, 0.0]


def test_a_plain_result_has_figures_and_no_requests(tmp_path: Path) -> None:
    path = write(tmp_path, "r.json", vllm_bench_plain())
    with pytest.raises(NoRequestsError, match="aggregates only"):
        import_files([path])
    figures = {figure.metric: figure.value for figure in import_aggregates([path])}
    assert figures["mean_ttft"] == pytest.approx(0.05)
    assert figures["mean_concurrency"] == pytest.approx(1.5)  # kept latencies by the duration
    assert figures["p90_e2el"] == pytest.approx(0.08)
    assert figures["output_throughput"] == 75.0


def test_a_plain_chat_result_does_not_pass_on_an_itl_with_role_chunks(tmp_path: Path) -> None:
    (level,) = import_stated([write(tmp_path, "r.json", vllm_bench_plain(backend="openai-chat"))])
    assert level.value("mean_itl") is None
    assert level.value("mean_tpot") == pytest.approx(0.01)
    assert any("role chunk" in note for note in level.notes)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"ttfts": [0.05, float("nan"), 0.05]}, r"'ttfts\[1\]' must be a finite number that is not negative, got nan"),
        ({"ttfts": [0.05, -1.0, 0.05]}, r"'ttfts\[1\]' must be .* got -1.0"),
        ({"itls": [[0.01, "x", 0.01]] * 3}, r"'itls\[1\]' must be a number, got 'x'"),
        ({"itls": "absent"}, "'itls' is missing"),
        ({"output_lens": [4, 4]}, "'output_lens' has 2 entries and 'input_lens' 3"),
        ({"latencies": [float("inf")] * 3}, r"'latencies\[0\]' must be a finite number"),
        ({"max_concurrency": 2.5}, "'max_concurrency' must be a whole number"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(tmp_path: Path, changes: dict, what: str) -> None:
    with pytest.raises(ImportFileError, match=what) as caught:
        import_files([write(tmp_path, "r.json", vllm_bench(**changes))])
    assert "\n" not in str(caught.value)
    assert "r.json" in str(caught.value)
