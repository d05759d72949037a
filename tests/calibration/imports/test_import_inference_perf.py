"""inference-perf's lifecycle files, and the Benchmark Reports that it and others write."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from result_files import inference_perf_request, sample, write

from calibration.imports import ImportFileError, NoRequestsError, import_aggregates, import_files, import_stated
from simulator.loads.workload import ClosedLoop, OpenLoop
from simulator.results.summary import summarize


def report(tool: str, **load: object) -> dict:
    def told(value: float, units: str) -> dict:
        return {"units": units, "mean": value, "p50": value, "p90": value, "p99": value}

    aggregate = {
        "requests": {
            "total": 10,
            "failures": 1,
            "input_length": told(100, "count"),
            "output_length": told(20, "count"),
        },
        "latency": {
            "time_to_first_token": told(50, "ms"),
            "time_per_output_token": told(0.0177, "s/token"),
            "inter_token_latency": told(10, "ms/token"),
            "request_latency": told(0.24, "s"),
        },
        "throughput": {"output_token_rate": told(200, "tokens/s"), "request_rate": told(10, "queries/s")},
    }
    return {
        "version": "0.2",
        "scenario": {"load": {"standardized": {"tool": tool, **load}}},
        "results": {"request_performance": {"aggregate": aggregate}},
    }


def test_the_real_requests_are_counted_by_the_server_and_not_by_the_client() -> None:
    """12 of the 20 answers had one token more than the client's tokenizer saw; the file's own TPOT is 9.224 ms."""
    (level,) = import_files([sample("infperf/per_request_lifecycle_metrics.json")]).levels
    summary = summarize(level)
    assert summary.tpot.mean * 1000 == pytest.approx(8.846, abs=0.001)
    assert summary.itl.mean == pytest.approx(summary.tpot.mean, rel=1e-3)
    assert level.requests["output_tokens"].sum() == 367
    assert level.workload.arrivals == ClosedLoop(4)  # from config.yaml beside
    assert level.tokens is not None


def test_the_real_stage_file_does_not_pass_on_its_tpot() -> None:
    (level,) = import_stated([sample("infperf/stage_0_lifecycle_metrics.json")])
    assert level.value("mean_tpot") is None
    assert level.value("mean_itl") == pytest.approx(0.0088458, rel=1e-4)
    assert any("TPOT left out" in note for note in level.notes)


def test_the_real_report_of_a_stage_gives_the_same_figures_as_its_json() -> None:
    theirs = {
        figure.metric: figure.value for figure in import_aggregates([sample("infperf/stage_0_lifecycle_metrics.json")])
    }
    for figure in import_aggregates([sample("infperf/inference-perf.partial.stage_0.yaml")]):
        assert figure.value == pytest.approx(theirs[figure.metric], rel=1e-6)


def test_stages_beside_the_requests_are_levels(tmp_path: Path) -> None:
    for number, rate in enumerate((2.0, 4.0)):
        load = {"count": 2, "requested_rate": rate}
        write(
            tmp_path, f"stage_{number}_lifecycle_metrics.json", {"load_summary": load, "successes": {}, "failures": {}}
        )
    requests = [inference_perf_request(start) for start in (0.0, 0.5, 3.0, 3.25)]
    run = import_files([write(tmp_path, "per_request.json", requests)])
    assert [level.workload.arrivals for level in run.levels] == [
        OpenLoop(2.0, float("inf")),
        OpenLoop(4.0, float("inf")),
    ]
    assert [len(level.requests) for level in run.levels] == [2, 2]


def test_a_failed_request_is_a_row(tmp_path: Path) -> None:
    failed = inference_perf_request(0.1, error={"error_type": "ClientError", "error_msg": "gone"})
    (level,) = import_files([write(tmp_path, "p.json", [inference_perf_request(0.0), failed])]).levels
    assert level.requests["error"].tolist() == ["", "ClientError"]


def test_a_benchmark_report_keeps_guidellms_inter_token_latency_as_tpot(tmp_path: Path) -> None:
    path = tmp_path / "report.yaml"
    path.write_text(yaml.safe_dump(report("guidellm", concurrency=4)))
    with pytest.raises(NoRequestsError):
        import_files([path])
    (level,) = import_stated([path])
    assert level.workload.arrivals == ClosedLoop(4)
    assert level.value("p90_tpot") == pytest.approx(0.010)
    assert level.value("mean_itl") is None
    assert level.value("mean_ttft") == pytest.approx(0.05)
    assert level.value("mean_concurrency") == pytest.approx(2.4)
    assert any("1 of 10 requests failed" in note for note in level.notes)


def test_a_report_of_schema_0_1_has_flat_rates_and_the_tools_own_arguments(tmp_path: Path) -> None:
    new = report("vllm-benchmark")["results"]["request_performance"]["aggregate"]
    old = {
        "version": "0.1",
        "scenario": {"model": {"name": "m"}, "load": {"name": "vllm-benchmark", "args": {"request_rate": 3.0}}},
        "metrics": new | {"throughput": {"requests_per_sec": 10.0, "output_tokens_per_sec": 200.0}},
    }
    path = tmp_path / "report.yaml"
    path.write_text(yaml.safe_dump(old))
    (level,) = import_stated([path])
    assert level.workload.arrivals == OpenLoop(3.0)
    assert level.value("mean_tpot") == pytest.approx(0.0177)
    assert level.value("output_throughput") == 200.0
    assert level.server["model"] == "m"


def test_a_report_that_does_not_tell_its_load_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.yaml"
    path.write_text(yaml.safe_dump(report("vllm-benchmark")))
    with pytest.raises(ImportFileError, match="does not tell the load"):
        import_stated([path])


def test_a_unit_that_is_not_known_is_told(tmp_path: Path) -> None:
    content = report("vllm-benchmark", concurrency=4)
    content["results"]["request_performance"]["aggregate"]["latency"]["request_latency"]["units"] = "fortnights"
    path = tmp_path / "report.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ImportFileError, match="'units' is 'fortnights', not one of ms, s"):
        import_stated([path])
