"""What /metrics may hold, and what is no such text."""

from __future__ import annotations

import pytest

from calibration.metrics import MetricsError, MetricsSnapshot, SumCount, only_gauges, parse_metrics

RUNNING, WAITING, USAGE = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
TTFT = "vllm:time_to_first_token_seconds"


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "1e308", "-0.5", "1e400"])
def test_what_is_no_count_is_not_told(value: str) -> None:
    text = f"{RUNNING} {value}\n{WAITING} 2\n{USAGE} {value}\n{TTFT}_sum {value}\n{TTFT}_count 3\n"
    assert parse_metrics(text) == MetricsSnapshot(waiting=2)


def test_numbers_may_have_exponents_and_moments() -> None:
    text = f"{RUNNING} 3.0 1700000000000\n{USAGE} 1.25e-1\nvllm:prompt_tokens_total 6.4e+06\n"
    assert parse_metrics(text) == MetricsSnapshot(running=3, kv_usage=0.125, prompt_tokens=6_400_000)


def test_labels_may_hold_quotes_braces_and_line_ends() -> None:
    name = 'model_name="a \\"b\\" } \\\\ c\\n,engine=\\"7\\""'
    assert parse_metrics(f'{RUNNING}{{engine="0",{name}}} 3\n{RUNNING}{{engine="1",{name}}} 2\n').engines == 2


def test_of_equal_samples_the_last_counts() -> None:
    one, other = '{engine="0",model_name="m"}', '{model_name="m",engine="0"}'
    assert parse_metrics(f"{RUNNING}{one} 3\n{RUNNING}{other} 5\n").running == 5


def test_a_histogram_needs_neither_buckets_nor_their_order() -> None:
    buckets = [f'{TTFT}_bucket{{le="{bound}"}} {count}' for bound, count in (("+Inf", 5), ("0.1", 9), ("oops", 2))]
    lines = [f"{TTFT}_count 5", *buckets, f"{TTFT}_sum 1.25", f"# TYPE {TTFT} histogram"]
    assert parse_metrics("\n".join(lines)).ttft == SumCount(1.25, 5.0)
    assert parse_metrics(f"{TTFT}_sum 1.25\n").ttft is None


@pytest.mark.parametrize(
    "text",
    [
        "<!DOCTYPE html><html><body>It works!</body></html>",
        f"{RUNNING} many",
        f"{RUNNING} 3 " + "9" * 400,
        f"{RUNNING}{{engine=",
        f'{RUNNING}{{engine="0" 3\n',
        f"{RUNNING}\0 3",
        '{"running": 3}',
        "{" * 3000,
    ],
)
def test_another_text_is_said_to_be_one(text: str) -> None:
    with pytest.raises(MetricsError, match=r"^not in the Prometheus format$"):
        parse_metrics(text)


def test_bytes_that_are_no_text_do_no_harm_to_the_gauges() -> None:
    text = (
        f"{RUNNING} 3\r\n".encode() + b"\xff\xfe\0\n" + f"{WAITING} 1\n".encode() + b"vllm:num_requests_running_x 9\n"
    )
    assert parse_metrics(only_gauges(text).decode(errors="replace")).waiting == 1
