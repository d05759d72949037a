"""Small result files of every tool, made by hand, and the way to the real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SAMPLES = Path(__file__).resolve().parents[4] / "shared" / "samples"


def sample(name: str) -> Path:
    """A file that a tool really wrote; these are not part of the project, so the test is skipped without them."""
    path = SAMPLES / name
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    return path


def write(folder: Path, name: str, *values: Any) -> Path:
    """JSON values, one a line."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(value) for value in values) + "\n")
    return path


def vllm_bench(**changes: Any) -> dict[str, Any]:
    """Two clients, three requests of 100/4 tokens: 50 ms to the first token, 10 ms to each other one."""
    result: dict[str, Any] = {
        "date": "20260102-030405",
        "endpoint_type": "openai",
        "backend": "openai",
        "label": None,
        "model_id": "m",
        "tokenizer_id": "m",
        "num_prompts": 3,
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": 2,
        "duration": 0.16,
        "completed": 3,
        "failed": 0,
        "total_input_tokens": 300,
        "total_output_tokens": 12,
        "request_throughput": 18.75,
        "request_goodput": None,
        "output_throughput": 75.0,
        "total_token_throughput": 1950.0,
        "input_lens": [100, 100, 100],
        "output_lens": [4, 4, 4],
        "ttfts": [0.05, 0.05, 0.05],
        "itls": [[0.01, 0.01, 0.01]] * 3,
        "latencies": [0.08, 0.08, 0.08],
        "start_times": [5000.0, 5000.0, 5000.08],
        "generated_texts": ["", "", ""],
        "errors": ["", "", ""],
        "mean_ttft_ms": 50.0,
        "median_ttft_ms": 50.0,
        "std_ttft_ms": 0.0,
        "p99_ttft_ms": 50.0,
        "mean_tpot_ms": 10.0,
        "median_tpot_ms": 10.0,
        "mean_itl_ms": 10.0,
    }
    result |= changes
    return {name: value for name, value in result.items() if value != "absent"}


DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")


def vllm_bench_plain(**changes: Any) -> dict[str, Any]:
    return vllm_bench(**dict.fromkeys(DETAILS, "absent"), **changes)


def sglang(**changes: Any) -> dict[str, Any]:
    """The same load by SGLang's client."""
    result: dict[str, Any] = {
        "backend": "sglang",
        "dataset_name": "random",
        "request_rate": float("inf"),
        "max_concurrency": 2,
        "random_input_len": 100,
        "random_output_len": 4,
        "random_range_ratio": 1.0,
        "server_info": {"model_path": "m", "max_total_num_tokens": 5000, "chunked_prefill_size": 2048},
        "duration": 0.16,
        "completed": 3,
        "total_input_tokens": 300,
        "total_output_tokens": 12,
        "total_output_tokens_retokenized": 11,
        "request_throughput": 18.75,
        "output_throughput": 75.0,
        "mean_e2e_latency_ms": 80.0,
        "median_e2e_latency_ms": 80.0,
        "mean_ttft_ms": 50.0,
        "p99_ttft_ms": 50.0,
        "mean_tpot_ms": 10.0,
        "mean_itl_ms": 10.0,
        "concurrency": 1.5,
        "input_lens": [100, 100, 100],
        "output_lens": [4, 4, 4],
        "ttfts": [0.05, 0.05, 0.05],
        "itls": [[0.01, 0.01, 0.01]] * 3,
        "generated_texts": ["", "", ""],
        "errors": ["", "", ""],
    }
    result |= changes
    return {name: value for name, value in result.items() if value != "absent"}


def aiperf_line(start_ms: int, phase: str = "profiling", **changes: Any) -> dict[str, Any]:
    """One of AIPerf's requests: 108/4 tokens by the server, 100 by the client."""
    start = 1_700_000_000_000_000_000 + start_ms * 1_000_000
    line: dict[str, Any] = {
        "metadata": {
            "benchmark_phase": phase,
            "request_start_ns": start,
            "request_end_ns": start + 81_000_000,
            "was_cancelled": False,
        },
        "metrics": {
            "time_to_first_token": {"value": 50.0, "unit": "ms"},
            "request_latency": {"value": 80.0, "unit": "ms"},
            "inter_token_latency": {"value": 10.0, "unit": "ms"},
            "inter_chunk_latency": {"value": [10.0, 10.0, 10.0], "unit": "ms"},
            "input_sequence_length": {"value": 100, "unit": "tokens"},
            "output_sequence_length": {"value": 4, "unit": "tokens"},
            "usage_prompt_tokens": {"value": 108, "unit": "tokens"},
            "usage_completion_tokens": {"value": 4, "unit": "tokens"},
        },
    }
    return line | changes


def guidellm_timings(start: float) -> dict[str, Any]:
    return {
        "request_start": start,
        "first_token_iteration": start + 1.0,
        "last_token_iteration": start + 2.27,
        "request_end": start + 2.3,
        "token_iterations": 128,
    }


def guidellm_v2(requests: dict[str, Any], made: int, strategy: dict[str, Any], version: int = 2) -> dict[str, Any]:
    """A report with one benchmark: 500/128 tokens, TTFT 1 s, 10 ms a token."""

    def told(value: float, count: int = made) -> dict[str, Any]:
        quantiles = dict.fromkeys(("p50", "p90", "p95", "p99"), value)
        one = {"mean": value, "std_dev": 0.0, "count": count, "total_sum": value * count, "percentiles": quantiles}
        return {"successful": one}

    benchmark = {
        "config": {"strategy": strategy, "backend": {"model": "m", "target": "http://host:8000"}},
        "scheduler_metrics": {"requests_made": {"successful": made, "errored": 0, "incomplete": 0, "total": made}},
        "start_time": 1_700_000_000.0,
        "end_time": 1_700_000_010.0,
        "duration": 10.0,
        "metrics": {
            "request_latency": told(2.3),
            "time_to_first_token_ms": told(1000.0),
            "time_per_output_token_ms": told(17.7),
            "inter_token_latency_ms": told(10.0, made * 127),
            "prompt_token_count": told(500.0),
            "output_token_count": told(128.0),
        },
        "requests": {"successful": [], "incomplete": [], "errored": []} | requests,
    }
    return {"metadata": {"version": version}, "config": {}, "benchmarks": [benchmark]}


def inference_perf_request(start: float, **changes: Any) -> dict[str, Any]:
    """A request whose 4 tokens the client counted as 3."""
    times = [start + 0.05 + 0.01 * number for number in range(4)]
    line: dict[str, Any] = {
        "start_time": start,
        "end_time": times[-1] + 0.001,
        "request": "{}",
        "response": "",
        "info": {
            "request_metrics": {"text": {"input_tokens": 100}},
            "response_metrics": {
                "output_tokens": 3,
                "server_usage": {"prompt_tokens": 100, "completion_tokens": 4, "total_tokens": 104},
                "chunk_times": times,
                "output_token_times": times,
            },
        },
        "error": None,
    }
    return line | changes
