"""Whatever tells of a server is put together; every flag says from where, and what does not fit is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from calibration.discovery import (
    discover_flags,
    fingerprint_facts,
    infer_max_num_seqs,
    info_facts,
    info_in,
    max_num_seqs_in_status,
    server_info,
)
from calibration.endpoint import Endpoint
from calibration.gpu import Gpu, GpuReading
from calibration.log_lines import MemoryUse
from calibration.server_log import STATUS_COLUMNS, ServerLog, read_server_log
from simulator.loads.workload import ClosedLoop, Length, Shape, Workload
from simulator.results.run import GAP_COLUMNS, REQUEST_COLUMNS, TIMELINE_COLUMNS, Level, Run
from tests.calibration.test_gpu import exporter

ENDPOINT = Endpoint(
    "http://host",
    "demo",
    engine_version="0.32.0",
    max_model_len=4096,
    kv_tokens=16_000,
    num_gpu_blocks=1000,
    block_size=16,
    enable_prefix_caching=True,
    has_metrics=True,
)
# As vLLM 0.32.0 shows it, cut short
INFO = {
    "vllm_config": {
        "model_config": {
            "model": "/models/tiny",
            "dtype": "torch.bfloat16",
            "max_model_len": 4096,
            "quantization": None,
        },
        "cache_config": {"block_size": 16, "cache_dtype": "auto", "gpu_memory_utilization": 0.92},
        "parallel_config": {"tensor_parallel_size": 2, "enable_expert_parallel": False},
        "scheduler_config": {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 512,
            "policy": "priority",
            "watermark": 0,
            "long_prefill_token_threshold": 128,
            "async_scheduling": False,
            "enable_chunked_prefill": True,
        },
        "device_config": {"device": "cuda"},
        "performance_mode": "balanced",
    },
    "system_env": {"nvidia_gpu_models": "GPU 0: NVIDIA A100-SXM4-80GB\nGPU 1: NVIDIA A100-SXM4-80GB"},
}
LENGTH = 100  # tokens of every prompt


def measured(running: list[int], waiting: list[int], kv_tokens: float = 500.0, notes: tuple[str, ...] = ()) -> Run:
    """One level whose gauges were sampled like this."""
    count = len(running)
    timeline = pd.DataFrame(
        {
            "time": [0.1 * number for number in range(count)],
            "running": running,
            "waiting": waiting,
            "kv_tokens": [kv_tokens] * count,
            "active_tokens": [kv_tokens] * count,
        }
    )
    requests = pd.DataFrame({name: [0] for name in REQUEST_COLUMNS})
    requests = requests.assign(prompt_tokens=LENGTH, preemptions=-1, error="")
    workload = Workload(ClosedLoop(8), (Shape(Length.fixed(LENGTH), Length.fixed(10)),), 8)
    gaps = pd.DataFrame({name: [] for name in GAP_COLUMNS})
    return Run("measured", [Level(workload, 1.0, requests, gaps, timeline[list(TIMELINE_COLUMNS)], notes=list(notes))])


PLATEAU = measured([1, 2, 4, 4, 4, 4, 3, 4, 4, 4, 4, 4, 4, 2], [0, 2, 4, 4, 4, 4, 5, 4, 4, 4, 4, 4, 4, 0])


def test_every_flag_says_where_it_comes_from() -> None:
    log = ServerLog(max_num_batched_tokens=1024, async_scheduling=True)
    known = discover_flags(ENDPOINT, {"--scheduling-policy": "fcfs"}, log=log, run=PLATEAU)
    wanted = {
        "scheduling_policy": "stated",
        "max_model_len": "server",
        "num_gpu_blocks": "server",
        "enable_prefix_caching": "server",
        "max_num_batched_tokens": "log",
        "async_scheduling": "log",
        "max_num_seqs": "inferred",
        "watermark": "assumed",
    }
    assert {name: known.sources[name] for name in wanted} == wanted
    assert set(vars(known.flags)) <= set(known.sources)
    assert (known.flags.max_num_seqs, known.flags.max_num_batched_tokens) == (4, 1024)
    assert known.contradictions == []
    assert known.assumed == []
    assert known.inferred[0].startswith("max_num_seqs = 4: never more ran, though others waited")


def test_the_first_of_the_sources_wins_and_the_others_are_named() -> None:
    log = ServerLog(max_num_batched_tokens=8192, max_model_len=8192, max_num_seqs=64)
    known = discover_flags(ENDPOINT, {"max_num_batched_tokens": 2048}, log=log, run=PLATEAU)
    assert known.flags.max_num_batched_tokens == 2048
    assert known.contradictions == [
        "max_model_len: the server says 4096, but the log says 8192; 4096 is used",
        "max_num_batched_tokens: stated is 2048, but the log says 8192; 2048 is used",
        "max_num_seqs: the log says 64, but the measured run shows 4; 64 is used",
    ]


def test_sources_that_agree_are_no_contradiction() -> None:
    log = ServerLog(engine_version="0.32.0", kv_tokens=16_000, kv_cache_dtype="auto", arguments={"watermark": 0})
    known = discover_flags(ENDPOINT, {"max_model_len": "4k"}, log=log, info=INFO)
    assert known.contradictions == ["max_model_len: stated is 4000, but the server says 4096; 4000 is used"]


def test_a_log_of_another_server_is_noticed() -> None:
    log = ServerLog(model="Qwen/Qwen3-8B")
    doubt = "the log is of a server of Qwen/Qwen3-8B, not of demo: is it the right one?"
    assert discover_flags(ENDPOINT, log=log).contradictions == [doubt]
    named = replace(log, arguments={"served_model_name": ["other", "demo"]})
    assert discover_flags(ENDPOINT, log=named).contradictions == []


def test_more_requests_than_stated_are_noticed() -> None:
    crowd = measured([12] * 3, [0] * 3)
    known = discover_flags(ENDPOINT, {"max_num_seqs": 8}, run=crowd)
    assert known.contradictions == ["max_num_seqs: stated is 8, but 12 requests ran at once; give --max-num-seqs"]


def test_the_log_of_a_real_server_leaves_little_to_assume() -> None:
    log = read_server_log(Path(__file__).with_name("vllm-0.32.0-cpu.log"))
    known = discover_flags(Endpoint("http://host", "demo"), log=log)
    flags = known.flags
    assert (flags.max_num_seqs, flags.max_num_batched_tokens, flags.max_model_len) == (4, 512, 8192)
    assert (flags.num_gpu_blocks, flags.block_size, flags.engine_version) == (513, 16, "0.32.0")
    assert [sentence.partition(" = ")[0] for sentence in known.assumed] == ["async_scheduling"]
    assert not flags.async_scheduling  # the default on a CPU


def test_development_mode_tells_everything() -> None:
    known = discover_flags(Endpoint("http://host", "demo"), info=INFO)
    flags = known.flags
    assert (flags.max_num_seqs, flags.max_num_batched_tokens, flags.max_model_len) == (4, 512, 4096)
    assert (flags.scheduling_policy, flags.async_scheduling, flags.watermark) == ("priority", False, 0.0)
    assert flags.long_prefill_token_threshold == 128
    assert known.found["gpu"].value == "NVIDIA A100-SXM4-80GB"
    assert known.found["dtype"].value == "bfloat16"
    assert known.found["tensor_parallel_size"].value == 2


def test_values_of_another_type_tell_nothing() -> None:
    scheduler = {"max_num_seqs": "many", "max_num_batched_tokens": True, "policy": None, "watermark": [0.1]}
    facts = info_facts({"vllm_config": {"scheduler_config": scheduler, "cache_config": "none"}, "system_env": None})
    assert {value for value in facts.values() if value is not None} == set()


@pytest.mark.parametrize(
    ("text", "info"),
    [(json.dumps(INFO), INFO), ("<html>", None), ("[]", None), ('{"vllm_config": "model=..."}', None)],
)
def test_the_server_is_asked_for_its_configuration(text: str, info: object) -> None:
    with exporter(text) as url:
        assert server_info(Endpoint(url.removesuffix("/metrics"), "demo")) == info


def test_a_server_not_in_development_mode_tells_nothing() -> None:
    with exporter("{}", 404) as url:
        assert server_info(Endpoint(url.removesuffix("/metrics"), "demo")) is None


@pytest.mark.parametrize(
    ("fingerprint", "facts"),
    [
        ("vllm-0.32.0-850a9fb7", {"engine_version": "0.32.0"}),
        ("vllm-0.32.0-tp2-850a9fb7", {"engine_version": "0.32.0", "tensor_parallel_size": 2}),
        (
            "vllm-0.21.0rc1+cpu-tp4-pp2-dp8-ep-nohash",
            {
                "engine_version": "0.21.0rc1+cpu",
                "tensor_parallel_size": 4,
                "pipeline_parallel_size": 2,
                "data_parallel_size": 8,
                "enable_expert_parallel": True,
            },
        ),
        ("fp_44709d6fcb", {}),
        ("", {}),
    ],
)
def test_a_fingerprint_tells_version_and_sizes(fingerprint: str, facts: dict[str, object]) -> None:
    told = fingerprint_facts(fingerprint)
    assert {name: value for name, value in told.items() if value is not None} == facts


def test_the_gpu_decides_the_defaults() -> None:
    silent = Endpoint("http://host", "demo", engine_version="0.32.0")
    h100 = GpuReading((Gpu(0, "NVIDIA H100 80GB HBM3", 80 << 30),))
    flags = discover_flags(silent, gpus=h100).flags
    assert (flags.max_num_batched_tokens, flags.max_num_seqs) == (8192, 1024)
    log = ServerLog(memory=MemoryUse(total=23.53))
    known = discover_flags(silent, log=log)
    assert (known.flags.max_num_batched_tokens, known.flags.max_num_seqs) == (2048, 256)
    assert any("the default on a GPU of 24 GiB" in sentence for sentence in known.assumed)


def test_max_num_seqs_shows_where_requests_wait_without_need() -> None:
    assert infer_max_num_seqs(PLATEAU, 16_000)["max_num_seqs"].value == 4
    assert infer_max_num_seqs(PLATEAU, 8_000, engines=2)["max_num_seqs"].value == 2


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (measured([4] * 20, [0] * 20), "nobody waits: there were no more clients"),
        (measured([3] * 20 + [4], [1] * 20 + [0]), "more ran at another time"),
        (measured([4] * 5, [4] * 5), "too few samples"),
        (measured([1, 2, 3] * 10 + [4] * 12, [1] * 42), "usually fewer ran though others waited"),
        (measured([4] * 20, [4] * 20, kv_tokens=15_650), "no room for another prompt"),
        (measured([4] * 20, [4] * 20, kv_tokens=float("nan")), "the use of the pool is not known"),
        (measured([4] * 20, [-1] * 20), "the server does not tell who waits"),
        (measured([4] * 20, [4] * 20, notes=("3 preemptions",)), "requests were preempted"),
        (Run("measured", []), "nothing was measured"),
    ],
)
def test_a_run_shows_no_limit(run: Run, why: str) -> None:
    assert infer_max_num_seqs(run, 16_000) == {}, why


def test_a_limit_needs_a_known_pool_and_equal_engines() -> None:
    assert infer_max_num_seqs(PLATEAU, None) == {}
    assert infer_max_num_seqs(PLATEAU, 16_000, engines=3) == {}


def status(*lines: tuple[int, int, float, int], engine: int = 0) -> ServerLog:
    """A log whose lines tell running, waiting, the use of the KV pool and preemptions."""
    rows = [
        {"running": running, "waiting": waiting, "kv_usage": usage, "preemptions": preempted, "engine": engine}
        for running, waiting, usage, preempted in lines
    ]
    return ServerLog(status=pd.DataFrame(rows, columns=list(STATUS_COLUMNS)))


CROWD = [(2, 0, 0.1, 0), (4, 3, 0.3, 0), (4, 6, 0.4, 0), (4, 2, 0.3, 0), (1, 0, 0.1, 0)]


def test_max_num_seqs_shows_in_the_log_where_the_server_tells_nothing() -> None:
    assert max_num_seqs_in_status(status(*CROWD))["max_num_seqs"].value == 4
    assert max_num_seqs_in_status(status(*CROWD, engine=-1), engines=2)["max_num_seqs"].value == 2
    known = discover_flags(Endpoint("http://host", "demo"), log=status(*CROWD))
    assert (known.flags.max_num_seqs, known.sources["max_num_seqs"]) == (4, "inferred")
    assert known.inferred == [
        "max_num_seqs = 4: never more ran, though others waited and KV cache was free, in 3 lines of the log"
    ]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (CROWD[:3], "too few lines"),
        ([(4, 0, 0.3, 0)] * 9, "nobody waits"),
        ([(4, 3, 0.95, 0)] * 9, "the pool is full"),
        ([(4, 3, 0.3, 1)] * 9, "requests were preempted"),
        ([(5, 0, 0.3, 0), *CROWD], "more ran at another time"),
        ([(3, 3, 0.3, 0)] * 9 + CROWD, "usually fewer ran though others waited"),
        ([], "an idle server"),
    ],
)
def test_a_log_shows_no_limit(lines: list[tuple[int, int, float, int]], why: str) -> None:
    assert max_num_seqs_in_status(status(*lines)) == {}, why


def test_speculative_decoding_is_said_to_be_beyond_the_simulator() -> None:
    info = {"vllm_config": {**INFO["vllm_config"], "speculative_config": {"method": "ngram"}}}  # type: ignore[dict-item]
    log = ServerLog(arguments={"speculative_config": {"method": "eagle3"}})
    for known in (discover_flags(ENDPOINT, info=info), discover_flags(ENDPOINT, log=log)):
        assert any("decodes speculatively" in doubt for doubt in known.contradictions)
    assert not any("speculatively" in doubt for doubt in discover_flags(ENDPOINT, info=INFO).contradictions)


def test_an_answer_that_is_no_configuration_tells_nothing() -> None:
    for text in ("", "[]", "{", '{"vllm_config": 1}', '{"vllm_config": ' * 5000, '{"vllm_config": ' + "9" * 5000 + "}"):
        assert info_in(text) is None


def test_sizes_and_texts_of_a_server_that_cannot_be_are_left_out() -> None:
    config = {
        "scheduler_config": {"max_num_seqs": 0, "max_num_batched_tokens": -1, "watermark": float("nan")},
        "cache_config": {"block_size": 10**40, "cache_dtype": "a\nb\x1b" + "c" * 500},
        "parallel_config": {"data_parallel_size": 0},
    }
    facts = info_facts({"vllm_config": config, "system_env": {"nvidia_gpu_models": [[]]}})
    told = {name: value for name, value in facts.items() if value is not None}
    assert set(told) == {"kv_cache_dtype"}
    assert told["kv_cache_dtype"].isprintable()
    assert len(told["kv_cache_dtype"]) <= 80
    known = discover_flags(ENDPOINT, info={"vllm_config": config})
    assert known.flags.max_num_seqs > 0
