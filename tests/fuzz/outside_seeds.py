"""Small files in order, of every kind that comes from outside; where there are real samples, these too."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import yaml

from tests.calibration.imports.result_files import (
    SAMPLES,
    aiperf_line,
    guidellm_timings,
    guidellm_v2,
    inference_perf_request,
    sglang,
    vllm_bench,
    vllm_bench_plain,
)

LARGEST_SAMPLE = 50_000  # bytes; mutating a larger file takes longer than it teaches
LOG = Path(__file__).parents[1] / "calibration" / "vllm-0.32.0-cpu.log"


def lines(*values: Any) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def samples(*names: str) -> list[bytes]:
    """Files that a tool really wrote, as far as they are on this machine and small."""
    paths = [SAMPLES / name for name in names]
    return [path.read_bytes() for path in paths if path.exists() and path.stat().st_size <= LARGEST_SAMPLE]


# --- results of load generators


def vllm_bench_results() -> list[bytes]:
    chat = vllm_bench(backend="openai-chat", endpoint_type="openai-chat", itls=[[0.0001, 0.01, 0.01, 0.01]] * 3)
    open_loop = vllm_bench(request_rate=4.0, max_concurrency=None, errors=["", "Traceback\nTimeoutError: x", ""])
    names = ("0.32.0_chat_detailed", "0.32.0_detailed", "0.32.0_plain", "0.33.0_chat_detailed")
    return [
        lines(vllm_bench()),
        lines(chat),
        lines(open_loop, vllm_bench(max_num_seqs="8")),
        lines(vllm_bench_plain()),
        json.dumps(vllm_bench(latencies="absent", start_times="absent"), indent=1).encode(),
        *samples(*(f"vllm/vllm_bench_{name}.json" for name in names)),
    ]


def sglang_results() -> list[bytes]:
    details = ("input_lens", "output_lens", "ttfts", "itls", "errors")
    return [
        lines(sglang()),
        lines(sglang(max_concurrency=None, request_rate=3.0), sglang()),
        lines(sglang(**dict.fromkeys(details, "absent"))),
    ]


def aiperf_requests() -> list[bytes]:
    failed = {"metadata": aiperf_line(5)["metadata"], "error": {"code": 500, "type": "ServerError", "message": "m"}}
    several = [aiperf_line(0, "warmup"), *(aiperf_line(80 * number) for number in range(4)), failed]
    return [lines(aiperf_line(0), aiperf_line(80)), lines(*several), *samples("aiperf/profile_export.jsonl")]


def aiperf_summary() -> list[bytes]:
    def told(value: float, unit: str) -> dict[str, Any]:
        return {"unit": unit, "avg": value, "std": value / 10, "p50": value, "p90": value, "p95": value, "p99": value}

    load = {"kind": "profiling", "type": "concurrency", "requests": 24, "concurrency": 4}
    summary = {
        "schema_version": "1.4",
        "aiperf_version": "0.13.0",
        "input_config": {"models": {"items": [{"name": "m"}]}, "endpoint": {"urls": ["http://h"]}, "phases": [load]},
        "request_latency": told(80, "ms") | {"count": 24},
        "request_count": {"avg": 24, "unit": "requests"},
        "time_to_first_token": told(50, "ms"),
        "inter_token_latency": told(10, "ms"),
        "inter_chunk_latency": told(10, "ms"),
        "input_sequence_length": told(100, "tokens"),
        "output_sequence_length": told(4, "tokens"),
        "usage_prompt_tokens": told(108, "tokens"),
        "usage_completion_tokens": told(4, "tokens"),
        "benchmark_duration": {"avg": 1.5, "unit": "sec"},
    }
    old = summary | {"input_config": {"endpoint": {"model_names": ["m"]}, "loadgen": {"request_rate": 3.0}}}
    return [lines(summary), json.dumps(old, indent=1).encode(), *samples("aiperf/profile_export_aiperf.json")]


def aiperf_server_metrics() -> list[bytes]:
    moment = 1_700_000_000_000_000_000
    part = {"start_ns": moment, "end_ns": moment + 100_000_000}

    def gauge(value: float) -> dict[str, Any]:
        series = {"endpoint_url": "u", "labels": {"engine": "0"}, "timeslices": [part | {"avg": value}]}
        return {"type": "gauge", "series": [series]}

    labels = {"block_size": "16", "num_gpu_blocks": "1000", "kv_cache_size_tokens": "16000", "cache_dtype": "auto"}
    metrics = {
        "vllm:cache_config_info": {"series": [{"endpoint_url": "u", "labels": labels, "stats": {"avg": 1.0}}]},
        "vllm:num_requests_running": gauge(2.0),
        "vllm:num_requests_waiting": gauge(0.0),
        "vllm:kv_cache_usage_perc": gauge(0.1),
        "vllm:request_queue_time_seconds": {"series": [{"stats": {"sum": 0.06, "count": 3, "avg": 0.02}}]},
        "vllm:num_preemptions_total": {"series": [{"stats": {"total": 2.0}}]},
    }
    export = {"schema_version": "1.1", "metrics_phase": "profiling", "summary": {}, "metrics": metrics}
    return [lines(export), json.dumps(export, indent=1).encode(), *samples("aiperf/server_metrics_export.json")]


def guidellm_reports() -> list[bytes]:
    def request(start: float) -> dict[str, Any]:
        metrics = {"input_metrics": {"text_tokens": 500}, "output_metrics": {"text_tokens": 128}}
        return {"request_id": "r", "info": {"timings": guidellm_timings(start)}} | metrics

    strategies = ({"type_": "concurrent", "streams": 2}, {"type_": "poisson", "rate": 2.0}, {"type_": "throughput"})
    good = {"successful": [request(1.7e9), request(1.7e9 + 2.3)], "errored": [request(1.7e9) | {"error": "gone"}]}
    reports = [guidellm_v2(good, 2, strategy) for strategy in strategies]
    flat = {"prompt_tokens": 500, "output_tokens": 128, "start_time": 1.7e9, "end_time": 1.7e9 + 2.3}
    flat |= {"first_token_time": 1.7e9 + 1.0, "last_token_time": 1.7e9 + 2.2}
    old = guidellm_v2({"successful": [flat]}, 1, strategies[0])["benchmarks"]
    return [
        *(lines(report) for report in reports),
        lines(guidellm_v2({}, 2, strategies[0], version=1)),
        lines({"benchmarks": old}),
        yaml.safe_dump(reports[0]).encode(),
    ]


def inference_perf_results() -> list[bytes]:
    failed = inference_perf_request(0.1, error={"error_type": "ClientError", "error_msg": "gone"})
    requests = [inference_perf_request(start) for start in (0.0, 0.5, 3.0, 3.25)]
    told = {"mean": 0.05, "median": 0.05, "p90": 0.06, "p95": 0.06, "p99": 0.07, "p10": 0.04}
    lengths = {"mean": 100.0, "p10": 90.0, "p90": 110.0}
    good = {
        "count": 20,
        "latency": {"time_to_first_token": told, "time_per_output_token": told, "inter_token_latency": told}
        | {"request_latency": told},
        "prompt_tokens": lengths,
        "output_len": lengths,
        "output_tokens": lengths,
    }
    load = {"count": 20, "requested_rate": 10.0, "send_duration": 2.0}
    summary = {"load_summary": load, "successes": good, "failures": {"count": 0}, "benchmark_time_seconds": 2.5}
    return [
        lines([*requests, failed]),
        json.dumps(requests, indent=1).encode(),
        lines(summary),
        *samples("infperf/stage_0_lifecycle_metrics.json"),
    ]


def inference_perf_configs() -> list[bytes]:
    server = {"type": "vllm", "model_name": "m", "base_url": "http://h"}
    stages = [{"rate": 2.0, "duration": 3}, {"rate": 4.0, "duration": 3}]
    rates = {"load": {"type": "poisson", "stages": stages}, "server": server, "api": {"type": "completion"}}
    clients = rates | {"load": {"type": "concurrent", "stages": [{"concurrency_level": 4, "num_requests": 20}]}}
    return [yaml.safe_dump(rates).encode(), yaml.safe_dump(clients).encode(), *samples("infperf/config.yaml")]


def benchmark_reports() -> list[bytes]:
    def told(value: float, units: str) -> dict[str, Any]:
        return {"units": units, "mean": value, "stddev": value / 10, "p50": value, "p90": value, "p99": value}

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
    engine = {"kind": "inference_engine", "model": {"name": "m"}, "accelerator": {"model": "H100"}}
    stack = [{"standardized": engine, "native": {"args": {"--max-num-seqs": 8}}}]
    results = {"results": {"request_performance": {"aggregate": aggregate}}}
    scenario = {"load": {"standardized": {"tool": "guidellm", "concurrency": 4}}, "stack": stack}
    new = {"version": "0.2", "scenario": scenario} | results
    flat = aggregate | {"throughput": {"requests_per_sec": 10.0, "output_tokens_per_sec": 200.0}}
    load = {"name": "vllm-benchmark", "args": {"request_rate": 3.0}}
    old = {"version": "0.1", "scenario": {"model": {"name": "m"}, "load": load}, "metrics": flat}
    return [
        yaml.safe_dump(new).encode(),
        yaml.safe_dump(old).encode(),
        lines(new),
        *samples("infperf/inference-perf.partial.stage_0.yaml"),
    ]


def stated_figures() -> list[bytes]:
    shape = {"input_len": [100, 100], "output_len": [4, 9], "weight": 1.0}
    closed = {"arrivals": {"kind": "closed", "concurrency": 2}, "shapes": [shape], "num_prompts": 3, "seed": 0}
    open_loop = closed | {"arrivals": {"kind": "open", "request_rate": "inf", "burstiness": 1.0}}
    names = ("output_throughput", "mean_concurrency", "mean_ttft", "p99_e2el", "p50_itl")
    figures = [{"metric": name, "value": 0.5, "uncertainty": 0.01} for name in names]
    levels = [
        {"workload": workload, "notes": ["stated"], "server": {"model": "m"}, "figures": figures}
        for workload in (closed, open_loop)
    ]
    content = {"schema_version": 1, "kind": "stated figures", "levels": levels}
    return [lines(content), json.dumps(content, indent=1).encode()]


def any_result() -> list[bytes]:
    kinds = (
        vllm_bench_results,
        sglang_results,
        aiperf_requests,
        aiperf_summary,
        aiperf_server_metrics,
        guidellm_reports,
        inference_perf_results,
        inference_perf_configs,
        benchmark_reports,
    )
    return [kind()[0] for kind in kinds]


# --- traces

AZURE = b"""\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2024-05-10 00:00:00.009930+00:00,110,27
2023-11-16 18:17:05.0000000,110,0
"""
BURSTGPT = b"""\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,1,0.3,ChatGPT,472,18,490,Conversation log
45,2,0.4,GPT-4,1087,230,1317,API log
118,3,0.1,ChatGPT,417,0,417,API log
"""
SAVED = b"""\
request_id,arrival,prompt_tokens,output_tokens,ttft,tpot,e2el,queue_time,preemptions,finish_reason,error
0,0.0,100,4,0.05,0.01,0.08,,-1,length,
1,0.25,100,0,,,,,-1,,http 500
2,0.5,120,8,0.05,0.01,0.12,,-1,length,
"""
PLAIN = b'"timestamp_ms", input_length ,output_length,note\r\n0,10,5,"a, b"\r\n250.5,11,6,\r\n'


def csv_traces() -> list[bytes]:
    return [AZURE, BURSTGPT, SAVED, PLAIN, b"timestamp,input_length,output_length\n0,10,5\n1e-3,20,6\n"]


def json_traces() -> list[bytes]:
    mooncake = [
        {"timestamp": 0, "input_length": 1300, "output_length": 20, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 1500, "output_length": 10, "hash_ids": [0, 1, 3]},
        {"timestamp": 6000, "input_length": 600, "output_length": 10, "hash_ids": [4, 5]},
    ]
    bailian = [
        {"chat_id": 1, "timestamp": 61.1, "input_length": 40, "output_length": 132, "turn": 1, "hash_ids": [7, 8, 9]},
        {"chat_id": 2, "timestamp": 61.6, "input_length": 33, "output_length": 5, "turn": 2, "hash_ids": [7, 8, 11]},
    ]
    custom = [{"prompt": "x" * 400, "output_tokens": 30}, {"prompt": "y" * 40}]
    return [lines(*mooncake), lines(*bailian), lines(*custom)]


def compressed_traces() -> list[bytes]:
    packed = [gzip.compress(content, mtime=0) for content in (AZURE, json_traces()[0])]
    return [*packed, gzip.compress(b"", mtime=0) + packed[0], bz2.compress(BURSTGPT), lzma.compress(PLAIN)]


# --- servers

LOG_LINES = """\
(EngineCore pid=12) INFO 10-23 15:14:56 [gpu_worker.py:391] Free memory on device (94.05/95.01 GiB) on startup. \
Desired GPU memory utilization is (0.9, 85.51 GiB). Actual usage is 56.89 GiB for consumed memory (weights + \
non-torch), 0.76 GiB for peak activation, and 0.32 GiB for CUDAGraph memory. Replace gpu_memory_utilization config \
with `--kv-cache-memory=29407858586` (27.39 GiB) to fit into requested memory, or `--kv-cache-memory=38581581312` \
(35.93 GiB) to fully utilize gpu memory. Current kv cache memory in use is 27.85 GiB.
INFO 10-23 15:14:57 [kv_cache_utils.py:1] GPU KV cache size: 13,458 tokens, Maximum concurrency for 1,024 tokens per \
request: 13.14x
INFO 10-23 15:14:57 [kv_cache_utils.py:1] Available KV cache memory: 27.85 GiB
INFO 10-23 15:14:57 [kv_cache_utils.py:1] Model loading took 14.99 GiB memory and 2.1 seconds
INFO 10-23 15:14:57 [vllm.py:1] Asynchronous scheduling is enabled.
INFO 10-23 15:15:06 [loggers.py:1] Engine 000: Avg prompt throughput: 1250.3 tokens/s, Avg generation throughput: \
892.7 tokens/s, Running: 45 reqs, Waiting: 12 reqs, Preemptions: 3, GPU KV cache usage: 72.5%, Prefix cache hit rate: \
45.2%
INFO 10-23 15:15:06 [core.py:1] Iteration(7): 2 context requests, 510 context tokens, 3 generation requests, 4 \
generation tokens, iteration elapsed time: 56.83 ms, GPU KV cache usage: 12.5%
"""


def server_logs() -> list[bytes]:
    wrapped = "".join(json.dumps({"log": line, "stream": "stderr"}) + "\n" for line in LOG_LINES.splitlines())
    return [LOG.read_bytes(), LOG_LINES.encode(), wrapped.encode()]


CARD = {"id": "demo", "object": "model", "owned_by": "vllm", "max_model_len": 8192}
INFO = {
    "vllm_config": {
        "model_config": {"dtype": "torch.bfloat16", "max_model_len": 4096, "quantization": None},
        "cache_config": {"block_size": 16, "cache_dtype": "auto", "gpu_memory_utilization": 0.92},
        "parallel_config": {"tensor_parallel_size": 2, "enable_expert_parallel": False},
        "scheduler_config": {"max_num_seqs": 4, "max_num_batched_tokens": 512, "policy": "priority", "watermark": 0},
        "device_config": {"device": "cuda"},
        "performance_mode": "balanced",
    },
    "system_env": {"nvidia_gpu_models": "GPU 0: NVIDIA A100-SXM4-80GB\nGPU 1: NVIDIA A100-SXM4-80GB"},
}


def server_answers() -> list[bytes]:
    """The answers to /v1/models, /version, /server_info and /metrics, one a line, the last of many lines."""
    models, old = {"object": "list", "data": [CARD, {"id": "other"}]}, {"data": [{"id": "demo", "owned_by": "x"}]}
    few = {"vllm_config": {"scheduler_config": {"max_num_seqs": 8}}}
    text = metrics_texts()[0]
    return [
        lines(models, {"version": "0.32.0"}, INFO) + text,
        lines(old, {"version": "dev"}, few) + metrics_texts()[1],
        lines(old, {}, {}),
    ]


def metrics_texts() -> list[bytes]:
    """What vLLM shows on /metrics, in three ages."""
    labels = '{engine="0",model_name="a \\"b\\" \\\\ c\\n"}'
    config = 'block_size="16",enable_prefix_caching="True",gpu_memory_utilization="0.9",num_gpu_blocks="1001"'
    new = f"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{labels} 3.0
vllm:num_requests_running{{engine="1",model_name="m"}} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{labels} 0.0 1700000000000
vllm:kv_cache_usage_perc{labels} 1.2e-1
vllm:cache_config_info{{engine="0",{config},kv_cache_size_tokens="16000"}} 1.0
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{labels} 0.0
vllm:prompt_tokens_total{labels} 6.4e+06
vllm:generation_tokens_total{labels} 64000.0
vllm:prefix_cache_queries_total{labels} 64.0
vllm:prefix_cache_hits_total{labels} 16.0
vllm:request_success_total{{engine="0",finished_reason="length"}} 5.0
vllm:request_success_total{{engine="0",finished_reason="stop"}} 0.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.1"}} 2.0
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf"}} 5.0
vllm:time_to_first_token_seconds_count{labels} 5.0
vllm:time_to_first_token_seconds_sum{labels} 1.25
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_sum{labels} 0.5
vllm:request_queue_time_seconds_count{labels} 5.0
"""
    old = f"""\
vllm:num_requests_running{{model_name="m"}} 1.0
vllm:num_requests_waiting{{model_name="m"}} NaN
vllm:gpu_cache_usage_perc{{model_name="m"}} 0.5
vllm:gpu_prefix_cache_queries_total{{model_name="m"}} +Inf
vllm:cache_config_info{{{config}}} 1.0
"""
    gauges = 'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_waiting{engine="0"} 0.0\n'
    return [new.encode(), old.encode(), gauges.encode()]


def dcgm_texts() -> list[bytes]:
    labels = 'UUID="GPU-a",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",Hostname="n"'
    rows = [
        f'DCGM_FI_DEV_{name}{{gpu="{number}",{labels}}} {value}'
        for number in (0, 1)
        for name, value in (("GPU_UTIL", 87), ("FB_FREE", 7531), ("FB_USED", 73469), ("FB_RESERVED", 600))
    ]
    total = f'DCGM_FI_DEV_FB_TOTAL{{gpu="0",{labels}}} 81559\nDCGM_FI_DEV_GPU_UTIL{{gpu="0",{labels}}} NaN'
    header = "# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).\n# TYPE DCGM_FI_DEV_GPU_UTIL gauge\n"
    return [(header + "\n".join(rows) + "\n").encode(), f"{total}\n".encode()]


def event_streams() -> list[bytes]:
    def event(choice: dict[str, Any] | None, tokens: int | None = None, **more: Any) -> bytes:
        content: dict[str, Any] = {"id": "c", "choices": [] if choice is None else [{"index": 0} | choice]} | more
        if tokens is not None:
            details = {"prompt_tokens_details": {"cached_tokens": 16}}
            content["usage"] = {"prompt_tokens": 64, "completion_tokens": tokens} | details
        return f"data: {json.dumps(content, separators=(',', ':'))}\n\n".encode()

    def text(word: str, tokens: int | None = None, reason: str | None = None) -> bytes:
        return event({"text": word, "finish_reason": reason}, tokens, system_fingerprint="vllm-0.32.0-12345678")

    end = b"data: [DONE]\n\n"
    counted = text(" a", 1) + text(" b", 3) + text("", 4, "length") + event(None, 4) + end
    plain = b": hello\r\n\r\n" + (text("é") + text(" b") + text("", None, "stop") + end).replace(b"\n", b"\r\n")
    role = event({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})
    word = event({"delta": {"content": "hello"}, "finish_reason": None})
    call = event({"delta": {"tool_calls": [{"index": 0}]}, "finish_reason": None})
    chat = role + word + word + call + event({"delta": {}, "finish_reason": "length"}) + event(None, 4) + end
    refused = text(" a", 1) + b'data: {"error":{"message":"out of memory","code":500}}\n\n' + end
    return [counted, plain, chat, refused]
