"""GuideLLM's reports of three generations."""

from __future__ import annotations

from pathlib import Path

import pytest
from result_files import guidellm_timings, guidellm_v2, sample, write

from calibration.imports import ImportFileError, NoRequestsError, import_aggregates, import_files, import_stated
from simulator.loads.workload import ClosedLoop, OpenLoop
from simulator.results.summary import summarize

CONCURRENT = {"type_": "concurrent", "streams": 2}


def request(start: float) -> dict:
    metrics = {"input_metrics": {"text_tokens": 500}, "output_metrics": {"text_tokens": 128}}
    return {"request_id": "r", "info": {"timings": guidellm_timings(start)}} | metrics


def test_the_real_report_without_requests_gives_its_figures_by_our_definitions() -> None:
    path = sample("guidellm/guidellm_report_v2.json")
    with pytest.raises(NoRequestsError, match="keeps 0 of 2 requests"):
        import_files([path])
    first, second = import_stated([path])
    assert first.workload.arrivals == OpenLoop(2.0, float("inf"))
    assert first.value("mean_tpot") == pytest.approx(0.0011508, rel=1e-3)  # its inter_token_latency_ms
    assert second.value("mean_ttft") == pytest.approx(0.0097839, rel=1e-3)


@pytest.mark.parametrize("version", [1, 2])
def test_tpot_is_without_the_prefill(tmp_path: Path, version: int) -> None:
    """TTFT 1 s and 128 tokens of 10 ms: GuideLLM says 17.7 ms per token."""
    starts = (1_700_000_000.0, 1_700_000_000.0, 1_700_000_002.3)
    report = guidellm_v2({"successful": [request(start) for start in starts]}, 3, CONCURRENT, version)
    (level,) = import_files([write(tmp_path, "r.json", report)]).levels
    summary = summarize(level)
    assert summary.tpot.mean == pytest.approx(0.010, rel=1e-6)
    assert summary.ttft.mean == pytest.approx(1.0)
    assert summary.e2el.mean == pytest.approx(2.27)  # to the last token; its own latency of 2.3 ends with the stream
    assert level.workload.describe() == "C=2, 500/128 tokens, 3 requests"
    assert level.tokens is None
    assert level.gaps.empty
    assert any("can validate, cannot calibrate" in note for note in level.notes)
    figures = {figure.metric: figure.value for figure in import_aggregates([tmp_path / "r.json"])}
    assert figures["mean_tpot"] == pytest.approx(0.010)


def test_flat_requests_of_0_3_are_read(tmp_path: Path) -> None:
    flat = {
        "prompt_tokens": 500,
        "output_tokens": 128,
        "start_time": 10.0,
        "first_token_time": 11.0,
        "last_token_time": 12.27,
        "end_time": 12.3,
    }
    benchmark = {
        "args": {"strategy": {"type_": "synchronous"}},
        "total_count": {"successful": 1, "incomplete": 0, "errored": 0},
        "start_time": 10.0,
        "end_time": 12.3,
        "metrics": {},
        "requests": {"successful": [flat], "incomplete": [], "errored": []},
    }
    run = import_files([write(tmp_path, "r.json", {"benchmarks": [benchmark]})])
    assert run.server["source_version"] == "0.2 to 0.4"
    assert run.levels[0].workload.arrivals == ClosedLoop(1)
    assert summarize(run.levels[0]).tpot.mean == pytest.approx(0.010)


def test_requests_cut_off_or_failed_are_rows_with_an_error(tmp_path: Path) -> None:
    failed = request(1_700_000_001.0) | {"info": {"timings": guidellm_timings(1_700_000_001.0), "error": "HTTP 500"}}
    unsent = {"info": {"timings": {}}}
    requests = {"successful": [request(1_700_000_000.0)], "errored": [failed], "incomplete": [request(1.7e9), unsent]}
    (level,) = import_files([write(tmp_path, "r.json", guidellm_v2(requests, 1, CONCURRENT))]).levels
    assert sorted(level.requests["error"]) == ["", "HTTP 500", "cut off at the end"]


def test_prompts_that_share_beginnings_are_pointed_out() -> None:
    levels = import_stated([sample("guidellm/guidellm_report_v2.json")])
    assert all(any("prefix cache" in note for note in level.notes) for level in levels)


def test_an_unknown_strategy_is_told(tmp_path: Path) -> None:
    report = guidellm_v2({"successful": [request(1.7e9)]}, 1, {"type_": "lunar"})
    with pytest.raises(ImportFileError, match="arrivals of kind 'lunar'"):
        import_files([write(tmp_path, "r.json", report)])
