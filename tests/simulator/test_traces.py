"""Recorded traffic is read by header, played as recorded or otherwise, and faults are told with their line."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import StepTime
from simulator.loads.arrivals import ClosedLoop, OpenLoop, ThinkTime
from simulator.loads.trace import HashIds, Trace, TraceError
from simulator.loads.trace_files import read_trace
from simulator.loads.workload import Length, Shape, Workload
from simulator.results.run import Run
from simulator.results.run_files import save_run

STEP = StepTime(0.01, 1e-5, 1e-8, 2e-5)
FLAGS = EngineFlags(max_num_seqs=64, num_gpu_blocks=4000, max_model_len=131_072)
CACHING = FLAGS.changed(enable_prefix_caching=True)

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:03.9999600,110,27
2023-11-16 18:17:05.0000000,110,0
"""
BURSTGPT = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,1,0.3,ChatGPT,472,18,490,Conversation log
45,2,0.4,GPT-4,1087,230,1317,API log
118,3,0.1,ChatGPT,417,0,417,API log
118.5,3,0.1,ChatGPT,417,276,693,API log
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 1300, "output_length": 20, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1500, "output_length": 10, "hash_ids": [0, 1, 3]},
    {"timestamp": 6000, "input_length": 600, "output_length": 10, "hash_ids": [4, 5]},
]
BAILIAN = [
    {"chat_id": 1, "timestamp": 61.1, "input_length": 40, "output_length": 132, "turn": 1, "hash_ids": [7, 8, 9]},
    {"chat_id": 2, "timestamp": 61.6, "input_length": 33, "output_length": 5, "turn": 2, "hash_ids": [7, 8, 11]},
]
CUSTOM = [{"prompt": "x" * 400, "output_tokens": 30}, {"prompt": "y" * 40}]


def write(path: Path, content: str | list[dict[str, object]]) -> Path:
    text = content if isinstance(content, str) else "".join(json.dumps(line) + "\n" for line in content)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_azure(tmp_path: Path, name: str) -> None:
    trace = read_trace(write(tmp_path / name, AZURE))
    assert trace.times == pytest.approx([0, 0.02, 0.052])
    assert trace.prompt_tokens.tolist() == [4808, 110, 3180]
    assert trace.generated_tokens.tolist() == [10, 27, 8]
    assert (trace.name, trace.num_prompts) == ("a", 3)


@pytest.mark.parametrize("order", [None, ["Model", "Total tokens", "Response tokens", "Timestamp", "Request tokens"]])
def test_burstgpt_by_header_name(tmp_path: Path, order: list[str] | None) -> None:
    path = write(tmp_path / "b.csv", BURSTGPT)
    if order:
        pd.read_csv(path)[order].to_csv(path, index=False)
    trace = read_trace(path)
    assert trace.times == pytest.approx([0, 40, 113.5])  # what failed is left out
    assert trace.prompt_tokens.tolist() == [472, 1087, 417]
    assert trace.generated_tokens.tolist() == [18, 230, 276]


def test_mooncake_and_bailian_are_told_by_their_blocks(tmp_path: Path) -> None:
    mooncake = read_trace(write(tmp_path / "m.jsonl", MOONCAKE))
    assert mooncake.times == pytest.approx([0, 3, 6])
    assert mooncake.hash_ids is not None
    assert mooncake.hash_ids.block_size == 512
    bailian = read_trace(write(tmp_path / "q.jsonl", BAILIAN))
    assert bailian.times == pytest.approx([0, 0.5])
    assert bailian.hash_ids is not None
    assert bailian.hash_ids.block_size == 16


def test_lines_without_ids_need_the_name_of_their_format(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [{**row, "hash_ids": []} for row in MOONCAKE])
    with pytest.raises(TraceError, match=r"name the format, mooncake \(milliseconds"):
        read_trace(path)
    assert read_trace(path, "mooncake").times == pytest.approx([0, 3, 6])
    assert read_trace(path, "timed").times == pytest.approx([0, 3000, 6000])
    assert read_trace(path, "timed").hash_ids is None


def test_a_custom_dataset_has_lengths_and_needs_arrivals(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "c.jsonl", CUSTOM))
    assert trace.prompt_tokens.tolist() == [100, 10]
    assert trace.generated_tokens.tolist() == [30, 256]
    assert "estimated" in trace.name
    with pytest.raises(TraceError, match="give concurrency or request_rate"):
        trace.arrival_times()
    assert len(simulate_level(trace.sent_by(ClosedLoop(1)), FLAGS, STEP).requests) == 2


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        (AZURE.replace("3180", "many"), 3, "ContextTokens is 'many', not a whole number of tokens"),
        (AZURE.replace("4808", "4.5"), 2, "ContextTokens is '4.5', not a whole number"),
        (AZURE.replace("2023-11-16 18:17:04.0319600", "noon"), 3, "TIMESTAMP is 'noon', not a date and time"),
        (BURSTGPT.replace("\n45,", "\n,"), 3, "Timestamp is '', not a number"),
        (AZURE.replace("ContextTokens", "Context"), 1, "a trace has TIMESTAMP, ContextTokens, GeneratedTokens (azure)"),
        ([*MOONCAKE, {"timestamp": 1}], 4, "has no 'input_length'"),
        ([*MOONCAKE, {**MOONCAKE[0], "output_length": 1.5}], 4, "output_length is 1.5, not a whole number"),
        ([*MOONCAKE, {**MOONCAKE[0], "timestamp": "x"}], 4, "timestamp is 'x', not a number"),
        ([*MOONCAKE, {**MOONCAKE[0], "hash_ids": [-1]}], 4, "hash_ids must be a list of whole numbers"),
        ('{"timestamp": 0\n', 1, "not JSON"),
        ('{"timestamp": 0}\n[1]\n', 1, "has no 'input_length'"),
        ([*CUSTOM, {"text": "x"}], 3, "no text under 'prompt'"),
    ],
)
def test_a_fault_is_told_with_its_line(
    tmp_path: Path, content: str | list[dict[str, object]], line: int, words: str
) -> None:
    path = write(tmp_path / "t", content)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert words in str(caught.value)


def test_the_line_is_right_far_down_a_long_file(tmp_path: Path) -> None:
    rows = ["timestamp,input_length,output_length", *(f"{number},10,5" for number in range(250_000))]
    rows[200_123] = "200122,ten,5"
    with pytest.raises(TraceError, match="line 200124: input_length is 'ten'"):
        read_trace(write(tmp_path / "long.csv", "\n".join(rows) + "\n"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder / "none.csv", "no such file"),
        (lambda folder: write(folder / "e.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n"), "holds no request"),
        (lambda folder: write(folder / "e.csv", ""), "has the columns"),
        (lambda folder: write(folder / "e.csv", AZURE).rename(folder / "e.csv.gz"), "damaged"),
        (lambda folder: folder, "not a saved run"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, make: object, words: str) -> None:
    with pytest.raises(TraceError, match=words):
        read_trace(make(tmp_path))  # type: ignore[operator]


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="known are azure, burstgpt, run, csv, mooncake, timed, custom"):
        read_trace(tmp_path, "sharegpt")


@pytest.mark.slow
def test_a_long_trace_is_read_a_part_at_a_time(tmp_path: Path) -> None:
    """Python objects for a row take some 200 bytes; the arrays take 24, and twice that while they are sorted."""
    rows = 200_000
    path = tmp_path / "long.csv"
    with path.open("w") as file:
        file.write("timestamp,input_length,output_length\n")
        file.writelines(f"{number / 10},{1000 + number % 7},{50 + number % 3}\n" for number in range(rows))
    small = write(tmp_path / "small.csv", "\n".join(path.read_text().split("\n")[:100_001]) + "\n")
    read_trace(small)  # what pandas allocates once
    peaks = []
    for file in (small, path):
        tracemalloc.start()
        read_trace(file)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (peaks[1] - peaks[0]) / (rows - 100_000) < 120


# --- playing


def recorded() -> Trace:
    return Trace("rec", np.array([0.0, 1.0, 1.0, 4.0]), np.array([10, 20, 30, 40]), np.array([5, 6, 7, 8]))


def test_is_played_as_recorded_faster_or_at_a_rate() -> None:
    arrivals = simulate_level(recorded(), FLAGS, STEP).requests["arrival"]
    assert arrivals.tolist() == [0, 1, 1, 4]
    assert recorded().faster(2).arrival_times().tolist() == [0, 0.5, 0.5, 2]  # type: ignore[union-attr]
    assert recorded().request_rate == 1.0
    assert recorded().at_rate(4).arrival_times().tolist() == [0, 0.25, 0.25, 1]  # type: ignore[union-attr]


def test_is_cut_by_count_or_by_time() -> None:
    assert recorded().first(2).prompt_tokens.tolist() == [10, 20]
    assert recorded().first(seconds=2.0).prompt_tokens.tolist() == [10, 20, 30]
    assert recorded().first(9) == recorded()


def test_clients_or_another_rate_may_send_it() -> None:
    closed = simulate_level(recorded().sent_by(ClosedLoop(1, think_time=ThinkTime(1.0))), FLAGS, STEP).requests
    assert (closed["arrival"].diff()[1:] > 1).all()
    assert closed["prompt_tokens"].tolist() == [10, 20, 30, 40]
    drawn = recorded().sent_by(OpenLoop(2.0))
    assert drawn.arrival_times()[-1] == pytest.approx(2.0)  # type: ignore[index]
    assert (drawn.label, drawn.lengths_label) == ("2/s", "~25/~6")


def test_traces_are_equal_by_their_content() -> None:
    assert recorded() == recorded()
    assert hash(recorded()) == hash(recorded())
    assert recorded() != recorded().faster(2)
    assert recorded().first(2) != recorded().first(3)


def test_a_measured_run_is_a_trace(tmp_path: Path) -> None:
    load = Workload(ClosedLoop(3), (Shape(Length(10, 500), Length(2, 30)),), 20)
    level = simulate_level(load, FLAGS, STEP)
    level.requests.loc[5, "error"] = "timeout"
    save_run(Run("measured", [level]), tmp_path / "run")
    trace = read_trace(tmp_path / "run")
    kept = level.requests[level.requests["error"] == ""].sort_values("arrival", kind="stable")
    assert trace.times == pytest.approx(kept["arrival"].to_numpy() - kept["arrival"].min())
    assert trace.prompt_tokens.tolist() == kept["prompt_tokens"].tolist()
    assert read_trace(tmp_path / "run/levels/000") == trace
    assert simulate_level(trace, FLAGS, STEP).requests["arrival"].to_numpy() == pytest.approx(trace.times)
    save_run(Run("measured", [level, level]), tmp_path / "run", overwrite=True)
    with pytest.raises(TraceError, match=r"has 2 levels; name one of them, such as .*levels/000"):
        read_trace(tmp_path / "run")


# --- prefixes


def test_hashed_blocks_are_found_again_as_one_counts_by_hand(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "m.jsonl", MOONCAKE))
    level = simulate_level(trace, CACHING, STEP)
    assert level.cached_tokens == 1024  # ids 0 and 1 of the second request; nothing else is shared
    assert simulate_level(trace, FLAGS, STEP).cached_tokens == 0


@pytest.mark.parametrize("block_size", [16, 48, 512, 1024])
def test_a_kv_block_is_shared_iff_the_hashed_block_at_its_end_is(block_size: int) -> None:
    ids = HashIds(np.array([0, 1, 2, 0, 1, 3]), np.array([3, 6]), 512)
    one, other = ids.prefix(0, 1536, block_size), ids.prefix(1, 1536, block_size)
    shared = [(place + 1) * block_size <= 1024 for place in range(1536 // block_size)]
    assert [a == b for a, b in zip(one, other, strict=True)] == shared
    assert len(set(one)) == len(one)


def test_only_full_blocks_of_the_prompt_have_content() -> None:
    ids = HashIds(np.array([0, 1]), np.array([2]), 512)
    assert len(ids.prefix(0, 600, 16)) == 600 // 16
    assert len(HashIds(np.array([0]), np.array([1]), 512).prefix(0, 600, 16)) == 512 // 16


def test_ids_follow_their_requests_when_lines_are_out_of_order(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "m.jsonl", MOONCAKE[::-1]))
    assert trace.hash_ids is not None
    assert [trace.hash_ids.of(number).tolist() for number in range(3)] == [[0, 1, 2], [0, 1, 3], [4, 5]]
    cut = trace.first(2).hash_ids
    assert cut is not None
    assert cut.ids.tolist() == [0, 1, 2, 0, 1, 3]


# --- real files


SAMPLES = Path(__file__).parents[3] / "shared" / "traces"
needs_samples = pytest.mark.skipif(not SAMPLES.is_dir(), reason="the sample traces are not here")


@needs_samples
def test_the_azure_traces_of_2023() -> None:
    code, conversation = (read_trace(SAMPLES / f"azure2023_{name}.csv.gz") for name in ("code", "conv"))
    assert conversation.num_prompts == 19_366
    assert conversation.times is not None
    assert 3400 < conversation.times[-1] < 3600
    assert conversation.prompt_tokens.mean() == pytest.approx(1155, abs=1)  # as its paper states
    assert conversation.generated_tokens.mean() == pytest.approx(211, abs=1)
    assert code.generated_tokens.mean() == pytest.approx(28, abs=1)


@needs_samples
def test_the_mooncake_trace_by_its_columns() -> None:
    trace = read_trace(SAMPLES / "mooncake_conversation.csv.gz")
    assert trace.num_prompts == 12_031
    assert trace.prompt_tokens.mean() == pytest.approx(12_035, rel=0.01)
    blocks = pd.read_csv(SAMPLES / "mooncake_conversation.csv.gz")["n_hash_blocks_512"].to_numpy()
    assert (blocks == -(-trace.prompt_tokens // 512)).all()  # so prompts tell the size of their blocks
