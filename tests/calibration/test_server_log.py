"""A vLLM log is read in every wording, whatever stands in front of a line."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path

import pytest

from calibration.server_log import ServerLog, ServerLogError, read_server_log

REAL = Path(__file__).with_name("vllm-0.32.0-cpu.log")  # written by a vLLM with a paced executor, then shortened
ADVICE = (  # 0.26 and later
    "Free memory on device (94.05/95.01 GiB) on startup. Desired GPU memory utilization is (0.9, 85.51 GiB). "
    "Actual usage is 56.89 GiB for consumed memory (weights + non-torch), 0.76 GiB for peak activation, and 0.32 GiB "
    "for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=29407858586` (27.39 GiB) to "
    "fit into requested memory, or `--kv-cache-memory=38581581312` (35.93 GiB) to fully utilize gpu memory. "
    "Current kv cache memory in use is 27.85 GiB."
)
MIDDLE_ADVICE = (  # from 0.12 on, and without the GiB in brackets in 0.11
    "Free memory on device (15.89/16.0 GiB) on startup. Desired GPU memory utilization is (0.95, 15.2 GiB). "
    "Actual usage is 0.88 GiB for weight, 0.26 GiB for peak activation, 0.16 GiB for non-torch memory, and 0.24 GiB "
    "for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=14514713805` (13.52 GiB) to "
    "fit into requested memory, or `--kv-cache-memory=15258363904` (14.21 GiB) to fully utilize gpu memory. "
    "Current kv cache memory in use is 13.33 GiB."
)
OLD_ADVICE = (  # 0.10.2 and 0.11
    "Free memory on device (139.21/139.81 GiB) on startup. Desired GPU memory utilization is (0.9, 125.83 GiB). "
    "Actual usage is 74.28 GiB for weight, 5.58 GiB for peak activation, 1.38 GiB for non-torch memory, and 2.37 GiB "
    "for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=45175492096` to fit into "
    "requested memory, or `--kv-cache-memory=59540753920` to fully utilize gpu memory. "
    "Current kv cache memory in use is 47878721024 bytes."
)
ONE_LINE = "{pool} KV cache size: 13,458 tokens, Maximum concurrency for 1,024 tokens per request: 13.14x"  # 0.28
STATUS = (
    "Engine 000: Avg prompt throughput: 1250.3 tokens/s, Avg generation throughput: 892.7 tokens/s, "
    "Running: 45 reqs, Waiting: 12 reqs, {more}GPU KV cache usage: 72.5%, Prefix cache hit rate: 45.2%"
)
ITERATION = (
    "Iteration(7): 2 context requests, 510 context tokens, 3 generation requests, 4 generation tokens, "
    "iteration elapsed time: 56.83 ms"
)


@pytest.fixture
def read(tmp_path: Path):
    def read(*lines: str) -> ServerLog:
        path = tmp_path / "vllm.log"
        path.write_text("\n".join(lines) + "\n")
        return read_server_log(path)

    return read


def info(message: str, process: str = "EngineCore pid=12") -> str:
    return f"({process}) INFO 10-23 15:14:56 [file.py:391] {message}"


def test_the_log_of_a_real_server_is_read() -> None:
    log = read_server_log(REAL)
    assert (log.engine_version, log.model, log.dtype, log.device) == ("0.32.0", "/models/tiny", "bfloat16", "cpu")
    assert (log.max_num_seqs, log.max_num_batched_tokens, log.max_model_len, log.block_size) == (4, 512, 8192, 16)
    assert (log.tensor_parallel_size, log.pipeline_parallel_size, log.data_parallel_size) == (1, 1, 1)
    assert (log.kv_tokens, log.max_concurrency) == (8208, 1.0)
    assert (log.quantization, log.kv_cache_dtype, log.enforce_eager) == (None, "auto", False)
    assert log.enable_prefix_caching
    assert log.enable_chunked_prefill
    assert log.served_names == ("demo",)
    assert log.arguments["enable_logging_iteration_details"] is True
    assert log.notes == ()


def test_the_steps_of_a_real_server_are_read() -> None:
    steps = read_server_log(REAL).iterations
    assert steps["iteration"].tolist() == list(range(10))
    assert steps["context_tokens"].tolist()[:7] == [512, 188, 511, 511, 510, 509, 59]
    assert steps["generation_tokens"].tolist()[6:] == [3, 4, 4, 4]
    assert steps.loc[0, ["time", "elapsed", "kv_usage"]].tolist() == pytest.approx([19, 0.05683, 0.086])
    assert not steps["dummy"].any()


def test_the_status_of_a_real_server_is_read() -> None:
    status = read_server_log(REAL).status
    assert status.loc[0, ["time", "prompt_throughput", "generation_throughput"]].tolist() == [29, 360.0, 20.6]
    assert status.loc[0, ["running", "waiting", "preemptions", "kv_usage", "prefix_hit_rate"]].tolist() == [0] * 5


@pytest.mark.parametrize(
    ("message", "name", "value"),
    [
        ("vLLM API server version 0.11.0", "engine_version", "0.11.0"),
        ("vLLM server version 0.23.1", "engine_version", "0.23.1"),
        (
            " ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.19.2rc1.dev8+g4b7f5ea1a",
            "engine_version",
            "0.19.2rc1.dev8+g4b7f5ea1a",
        ),
        ("Using max model len 65536", "max_model_len", 65536),
        ("Auto-fit max_model_len: reduced from 131072 to 40960 to fit in available", "max_model_len", 40960),
        ("Chunked prefill is enabled with max_num_batched_tokens=8192.", "max_num_batched_tokens", 8192),
        ("Setting max_num_batched_tokens to 2048 for OPENAI_API_SERVER usage.", "max_num_batched_tokens", 2048),
        ("Defaulting max_num_seqs to 1024 for OPENAI_API_SERVER usage context.", "max_num_seqs", 1024),
        ("Setting attention block size to 784 tokens to ensure that", "block_size", 784),
        ("Asynchronous scheduling is enabled.", "async_scheduling", True),
        ("Asynchronous scheduling is disabled.", "async_scheduling", False),
        ("Async scheduling not supported with ngram-based ... and will be disabled.", "async_scheduling", False),
        ("Async scheduling is disabled because the V1 model runner does not", "async_scheduling", False),
        ("GPU KV cache size: 621,392 tokens", "kv_tokens", 621392),
        ("Maximum concurrency for 32,768 tokens per request: 18.96x", "max_concurrency", 18.96),
        ("Maximum concurrency for 32,768 tokens per request: 18.96x", "max_model_len", 32768),
        (ONE_LINE.format(pool="GPU"), "kv_tokens", 13458),
        (ONE_LINE.format(pool="GPU"), "device", None),
        (ONE_LINE.format(pool="XPU"), "device", "xpu"),
        (ONE_LINE.format(pool="CPU"), "device", "cpu"),
        (ONE_LINE.format(pool="GPU + host"), "kv_tokens", 13458),
        (ONE_LINE.format(pool="GPU + host"), "max_concurrency", 13.14),
        ("Available KV cache memory: 8.60 GiB", "kv_memory", 8.6),
        ("Available KV cache memory: -2.86 GiB", "kv_memory", -2.86),
        ("Initial free memory 31.17 GiB, reserved 1.62 GiB memory for KV Cache as specified by", "kv_memory", 1.62),
        ("Auto set (3.72/15.6) GiB for KV cache on node 0, with 4.0 GiB requested memory", "kv_memory", 3.72),
        ("Model loading took 51.1 GiB memory and 41.914650 seconds", "model_memory", 51.1),
        ("Model loading took 14.9927 GiB and 3.1 seconds", "model_memory", 14.9927),
        ("Graph capturing finished in 7 secs, took 0.68 GiB", "graph_memory", 0.68),
    ],
)
def test_a_line_tells(read, message: str, name: str, value: object) -> None:
    assert getattr(read(info(message)), name) == value


def test_the_configuration_of_an_old_engine_is_read(read) -> None:
    config = (
        "Initializing a V1 LLM engine (v0.11.0) with config: model='Qwen/Qwen3-8B-FP8', speculative_config="
        "SpeculativeConfig(method='mtp', model='/models/draft', num_spec_tokens=3), tokenizer='Qwen/Qwen3-8B-FP8', "
        "dtype=torch.float16, max_seq_len=1024, download_dir=None, tensor_parallel_size=2, pipeline_parallel_size=4, "
        "data_parallel_size=8, quantization=fp8, enforce_eager=True, kv_cache_dtype=fp8_e4m3, device_config=cuda, "
        "served_model_name=Qwen, enable_prefix_caching=False, chunked_prefill_enabled=True, pooler_config=None"
    )
    log = read(info(config))
    assert (log.model, log.dtype, log.max_model_len, log.quantization) == ("Qwen/Qwen3-8B-FP8", "float16", 1024, "fp8")
    assert (log.tensor_parallel_size, log.pipeline_parallel_size, log.data_parallel_size) == (2, 4, 8)
    assert (log.kv_cache_dtype, log.device, log.enforce_eager) == ("fp8_e4m3", "cuda", True)
    assert (log.enable_prefix_caching, log.enable_chunked_prefill) == (False, True)


def test_the_advice_on_memory_is_read(read) -> None:
    use = read(info(ADVICE)).memory
    assert use is not None
    assert (use.free, use.total, use.utilization, use.requested) == (94.05, 95.01, 0.9, 85.51)
    assert (use.consumed, use.weights, use.non_torch, use.activation, use.graphs) == (56.89, None, None, 0.76, 0.32)
    assert (use.kv_bytes_requested, use.kv_bytes_full, use.kv_cache) == (29407858586, 38581581312, 27.85)


def test_older_advice_on_memory_is_read(read) -> None:
    use = read(info(MIDDLE_ADVICE)).memory
    assert use is not None
    assert (use.total, use.weights, use.non_torch, use.consumed) == (16.0, 0.88, 0.16, 1.04)
    assert (use.kv_bytes_requested, use.kv_bytes_full, use.kv_cache) == (14514713805, 15258363904, 13.33)
    use = read(info(OLD_ADVICE)).memory
    assert use is not None
    assert (use.total, use.weights, use.non_torch, use.graphs) == (139.81, 74.28, 1.38, 2.37)
    assert (use.kv_bytes_requested, use.kv_bytes_full) == (45175492096, 59540753920)
    assert use.kv_cache == pytest.approx(44.59, abs=0.01)


def test_the_worker_with_the_smallest_pool_counts(read) -> None:
    workers = [info(ADVICE.replace("27.85", "26.5").replace("94.05", "93.0"), "Worker_TP0 pid=7"), info(ADVICE)]
    sizes = [info(f"Available KV cache memory: {size} GiB") for size in (17.79, 17.73)]
    models = [info(f"Model loading took {size} GiB memory and 3.0 seconds") for size in (15.0, 15.5)]
    log = read(*workers, *sizes, *models)
    assert log.memory is not None
    assert (log.memory.kv_cache, log.memory.free) == (26.5, 93.0)
    assert (log.kv_memory, log.model_memory) == (17.73, 15.5)


@pytest.mark.parametrize(
    ("more", "preemptions"),
    [("", 0), ("Preemptions: 3, ", 3), ("Deferred: 2 reqs, KV fetch: 1 waiting to start, Preemptions: 3, ", 3)],
)
def test_status_lines_are_read(read, more: str, preemptions: int) -> None:
    status = read(info(STATUS.format(more=more), "APIServer pid=1")).status
    row = status.iloc[0]
    assert (row["running"], row["waiting"], row["preemptions"]) == (45, 12, preemptions)
    assert (row["kv_usage"], row["prefix_hit_rate"]) == pytest.approx((0.725, 0.452))


def test_a_status_without_prefix_cache_or_of_all_engines_is_read(read) -> None:
    line = STATUS.format(more="").replace("Engine 000", "2 Engines Aggregated").partition(", Prefix")[0]
    external = line.replace("2 Engines Aggregated", "Engine 003") + ", External prefix cache hit rate: 10.0%"
    status = read(info(line), info(external)).status
    assert status["engine"].tolist() == [-1, 3]
    assert status["prefix_hit_rate"].isna().all()


@pytest.mark.parametrize(
    ("line", "engine", "kv_usage", "dummy"),
    [
        (info(ITERATION), 0, math.nan, False),  # until 0.24, written by the engine
        (info(ITERATION, "EngineCore_DP1 pid=9"), 1, math.nan, False),
        (info(f"Engine 002: {ITERATION}, GPU KV cache usage: 8.6%"), 2, 0.086, False),
        (info(f"Engine 001: {ITERATION} (dummy), GPU KV cache usage: 0.0%"), 1, 0.0, True),
        (info(f"Engine 000: {ITERATION}, GPU KV cache usage: 8.6%, encoder inputs: 4, encoder"), 0, 0.086, False),
    ],
)
def test_iterations_are_read(read, line: str, engine: int, kv_usage: float, dummy: bool) -> None:
    row = read(line).iterations.iloc[0]
    assert (row["engine"], row["iteration"], row["dummy"]) == (engine, 7, dummy)
    counts = ("context_requests", "context_tokens", "generation_requests", "generation_tokens")
    assert [row[name] for name in counts] == [2, 510, 3, 4]
    assert row["elapsed"] == pytest.approx(0.05683)
    assert row["kv_usage"] == pytest.approx(kv_usage, nan_ok=True)


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "\x1b[0;36m(APIServer pid=5)\x1b[0;0m \x1b[32mINFO\x1b[0m \x1b[90m04-19 10:18:36\x1b[0m [loggers.py:142] ",
        "Aug 25 19:32:10 host vllm[7222]: (APIServer pid=7222) INFO 08-25 19:32:10 [loggers.py:252] ",
        "2026-04-19T12:18:36.353Z stdout F (APIServer pid=1) INFO 04-19 10:18:36 [utils.py:299] ",
        "vllm-0  | 2026-04-19 12:18:36.353 | (APIServer pid=1) INFO 04-19 10:18:36 [utils.py:299] ",
        "Capturing CUDA graphs: 100%|██████████| 60/60 [00:01<00:00]\rINFO 04-19 10:18:36 [loggers.py:142] ",
    ],
)
def test_whatever_stands_in_front(read, prefix: str) -> None:
    log = read(prefix + STATUS.format(more=""), prefix + "GPU KV cache size: 62,608 tokens")
    assert (len(log.status), log.kv_tokens) == (1, 62608)


def test_lines_of_json_are_read(read) -> None:
    docker = json.dumps({"log": info("GPU KV cache size: 62,608 tokens") + "\n", "stream": "stderr", "time": "2026"})
    arguments = "non-default args: {'model': \"it's\", 'max_num_seqs': 8}"
    vllm = json.dumps({"asctime": "2026-10-23 15:14:57,100", "levelname": "INFO", "message": arguments})
    log = read(docker, json.dumps({"log": info(STATUS.format(more=""))}), vllm)
    assert log.arguments == {"model": "it's", "max_num_seqs": 8}


def test_time_counts_from_the_first_dated_line(read) -> None:
    later = info(ITERATION).replace("15:14:56", "15:15:01")
    log = read(info("Using max model len 1024"), later, ITERATION, later.replace("10-23", "10-99"))
    assert log.iterations["time"].tolist() == pytest.approx([5, math.nan, math.nan], nan_ok=True)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("{'max_num_seqs': 32, 'async_scheduling': False}", {"max_num_seqs": 32, "async_scheduling": False}),
        ("{'api_key': ['sk-1'], 'hf_token': 'hf', 'port': 1}", {"port": 1}),
        ("{'lora_modules': [LoRAModulePath(name='a', path='b')], 'port': 1}", {"port": 1}),
        ("{'policy': <Policy.A: 'a'>, 'deep': {'port': 2}}", {"policy": None, "deep": {"port": 2}}),
        ("{'cut': 'off", {}),
        ("{'nested': " + "[" * 5000 + "]" * 5000 + "}", {}),
        ("{__import__('os').getcwd(): 1, 'x': __import__('os').getcwd(), **{'y': 1}, 'port': 1}", {"port": 1}),
    ],
)
def test_arguments_are_read_but_never_run(read, arguments: str, found: dict[str, object]) -> None:
    assert read(info(f"non-default args: {arguments}")).arguments == found


def test_given_flags_are_known_where_no_line_shows_them(read) -> None:
    log = read(info("non-default args: {'max_num_seqs': 32, 'block_size': 64, 'max_num_batched_tokens': 512}"))
    assert (log.max_num_seqs, log.block_size, log.max_num_batched_tokens) == (32, 64, 512)


def test_of_several_starts_the_last_counts(read) -> None:
    def start(sequences: int, tokens: str) -> list[str]:
        args = info(f"non-default args: {{'max_num_seqs': {sequences}}}")
        return [args, info(f"GPU KV cache size: {tokens} tokens"), info(ITERATION)]

    log = read(*start(8, "1,000"), info(STATUS.format(more="")), *start(16, "2,000"))
    assert (log.max_num_seqs, log.kv_tokens, len(log.iterations), len(log.status)) == (16, 2000, 1, 0)
    assert log.notes == ("the log holds 2 starts of the server: the last one counts",)


def test_a_log_that_is_cut_off_is_read(read) -> None:
    assert read(STATUS.format(more="")[:60], info(ITERATION)).status.empty


def test_a_log_that_is_too_long_is_read_to_its_limit(read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calibration.server_log.MAX_BYTES", 300)
    log = read(info(ITERATION), *("x" * 100 for _ in range(10)), info(ITERATION))
    assert len(log.iterations) == 1
    assert "only its beginning was read" in log.notes[0]


@pytest.mark.parametrize("content", [b"", b"hello\n", b"\x00\xff\x1f\x8b" * 100, b"KV cache and max_num_seqs\n"])
def test_what_is_no_log_is_said_in_a_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(ServerLogError, match=r"notes.txt is no log of vLLM: give the file that takes what vllm"):
        read_server_log(path)


def test_a_file_that_is_not_there_is_said_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ServerLogError, match=r"absent.log cannot be read \(No such file or directory\)"):
        read_server_log(tmp_path / "absent.log")
    with pytest.raises(ServerLogError, match=r"cannot be read \(Is a directory\)"):
        read_server_log(tmp_path)


@pytest.mark.parametrize(
    ("message", "names"),
    [
        ("Using max model len 0", ["max_model_len"]),
        ("Using max model len " + "9" * 5000, ["max_model_len"]),
        ("GPU KV cache size: ,,, tokens", ["kv_tokens"]),
        ("GPU KV cache size: 0 tokens", ["kv_tokens"]),
        ("GPU KV cache size: " + "9" * 40 + " tokens", ["kv_tokens"]),
        ("Available KV cache memory: 1.2.3 GiB", ["kv_memory"]),
        ("Model loading took . GiB", ["model_memory"]),
        ("LLM engine (v0.9.0) with config: max_seq_len=many, tensor_parallel_size=0, enforce_eager=perhaps, dtype=1",
         ["max_model_len", "tensor_parallel_size", "enforce_eager", "dtype"]),
        ("non-default args: {'max_num_seqs': 'x', 'block_size': [1], 'async_scheduling': 3, "
         "'max_num_batched_tokens': 0}",
         ["max_num_seqs", "block_size", "async_scheduling", "max_num_batched_tokens"]),
        ("Iteration(99999999999999999999): 1 context requests, 1 context tokens, 1 generation requests, 1 generation "
         "tokens, iteration elapsed time: 1.0 ms", []),
        (STATUS.format(more="").replace("72.5%", "725%"), []),
        (STATUS.format(more="").replace("Running: 45", "Running: " + "4" * 5000), []),
    ],
)  # fmt: skip
def test_what_cannot_be_is_not_told(read, message: str, names: list[str]) -> None:
    log = read(info(message), info("Graph capturing finished in 1 secs, took 0.5 GiB"))
    assert [getattr(log, name) for name in names] == [None] * len(names)
    assert len(log.status) == len(log.iterations) == 0


def test_a_log_of_other_values_gives_no_name_of_a_model(read) -> None:
    assert read(info("non-default args: {'served_model_name': 7, 'model': 3}")).served_names == ()
    assert read(info("non-default args: {'served_model_name': ['a', 7, None]}")).served_names == ("a",)


def test_what_a_terminal_would_obey_is_left_out(read) -> None:
    log = read("\x1b]0;title\x07" + info("LLM engine (v0.9.0) with config: model='a\x1b[31m\x07\u202eb', dtype=x"))
    assert log.model is not None
    assert log.model.isprintable()


@pytest.mark.parametrize(
    "line",
    [
        "KV cache " + "A" * 300_000,
        "KV cache Model loading took " + "1" * 300_000,
        "Async scheduling " * 20_000,
        "Free memory on device Actual usage " + "on device " * 30_000,
        "LLM engine (v0.9.0) with config: " + ",model='" * 30_000,
        "non-default args: {" * 50_000,
        "non-default args: " + "{" * 60_000 + "}",
        "non-default args: {'a': " + "-" * 60_000 + "1}",
        '{"log": ' + "[" * 500_000,
    ],
)
def test_a_line_made_to_take_long_does_not(read, line: str) -> None:
    """Each took minutes or more: a search that begins anew at every place of a long line."""
    assert read(info(line), info("Using max model len 1024")).max_model_len == 1024


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_a_log_in_another_encoding_is_none(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "vllm.log"
    path.write_bytes(REAL.read_text().encode(encoding))
    with pytest.raises(ServerLogError, match="is no log of vLLM"):
        read_server_log(path)


def test_bytes_that_are_no_text_lose_their_line_only(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_bytes(b"\0\xff\xfe\n" * 100 + REAL.read_bytes().replace(b"\n", b"\r\n") + b"\x80" * 5000)
    assert read_server_log(path).max_num_seqs == read_server_log(REAL).max_num_seqs


def test_a_row_of_a_log_takes_little_memory(tmp_path: Path) -> None:
    """A line for every step of days: Python's own numbers take 700 bytes a row."""
    path = tmp_path / "vllm.log"
    path.write_text(f"INFO 10-23 15:14:56 {ITERATION}\n" * 5_000)
    tracemalloc.start()
    log = read_server_log(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(log.iterations) == 5_000
    assert peak < 5_000 * 400


def test_a_share_of_the_memory_beyond_all_is_not_told(read) -> None:
    memory = read(info(ADVICE.replace("(0.9, ", "(2.9, "))).memory
    assert memory is not None
    assert (memory.utilization, memory.consumed) == (None, 56.89)
