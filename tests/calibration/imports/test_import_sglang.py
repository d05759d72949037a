"""Lines of SGLang's bench_serving: no sending times, no latencies, and an infinite rate."""

from __future__ import annotations

from pathlib import Path

import pytest
from result_files import sglang, write

from calibration.imports import ImportFileError, NoRequestsError, import_aggregates, import_files
from simulator.loads.workload import ClosedLoop, OpenLoop
from simulator.results.summary import summarize

DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors")


def test_sending_times_of_a_closed_loop_are_rebuilt_and_do_not_show_steps(tmp_path: Path) -> None:
    run = import_files([write(tmp_path, "r.jsonl", sglang())])
    (level,) = run.levels
    assert level.workload.arrivals == ClosedLoop(2)  # the rate was Infinity
    assert level.requests["arrival"].tolist() == pytest.approx([0.0, 0.0, 0.08])
    assert summarize(level).mean_concurrency == pytest.approx(1.5)
    assert summarize(level).tpot.mean == pytest.approx(0.01)
    assert level.tokens is None
    assert run.server["kv_tokens"] == 5000


def test_times_that_would_not_fill_the_duration_are_not_invented(tmp_path: Path) -> None:
    level = import_files([write(tmp_path, "r.jsonl", sglang(duration=0.5))]).levels[0]
    assert level.requests["arrival"].isna().all()
    assert level.duration == 0.5


def test_each_line_is_a_level(tmp_path: Path) -> None:
    path = write(tmp_path, "r.jsonl", sglang(), sglang(request_rate=4.0, max_concurrency=None))
    assert [level.workload.arrivals for level in import_files([path]).levels] == [ClosedLoop(2), OpenLoop(4.0)]


def test_without_details_there_are_figures_only(tmp_path: Path) -> None:
    path = write(tmp_path, "r.jsonl", sglang(**dict.fromkeys(DETAILS, "absent")))
    with pytest.raises(NoRequestsError, match="--output-details"):
        import_files([path])
    figures = {figure.metric: figure.value for figure in import_aggregates([path])}
    assert figures["p50_e2el"] == pytest.approx(0.08)
    assert figures["mean_concurrency"] == 1.5


def test_a_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImportFileError, match="recorded arrivals are not in the file"):
        import_files([write(tmp_path, "r.jsonl", sglang(request_rate="trace"))])
