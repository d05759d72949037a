"""Loads on the command line: sessions, traces, think times, curves; and what is told when they make no sense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from capsim.cli import app
from simulator.results.run_files import load_run

TRACE = "Timestamp,Model,Request tokens,Response tokens\n" + "".join(
    f"{second},ChatGPT,{100 + second},{5 + second % 7}\n" for second in range(0, 40, 2)
)


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "burst.csv"
    path.write_text(TRACE)
    return path


def predict(profile_file: Path, *arguments: object) -> Result:
    words = ("predict", "--profile", profile_file, "--no-intervals", *arguments)
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "80"})


def levels(profile_file: Path, *arguments: object) -> list[dict[str, float]]:
    result = predict(profile_file, *arguments, "--json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, float]] = json.loads(result.stdout)["levels"]
    return found


def test_a_trace_is_played_as_recorded_faster_at_a_rate_or_by_clients(profile_file: Path, trace_file: Path) -> None:
    (recorded,) = levels(profile_file, "--trace", trace_file)
    (fast,) = levels(profile_file, "--trace", trace_file, "--speed", 4)
    assert recorded["requests"] == 20
    assert recorded["duration"] > 38 > 12 > fast["duration"] > 9.5
    slow, quick = levels(profile_file, "--trace", trace_file, "--request-rate", "0.5,2", "--num-prompts", 10)
    assert slow["requests"] == 10
    assert slow["duration"] > 20 > 7 > quick["duration"]
    one, three = levels(profile_file, "--trace", trace_file, "--concurrency", "1,3")
    assert one["requests"] == three["requests"] == 20
    assert three["output_throughput"] > 2 * one["output_throughput"]
    (brief,) = levels(profile_file, "--trace", trace_file, "--duration", "11s")
    assert brief["requests"] == 6


def test_a_saved_prediction_of_a_trace_is_a_trace_again(profile_file: Path, trace_file: Path, tmp_path: Path) -> None:
    saved = tmp_path / "run"
    first = predict(profile_file, "--trace", trace_file, "--save", saved)
    assert first.exit_code == 0, first.output
    assert "burst" in load_run(saved).levels[0].workload.describe()
    (recorded,), (again,) = (levels(profile_file, "--trace", path) for path in (trace_file, saved))
    assert again["mean_ttft"] == pytest.approx(recorded["mean_ttft"], rel=1e-6)


def test_sessions_say_how_much_the_prefix_cache_held(profile_file: Path) -> None:
    words = ("--sessions", "turns=4,user=64,output=32,system=128", "--concurrency", "1,2", "--num-prompts", 40)
    result = predict(profile_file, *words, "--think-time", "exponential(2s)", "--enable-prefix-caching")
    assert result.exit_code == 0, result.output
    assert "Prompt tokens found in the prefix cache: C=1 " in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    one, _ = levels(profile_file, *words, "--enable-prefix-caching")
    # prompts of 192, 288, 384, 480 tokens; found are 128, and what 191 + 32, 319 and 415 tokens have of full blocks
    later = 208 + 304 + 400
    assert one["cached_tokens"] == 10 * later + 9 * 128
    cold, _ = levels(profile_file, *words, "--no-enable-prefix-caching")
    assert cold["cached_tokens"] == 0
    assert cold["mean_ttft"] > one["mean_ttft"]


def test_thinking_clients_and_bursts(profile_file: Path) -> None:
    (busy,), (calm,) = (
        levels(profile_file, "--concurrency", 4, "--num-prompts", 40, "--output-len", 16, *think)
        for think in ((), ("--think-time", "5s"))
    )
    assert calm["request_throughput"] < 0.3 * busy["request_throughput"]
    words = ("--request-rate", 8, "--output-len", 64, "--rate-curve", "bursts(2s,8s)", "--duration", "40s")
    (free,), (capped,) = (levels(profile_file, *words, *cap) for cap in ((), ("--max-in-flight", 2)))
    assert free["requests"] == capped["requests"] == 64
    assert capped["peak_concurrency"] == 2 < free["peak_concurrency"]
    assert "8/s bursts" in predict(profile_file, *words).stdout


def test_shapes_take_distributions(profile_file: Path) -> None:
    (level,) = levels(
        profile_file,
        "--concurrency",
        4,
        "--num-prompts",
        50,
        "--shapes",
        "lognormal(300,200,10-900)/8:3,64/exponential(9)",
    )
    assert level["completed"] == 50


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("--think-time", "soon"), 2, "--think-time: 'soon' is no time such as 2s"),
        (("--rate-curve", "wave(1)", "--request-rate", 1), 2, "--rate-curve: 'wave(1)' is no rate curve"),
        (("--sessions", "turns=3"), 2, "--sessions: sessions need user, output"),
        (("--sessions", "turns=3,user=5,output=5", "--input-len", 7), 2, "give either lengths, or --sessions, or"),
        (("--trace-format", "azure"), 2, "--trace-format: goes with --trace"),
        (("--trace", "none.csv"), 1, "none.csv: no such file"),
        (("--speed", 2), 1, "--speed goes with --trace, and not with --concurrency"),
        (("--think-time", "2s", "--request-rate", 1), 1, "--think-time goes with --concurrency, or with --sessions"),
        (("--concurrency", 1, "--max-in-flight", 2), 1, "--max-in-flight goes with --request-rate or --trace"),
        (("--concurrency", 1, "--rate-curve", "bursts(2s,8s)"), 1, "--rate-curve goes with --request-rate"),
        (("--sessions", "turns=90,user=200,output=200", "--concurrency", 1), 1, "--max-model-len 8192"),
    ],
)
def test_what_makes_no_sense_is_told_in_one_line(
    profile_file: Path, words: tuple[object, ...], code: int, told: str
) -> None:
    result = predict(profile_file, *words)
    assert (result.exit_code, result.stdout) == (code, "")
    assert len(result.stderr.splitlines()) == 1
    assert told in result.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--concurrency", "1000000000000"), "concurrency may be up to 10,000,000 clients"),
        (("--num-prompts", "1000000000000"), "num_prompts may be up to 10,000,000 a level"),
        (("--input-len", "1000000000"), "up to 10,000,000 tokens"),
        (("--request-rate", "1e308"), "request rate must be 1e-06"),
        (("--request-rate", "nan"), "request rate must be positive"),
        (("--request-rate", "1", "--burstiness", "1e-300"), "burstiness must be positive"),
        (("--request-rate", "1", "--duration", "1e400"), "longer than 1e"),
        (("--shapes", "1/1:1e308"), "is not a shape"),
        (("--think-time", "9" * 5000), "longer than 1e"),
        (("--max-num-seqs", "9" * 5000), "has more than 18 digits"),
        (("--seed", "-1"), "greater than or equal to 0"),
        (("--sessions", "[" * 100_000), "write turns="),
        (("--concurrency", "\udcff"), "is not a list of whole numbers"),
    ],
)
def test_a_load_beyond_all_bounds_is_refused_in_a_short_line(
    profile_file: Path, options: tuple[str, ...], told: str
) -> None:
    result = predict(profile_file, *options)
    assert result.exit_code in (1, 2)
    message = " ".join(result.output.split())
    assert told in message
    assert len(message) < 1000
    assert isinstance(result.exception, SystemExit)
