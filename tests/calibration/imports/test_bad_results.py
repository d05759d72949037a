"""Result files that are broken, hostile or nonsense are refused in one line, and what they do not break is kept."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import yaml
from result_files import aiperf_line, guidellm_timings, guidellm_v2, inference_perf_request, sglang, vllm_bench, write

from calibration.imports import ImportFileError, import_files, import_stated, load_stated, save_stated, source
from calibration.imports.records import Record, level_from_records, sent_in_closed_loop
from calibration.imports.source import read_source
from simulator.loads.workload import ClosedLoop
from simulator.results.summary import summarize

GOOD = json.dumps(vllm_bench())
BOMB = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{name}'] * 8)}]\n" for name, after in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{after}: &{after} {{<<: [{', '.join([f'*{name}'] * 9)}]}}\n"
    for name, after in zip("abcdefgh", "bcdefghi", strict=True)
)
CONCURRENT = {"type_": "concurrent", "streams": 2}


def refused(path: Path) -> str:
    with pytest.raises(ImportFileError) as caught:
        import_files([path])
    said = str(caught.value)
    assert said.isprintable()
    assert len(said) < 500
    return said


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"\0" * 100, "neither JSON nor YAML"),
        (GOOD.encode("utf-16"), "not a text file in UTF-8"),
        ('{"model": "Größe"}'.encode("latin-1"), "not a text file in UTF-8"),
        (b"\x7fELF\x02\x01\x01\0\xff", "not a text file in UTF-8"),
        (b"\xef\xbb\xbf\r\n ", "empty"),
        (GOOD.replace("0.16", "9" * 5000).encode(), "a number with thousands of digits"),
        (GOOD.replace('"duration"', '"duration": 1, "duration"').encode(), "an object has 'duration' twice"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"a: " + b"[" * 1_000, "nested too deeply|neither JSON nor YAML"),
        (BOMB.encode(), "aliases stand for more than 1,000,000 values"),
        (MERGES.encode(), "neither JSON nor YAML"),
        (b"a: &a [*a]\n", "aliases stand for more"),
        (b"a: !!python/object/apply:os.system ['true']\n", "neither JSON nor YAML"),
        (b"a: !!timestamp noon\nb: !!int ''\n", "neither JSON nor YAML"),
        (b'{"summary": []}', "no result file"),
        (b'{"version": "0.2", "results": 3}', "no result file"),
        (b"\x1b]0;title\x07", "neither JSON nor YAML|no result file"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(content)
    assert re.search(what, refused(path))


def test_a_byte_order_mark_and_windows_line_ends_change_nothing(tmp_path: Path) -> None:
    text = json.dumps(vllm_bench(), indent=1)
    plain, marked = tmp_path / "a.json", tmp_path / "b.json"
    plain.write_text(text)
    marked.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    (one,), (other,) = import_files([plain]).levels, import_files([marked]).levels
    assert one.requests.equals(other.requests)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"input_lens": [10**12] * 3}, "whole number up to 10,000,000"),
        ({"output_lens": [10**40] * 3}, "not negative"),
        ({"ttfts": [1e308] * 3}, "finite number"),
        ({"ttfts": [float("nan")] * 3}, "finite number"),
        ({"ttfts": [float("inf")] * 3}, "finite number"),
        ({"ttfts": [-0.1] * 3}, "not negative"),
        ({"ttfts": [0.2] * 3}, "times of request 1 contradict each other"),
        ({"latencies": [0.001] * 3}, "times of request 1 contradict each other"),
        ({"itls": [[1e7] * 3] * 3, "latencies": [3e7 + 0.05] * 3}, "in what unit are its times"),
        ({"start_times": [1.0, 1.0, 1e12]}, "in what unit are its times"),
        ({"max_concurrency": None, "request_rate": 1e-300}, "'request_rate' must be between"),
        ({"max_concurrency": None, "request_rate": 2.0, "burstiness": 1e-300}, "'burstiness' must be between"),
        ({"model_id": ["m"] * 1000, "ttfts": [["x" * 10_000]] * 3}, "must be a number, got a list"),
    ],
)
def test_nonsense_is_refused(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    path = write(tmp_path, "r.json", vllm_bench(**changes))
    assert re.search(what, refused(path))


def test_a_guidellm_request_that_ends_before_it_begins_is_refused(tmp_path: Path) -> None:
    timings = guidellm_timings(100.0) | {"last_token_iteration": 50.0}
    request = {"info": {"timings": timings}, "prompt_tokens": 500, "output_tokens": 128}
    report = guidellm_v2({"successful": [request]}, 1, CONCURRENT)
    assert "times of request 1 contradict" in refused(write(tmp_path, "g.json", report))


def test_a_moment_that_is_none_leaves_the_start_untold(tmp_path: Path) -> None:
    request = {"info": {"timings": guidellm_timings(1.7e9)}, "prompt_tokens": 500, "output_tokens": 128}
    report = guidellm_v2({"successful": [request]}, 1, CONCURRENT)
    report["benchmarks"][0]["start_time"] = 1e18
    assert import_files([write(tmp_path, "g.json", report)]).started_at == ""


def test_what_a_file_names_is_kept_on_one_printable_line(tmp_path: Path) -> None:
    error = "Traceback\nValueError \x1b[31m\ud800 red: x"
    good = vllm_bench(model_id="a\nb\ud800\x07" + "c" * 1000, errors=[error, "", ""], label="\u202etxet", note="²")
    run = import_files([write(tmp_path, "r.json", good | {"max_num_seqs": "²"})])
    told = [*run.levels[0].notes, run.levels[0].requests["error"][0], str(run.server["model"])]
    assert all(text.isprintable() and len(text) < 500 for text in told)
    assert run.server["metadata"] == {"note": "²", "max_num_seqs": "²"}
    json.dumps(run.server, allow_nan=False).encode()


def test_an_error_of_blanks_is_an_error(tmp_path: Path) -> None:
    (level,) = import_files([write(tmp_path, "r.json", vllm_bench(errors=["", " \n", ""]))]).levels
    assert level.requests["error"].tolist() == ["", "error", ""]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"duration": 0}, "a level of 0 s cannot be"),
        ({"duration": 1e-300}, "a level of 0 s cannot be"),
        ({"itls": [[1e18] * 3] * 3}, "in what unit are its times"),
    ],
)
def test_a_level_of_no_time_or_of_years_is_refused(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    """Where a file does not tell when requests were sent, too."""
    path = write(tmp_path, "s.jsonl", sglang(max_concurrency=None, request_rate=3.0, **changes))
    with pytest.raises(ImportFileError, match=what):
        import_files([path])


def test_a_servers_numbers_that_cannot_be_are_left_out(tmp_path: Path) -> None:
    info = {"max_total_num_tokens": -5, "mem_fraction_static": float("nan"), "tp_size": 2}
    server = import_files([write(tmp_path, "s.jsonl", sglang(server_info=info))]).server
    assert "kv_tokens" not in server
    assert server["server_info"] == {"tp_size": 2}


def test_gauges_that_cannot_be_are_refused(tmp_path: Path) -> None:
    moment = 1_700_000_000_000_000_000
    part = {"start_ns": moment, "end_ns": moment + 100_000_000, "avg": 1e18}
    metrics = {"vllm:num_requests_running": {"series": [{"timeslices": [part]}]}}
    write(tmp_path, "server_metrics_export.json", {"metrics_phase": "profiling", "metrics": metrics})
    said = refused(write(tmp_path, "profile_export.jsonl", aiperf_line(0)))
    assert "of vllm:num_requests_running must be at most 10,000,000" in said


def test_a_report_with_a_huge_number_of_clients_is_refused(tmp_path: Path) -> None:
    requests = {"total": 10, "input_length": {"mean": 100}, "output_length": {"mean": 20}}
    aggregate = {"requests": requests, "latency": {}, "throughput": {}}
    report = {
        "version": "0.2",
        "scenario": {"load": {"standardized": {"concurrency": 10**400}}},
        "results": {"request_performance": {"aggregate": aggregate}},
    }
    with pytest.raises(ImportFileError, match="not negative"):
        import_stated([write(tmp_path, "r.json", report)])


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"total_input_tokens": 1e18}, "cannot be; up to 10,000,000 can"),
        ({"total_output_tokens": 0}, "requests of 0 .* cannot be"),
        ({"mean_ttft_ms": 1e-300, "std_ttft_ms": 1e18}, "mean_ttft cannot be"),
    ],
)
def test_stated_nonsense_is_refused(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ImportFileError, match=what):
        import_stated([write(tmp_path, "r.json", vllm_bench(**changes))])


@pytest.mark.parametrize(
    ("figure", "what"),
    [
        ({"metric": "p12_ttft"}, "not a figure that capsim knows"),
        ({"value": 0}, "'value' must not be 0"),
        ({"uncertainty": -1}, "'uncertainty' must be a finite number"),
        (None, "figures of no level"),
    ],
)
def test_kept_figures_that_were_changed_are_refused(
    tmp_path: Path, figure: dict[str, object] | None, what: str
) -> None:
    path = tmp_path / "figures.json"
    save_stated(import_stated([write(tmp_path, "r.json", vllm_bench())]), path)
    content = json.loads(path.read_text())
    if figure is None:
        content["levels"] = []
    else:
        content["levels"][0]["figures"][0] |= figure
    path.write_text(json.dumps(content))
    with pytest.raises(ImportFileError, match=what):
        load_stated(path)


def test_dates_in_yaml_are_texts_and_small_aliases_are_followed(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("when: 2026-01-01\nload: &load {rate: 2}\nagain: *load\n")
    assert read_source(path).first == {"when": "2026-01-01", "load": {"rate": 2}, "again": {"rate": 2}}
    path.write_text(yaml.safe_dump({"x": [1, 2.5, None, True, "1e3"]}))
    assert read_source(path).first == {"x": [1, 2.5, None, True, "1e3"]}


def test_values_that_would_fill_the_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    path.write_text("[" + "[]," * 100_000 + "[]]")
    assert "no result file" in refused(path)
    monkeypatch.setattr(source, "MOST_MEMORY", 1 << 20)
    assert "its values may take" in refused(path)


def test_millions_of_tokens_without_times_take_little_memory() -> None:
    records = [Record(10, 10_000_000, float(number), 0.1, 1.0) for number in range(100)]  # 16 GB, one row a token
    tracemalloc.start()
    level = level_from_records(records, ClosedLoop(1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 500e6
    assert summarize(level).peak_active_tokens == pytest.approx(10_000_010, rel=0.01)


def test_more_clients_than_requests_all_send_at_once() -> None:
    assert sent_in_closed_loop([1.0, 1.0, 1.0], 10_000_000, 1.0) == [0.0, 0.0, 0.0]
    assert sent_in_closed_loop([1.0, 2.0, 1.0, 1.0], 2, 3.0) == [0.0, 0.0, 1.0, 2.0]


def test_a_server_in_error_may_send_anything_as_an_error(tmp_path: Path) -> None:
    for error in (["x"] * 3, {"error_type": {"a": 1}}, "\n\n", 7):
        failed = inference_perf_request(0.1, error=error)
        (level,) = import_files([write(tmp_path, "p.json", [inference_perf_request(0.0), failed])]).levels
        assert summarize(level).errors == 1


@pytest.mark.slow
def test_long_lines_are_read_where_they_hold_results(tmp_path: Path) -> None:
    long = vllm_bench(
        input_lens=[100], output_lens=[1_000_001], ttfts=[0.05], itls=[[1e-5] * 1_000_000], errors=[""],
        latencies=[10.05], start_times=[0.0], num_prompts=1, completed=1, duration=10.05,
    )  # fmt: skip
    (level,) = import_files([write(tmp_path, "long.json", long)]).levels
    assert summarize(level).output_throughput == pytest.approx(1_000_001 / 10.05)
    path = tmp_path / "longer.json"
    path.write_bytes(b'{"a": "' + b"x" * 100_000_000 + b'"}')
    assert "no result file" in refused(path)
