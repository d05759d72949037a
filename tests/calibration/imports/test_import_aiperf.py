"""AIPerf's profile exports and the server metrics beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
from result_files import aiperf_line, sample, write

from calibration.imports import ImportFileError, import_aggregates, import_files
from simulator.loads.workload import ClosedLoop
from simulator.results.summary import summarize

SLICE = {"start_ns": 1_700_000_000_000_000_000, "end_ns": 1_700_000_001_000_000_000}


def gauge(value: float) -> dict:
    return {
        "type": "gauge",
        "series": [{"endpoint_url": "u", "labels": {"engine": "0"}, "timeslices": [SLICE | {"avg": value}]}],
    }


def server_metrics() -> dict:
    labels = {"block_size": "16", "num_gpu_blocks": "1000", "kv_cache_size_tokens": "16000", "engine": "0"}
    metrics = {
        "vllm:cache_config_info": {"series": [{"endpoint_url": "u", "labels": labels, "stats": {"avg": 1.0}}]},
        "vllm:num_requests_running": gauge(2.0),
        "vllm:num_requests_waiting": gauge(0.0),
        "vllm:kv_cache_usage_perc": gauge(0.1),
        "vllm:request_queue_time_seconds": {"series": [{"stats": {"sum": 0.06, "count": 3, "avg": 0.02}}]},
        "vllm:num_preemptions_total": {"series": [{"stats": {"total": 2.0}}]},
    }
    return {"schema_version": "1.1", "metrics_phase": "profiling", "summary": {}, "metrics": metrics}


def test_of_the_real_file_24_of_28_lines_are_the_measurement() -> None:
    run = import_files([sample("aiperf/profile_export.jsonl")])
    (level,) = run.levels
    summary = summarize(level)
    assert summary.requests == 24
    assert any("4 warm-up lines were left out" in note for note in level.notes)
    assert summary.ttft.mean * 1000 == pytest.approx(59.747, abs=0.001)
    assert summary.tpot.mean * 1000 == pytest.approx(10.349, abs=0.001)
    assert level.workload.arrivals == ClosedLoop(4)
    assert run.server["kv_tokens"] == 16000
    assert run.server["num_gpu_blocks"] == 1000
    assert level.tokens is not None


def test_the_real_summary_and_the_real_requests_agree() -> None:
    summary = summarize(import_files([sample("aiperf/profile_export.jsonl")]).levels[0]).flat()
    for figure in import_aggregates([sample("aiperf/profile_export_aiperf.json")]):
        assert figure.value == pytest.approx(summary[figure.metric], rel=0.001), figure.metric


def test_prompts_are_counted_as_the_server_counts_them(tmp_path: Path) -> None:
    level = import_files([write(tmp_path, "r.jsonl", aiperf_line(0), aiperf_line(80))]).levels[0]
    assert level.requests["prompt_tokens"].tolist() == [108, 108]


def test_without_usage_the_clients_count_is_taken_and_said(tmp_path: Path) -> None:
    line = aiperf_line(0)
    del line["metrics"]["usage_prompt_tokens"], line["metrics"]["usage_completion_tokens"]
    level = import_files([write(tmp_path, "r.jsonl", line)]).levels[0]
    assert level.requests["prompt_tokens"].tolist() == [100]
    assert any("client tokenizer" in note for note in level.notes)


def test_errors_and_cancelled_requests_are_rows(tmp_path: Path) -> None:
    failed = aiperf_line(10, metrics={}, error={"code": 503, "type": "ServerError", "message": "full"})
    cut = aiperf_line(20)
    cut["metadata"]["was_cancelled"] = True
    level = import_files([write(tmp_path, "r.jsonl", aiperf_line(0), failed, cut)]).levels[0]
    assert level.requests["error"].tolist() == ["", "http 503", "cancelled"]


def test_the_server_tells_its_pool_its_gauges_and_its_means(tmp_path: Path) -> None:
    write(tmp_path, "server_metrics_export.json", server_metrics())
    run = import_files([write(tmp_path, "profile_export.jsonl", aiperf_line(0), aiperf_line(80))])
    (level,) = run.levels
    assert run.server["kv_tokens"] == 16000
    assert level.server_means == {"queue_time": pytest.approx(0.02)}
    assert level.timeline["running"].unique().tolist() == [2]
    assert level.timeline["kv_tokens"].to_numpy() == pytest.approx(1600.0)
    assert any("2 preemptions" in note for note in level.notes)


def test_without_the_summary_the_load_is_told_from_the_sending_times(tmp_path: Path) -> None:
    lines = [aiperf_line(81 * number) for number in range(12)]
    level = import_files([write(tmp_path, "r.jsonl", *lines)]).levels[0]
    assert level.workload.arrivals == ClosedLoop(1)
    assert any("told from the sending times" in note for note in level.notes)


def test_a_file_of_warm_up_alone_is_no_measurement(tmp_path: Path) -> None:
    with pytest.raises(ImportFileError, match="warm-up lines only"):
        import_files([write(tmp_path, "r.jsonl", aiperf_line(0, phase="warmup"))])


def test_server_metrics_alone_are_sent_back_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ImportFileError, match=r"give profile_export\.jsonl"):
        import_files([write(tmp_path, "s.json", server_metrics())])
