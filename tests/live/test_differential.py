"""Our scheduler and vLLM's real one make the same decisions for random requests under random flags.

Most cases have fixed seeds; some are new in every run. CAPSIM_DIFFERENTIAL_RUNS sets how many cases there are, and
CAPSIM_DIFFERENTIAL_SEED the first seed of the new ones: a failure prints the seed of each case that differs, and
CAPSIM_DIFFERENTIAL_RUNS=1 CAPSIM_DIFFERENTIAL_SEED=that plays it again.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conformance import Dump, first_difference, replay

HERE = Path(__file__).parent
RUNS = int(os.environ.get("CAPSIM_DIFFERENTIAL_RUNS", "400"))
NEW_SEEDS = max(1, RUNS // 10)
FIRST_NEW_SEED = int(os.environ.get("CAPSIM_DIFFERENTIAL_SEED") or secrets.randbelow(1 << 32))
LONGEST_S = 300.0  # for vLLM to play all cases; usual is a fifth of it

Config = dict[str, Any]
Entry = dict[str, Any]


def random_case(seed: int) -> dict[str, Any]:
    """Flags and requests, drawn so that every rule of the scheduler is met often and every request can be served."""
    draw = random.Random(seed)
    config = random_config(draw)
    workload = random_requests(draw, config)
    config["num_blocks"] = random_pool(draw, config, workload)
    return {"name": f"seed {seed}", "config": config, "workload": workload}


def random_config(draw: random.Random) -> Config:
    """All flags but the pool's size."""
    max_model_len = draw.randint(64, 400)
    is_chunked = draw.random() < 0.75
    max_num_seqs = draw.choice([1, 2, 3, 5, 8, 16, 32])
    smallest_budget = max(max_num_seqs, 1 if is_chunked else max_model_len)
    return {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": smallest_budget + draw.choice([0, 1, 7, 30, 100, 400]),
        "max_model_len": max_model_len,
        "block_size": draw.choice([4, 8, 16, 16, 16, 32, 128]),
        "chunked_prefill": is_chunked,
        "prefix_caching": draw.random() < 0.5,
        "long_prefill_token_threshold": draw.choice([0, 0, 0, 1, 5, 20, 60]),
        "long_prefill_token_threshold_adaptive": draw.random() < 0.5,
        "policy": draw.choice(["fcfs", "fcfs", "priority"]),
        "watermark": draw.choice([0.0, 0.0, 0.05, 0.3]),
        "reserve_full_isl": draw.random() < 0.6,
        "async": draw.random() < 0.6,
    }


def random_requests(draw: random.Random, config: Config) -> list[Entry]:
    """Requests up to the length limit; some would generate beyond it, some stop by a stop token, some share prompts."""
    longest_prompt = draw.randint(1, config["max_model_len"] - 1)
    longest_output = draw.choice([1, 3, 20, 60, config["max_model_len"] + 10])
    stops = draw.choice([0.0, 0.0, 0.5])
    priorities = draw.choice([1, 3, 100]) if config["policy"] == "priority" else 1
    shares = random_shares(draw, config["block_size"])
    # with equal priority and equal arrival time, vLLM's priority policy can preempt two requests in turn for ever
    arrivals = random_arrivals(draw, is_timed=config["policy"] == "priority" or draw.random() < 0.3)
    workload = []
    for number in range(draw.randint(3, 40)):
        entry: Entry = {"id": f"r{number}"} | next(arrivals)
        entry["prompt_len"] = draw.randint(1, longest_prompt)
        entry["output_len"] = draw.randint(1, longest_output)
        entry |= next(shares)
        entry["prompt_len"] = min(max(entry["prompt_len"], entry["prefix_len"]), config["max_model_len"] - 1)
        entry["prefix_len"] = min(entry["prefix_len"], entry["prompt_len"])
        if priorities > 1:
            entry["priority"] = draw.randrange(priorities)
        if draw.random() < stops:
            entry["stop_len"] = draw.randint(1, entry["output_len"])
        workload.append(entry)
    return workload


def random_shares(draw: random.Random, block_size: int) -> Iterator[Entry]:
    """How each prompt starts: like no other, or with one of a few prefixes, or with a part of it."""
    prefixes = draw.choice([0, 0, 1, 3])
    length = draw.choice([1, 2, 3, 5]) * block_size + draw.choice([0, 0, 3])
    while True:
        if prefixes == 0 or draw.random() < 0.2:
            yield {"prefix_len": 0}
        else:
            part = draw.choice([1.0, 1.0, 0.5])
            yield {"prefix_id": draw.randrange(prefixes), "prefix_len": int(part * length)}


def random_arrivals(draw: random.Random, is_timed: bool) -> Iterator[Entry]:
    """All at once, one by one with and without idle times, in bursts; by passes of the loop or by the clock.

    By the clock, the last digits keep any request from arriving at the very end of a step.
    """
    gaps = draw.choice([(0,), (1,), (0, 1, 2), (0, 0, 0, 0, 30), (4,), (0, 10, 40), (100,)])
    moment = 0
    for number in itertools.count():
        yield {"arrival_time": round(moment * 0.0101 + number * 1.37e-6, 8)} if is_timed else {"arrival_step": moment}
        moment += draw.choice(gaps)


def random_pool(draw: random.Random, config: Config, workload: list[Entry]) -> int:
    """Blocks for the longest request at least, and often for hardly more: that makes preemptions."""
    longest = max(
        min(entry["prompt_len"] + entry.get("stop_len", entry["output_len"]) - 1, config["max_model_len"])
        for entry in workload
    )
    needed: int = -(-longest // config["block_size"])
    spare = draw.choice([0, 0, 1, 2, needed // 2, needed, 3 * needed, 20 * needed])
    return 1 + needed + spare


@pytest.fixture(scope="module")
def dumps(venv: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Dump]:
    """What vLLM decided in every case."""
    seeds = [*range(RUNS - NEW_SEEDS), *range(FIRST_NEW_SEED, FIRST_NEW_SEED + NEW_SEEDS)]
    directory = tmp_path_factory.mktemp("differential")
    cases, answers = directory / "cases.jsonl", directory / "dumps.jsonl"
    cases.write_text("".join(json.dumps(random_case(seed)) + "\n" for seed in seeds))
    command = [venv / "bin" / "python", HERE / "vllm_scheduler.py", cases, answers]
    process = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S)
    assert process.returncode == 0, process.stderr[-4000:]
    return [json.loads(line) for line in answers.read_text().splitlines()]


def test_decisions_are_those_of_vllm(dumps: list[Dump], capsys: pytest.CaptureFixture[str]) -> None:
    assert len(dumps) == RUNS
    differences = {dump["head"]["name"]: first_difference(replay(dump), dump["events"]) for dump in dumps}
    steps = sum(event["ev"] == "schedule" for dump in dumps for event in dump["events"])
    preemptions = sum(len(event.get("preempted", ())) for dump in dumps for event in dump["events"])
    with capsys.disabled():
        print(f"\n{len(dumps)} runs with {steps} steps and {preemptions} preemptions compared with vLLM's scheduler")
    assert {name: difference for name, difference in differences.items() if difference} == {}


def test_the_cases_meet_every_rule(dumps: list[Dump]) -> None:
    if RUNS < 100:
        pytest.skip("too few cases")
    schedules = [event for dump in dumps for event in dump["events"] if event["ev"] == "schedule"]
    assert sum(len(event["preempted"]) for event in schedules) > 1000
    assert sum(len(event["preempted"]) > 1 for event in schedules) > 10
    assert sum(len(event["resumed"]) for event in schedules) > 1000
    assert sum(event["total"] == 0 for event in schedules) > 100
    for flag in ("async", "chunked_prefill", "prefix_caching", "reserve_full_isl", "watermark", "policy"):
        assert len({dump["head"]["config"][flag] for dump in dumps}) > 1, flag
