"""The servers of server.py: they are a real vLLM, and a paced one keeps to its formula."""

import contextlib
import csv
import http.client
import itertools
import json
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from .server import HOST, MODEL_NAME, Server, model_server, paced_server

KV_TOKENS = 8208  # a small pool, 513 blocks of 16, of which vLLM keeps one for itself
FORMULA = {
    "constant": 15.7e-3,
    "sequences": 35e-6,
    "kv_tokens": 62e-9,
    "prefill_tokens": 80e-6,
    "prefill_attention": 3.1e-9,
}  # seconds per unit of a column of the step log


@dataclass(frozen=True)
class Completion:
    """What a streaming client saw: the times of the chunks with text (`time.perf_counter`), and the text and usage."""

    times: list[float]
    text: str
    usage: dict[str, int]


def stream(server: Server, prompt: list[int], tokens: int) -> Completion:
    """Ask for exactly `tokens` tokens after a prompt of token ids."""
    request = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    request["stream_options"] = {"include_usage": True}
    times: list[float] = []
    text = ""
    usage: dict[str, int] = {}
    with contextlib.closing(http.client.HTTPConnection(HOST, server.port, timeout=120)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(request), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        for line in response:
            if line.startswith(b"data: {"):
                chunk = json.loads(line.removeprefix(b"data: "))
                usage = chunk.get("usage") or usage
                if chunk["choices"]:
                    times.append(time.perf_counter())
                    text += chunk["choices"][0]["text"]
    return Completion(times, text, usage)


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids that differ from the first one on between seeds, so that no prefix is shared."""
    return [3 + (seed * 997 + position) % 8000 for position in range(tokens)]


def steps_since(server: Server, start: float) -> list[dict[str, float]]:
    """Return the logged steps that started at `start` or later."""
    assert server.steps_log is not None
    with server.steps_log.open() as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    return [row for row in rows if row["start"] >= start]


def metric(server: Server, name: str) -> float:
    """Return the value of a metric that has one series."""
    match = re.search(rf"^{re.escape(name)}{{.*}} (\S+)$", server.get("/metrics"), re.MULTILINE)
    assert match, name
    return float(match.group(1))


def group_is_gone(server: Server, wait_s: float = 10.0) -> bool:
    """Tell whether no process of the server's group is left, after at most `wait_s`."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        try:
            os.killpg(server.process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    """Schedule in both ways."""
    return bool(request.param)


@pytest.fixture(scope="module")
def server(venv: Path, asynchronous: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a paced server with the default formula and a small pool; it must leave nothing behind."""
    flags = ("--max-num-batched-tokens", "2048", "--no-enable-prefix-caching")
    log_dir = tmp_path_factory.mktemp("paced")
    with paced_server(venv, *flags, asynchronous=asynchronous, kv_tokens=KV_TOKENS, log_dir=log_dir) as running:
        yield running
    assert group_is_gone(running)


def test_the_endpoint_says_what_it_is(server: Server) -> None:
    assert json.loads(server.get("/version"))["version"] == "0.32.0"
    assert [model["id"] for model in json.loads(server.get("/v1/models"))["data"]] == [MODEL_NAME]
    info = re.search(r"^vllm:cache_config_info{(.*)}", server.get("/metrics"), re.MULTILINE)
    assert info
    assert 'block_size="16"' in info.group(1)
    assert f'num_gpu_blocks="{KV_TOKENS // 16}"' in info.group(1)


@pytest.mark.parametrize("tokens", [1, 2, 37])
def test_a_stream_has_exactly_the_tokens_asked_for(server: Server, tokens: int) -> None:
    completion = stream(server, prompt(0, 100), tokens)
    assert completion.usage["prompt_tokens"] == 100
    assert completion.usage["completion_tokens"] == tokens
    assert completion.text.split() == ["w100"] * tokens


def test_every_step_takes_the_time_of_the_formula(server: Server) -> None:
    start = time.perf_counter()
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda i: stream(server, prompt(i, 700 * (i + 1)), 40), range(4)))
    steps = steps_since(server, start)
    for step in steps:
        work = {"constant": 1.0} | step
        assert step["seconds"] == pytest.approx(sum(FORMULA[name] * work[name] for name in FORMULA), abs=1e-8)
    assert sum(step["prefill_tokens"] for step in steps) == 700 * (1 + 2 + 3 + 4)
    assert any(step["prefill_tokens"] and step["kv_tokens"] for step in steps), "no step had both prefill and decode"


def test_a_chunked_prompt_costs_the_attention_of_a_whole_one(server: Server) -> None:
    start = time.perf_counter()
    stream(server, prompt(1, 5000), 1)
    steps = steps_since(server, start)
    assert [step["prefill_tokens"] for step in steps] == [2048, 2048, 904]
    assert sum(step["prefill_attention"] for step in steps) == 5000 * 5000 / 2


def test_the_clock_of_a_client_agrees_with_the_steps(server: Server, asynchronous: bool) -> None:
    start = time.perf_counter()
    completion = stream(server, prompt(2, 1024), 201)
    steps = steps_since(server, start)
    assert len(steps) == 201
    measured = completion.times[-1] - completion.times[0]
    computed = sum(step["seconds"] for step in steps[1:])
    if asynchronous:
        assert measured == pytest.approx(computed, rel=0.01)
    else:
        assert computed < measured < 1.15 * computed, "the engine's own time comes between the steps"


def test_only_asynchronous_steps_follow_each_other_without_a_gap(server: Server, asynchronous: bool) -> None:
    start = time.perf_counter()
    stream(server, prompt(3, 64), 101)
    steps = steps_since(server, start)
    gaps = [later["start"] - step["start"] - step["seconds"] for step, later in itertools.pairwise(steps)]
    assert min(gaps) > -1e-5, "two steps overlap"
    without = sum(gap < 1e-5 for gap in gaps)
    assert without > 90 if asynchronous else without == 0


def test_requests_that_were_preempted_still_finish(server: Server) -> None:
    before = metric(server, "vllm:num_preemptions_total")
    start = time.perf_counter()
    clients, context, tokens = 24, 300, 160  # 11,040 tokens in the end, for a pool of 8,192
    with ThreadPoolExecutor(clients) as pool:
        completions = list(pool.map(lambda i: stream(server, prompt(i, context), tokens), range(clients)))
    assert [completion.usage["completion_tokens"] for completion in completions] == [tokens] * clients
    assert metric(server, "vllm:num_preemptions_total") > before
    computed = sum(step["prefill_tokens"] for step in steps_since(server, start))
    assert computed > clients * context, "a preempted request computes its tokens again"


def test_a_server_that_cannot_start_shows_its_log(venv: Path, tmp_path: Path) -> None:
    unstartable = paced_server(venv, "--no-such-flag", log_dir=tmp_path)
    with pytest.raises(RuntimeError, match="--no-such-flag"):
        unstartable.__enter__()


def test_a_real_model_answers_and_ctrl_c_leaves_nothing(venv: Path, tmp_path: Path) -> None:
    tiny = model_server(venv, "--enforce-eager", preset="tiny", kv_tokens=16384, log_dir=tmp_path)
    with pytest.raises(KeyboardInterrupt), tiny as server:
        assert stream(server, prompt(0, 300), 12).usage["completion_tokens"] == 12
        assert 'num_gpu_blocks="128"' in server.get("/metrics"), "16,384 tokens in blocks of 128"
        assert server.steps_log is None
        raise KeyboardInterrupt
    assert group_is_gone(server)
