"""The twin on a real socket: what vLLM's clients ask of it, what it refuses, and a calibration from end to end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from twin_server import Reply, TwinServer, make_profile, serve_twin
from typer.testing import CliRunner

from calibration.discovery import discover_flags, fingerprint_facts, server_info
from calibration.endpoint import discover
from calibration.metrics import GAUGES_PATH, parse_metrics
from capsim.cli import app
from capsim.emulator.server import Twin
from simulator.engine.engine_flags import EngineFlags
from simulator.profile import Profile

ROOT = Path(__file__).resolve().parents[2]
FLAGS = EngineFlags(
    max_num_seqs=16, max_num_batched_tokens=1024, max_model_len=2048, num_gpu_blocks=1001, enable_prefix_caching=True
)
PROFILE = make_profile(FLAGS, {"per_request": 1e-4}, constant=5e-4, per_prefill_token=1e-6)
USAGE = {"include_usage": True, "continuous_usage_stats": True}


@pytest.fixture(scope="module")
def twin() -> Iterator[TwinServer]:
    with serve_twin(PROFILE, dev_mode=True) as running:
        yield running


def completion(twin: TwinServer, **body: Any) -> Reply:
    return twin.post("/v1/completions", {"model": "quick-7b", "prompt": [5, 6, 7], "max_tokens": 4} | body)


def chat(twin: TwinServer, **body: Any) -> Reply:
    return twin.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]} | body)


# --- answers


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]], "one, two", ["one, two"]])
def test_prompts_are_ids_or_text_and_counted_as_tokenize_does(twin: TwinServer, prompt: Any) -> None:
    text = prompt if isinstance(prompt, str) else prompt[0]
    tokens = twin.post("/tokenize", {"prompt": text}).json["count"] if isinstance(text, str) else 3
    answer = completion(twin, prompt=prompt).json
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens + 4, "completion_tokens": 4}
    assert twin.post("/tokenize", {"prompt": answer["choices"][0]["text"]}).json["count"] == 4
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_stream_has_an_event_for_each_token(twin: TwinServer) -> None:
    reply = completion(twin, stream=True, stream_options=USAGE, max_tokens=5)
    assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    *events, last, done = reply.events
    assert done == "[DONE]"
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4, 5]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, None, None, "length"]
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 3, "total_tokens": 8, "completion_tokens": 5}
    assert "".join(event["choices"][0]["text"] for event in events) == " the time year and way"
    assert {event["id"] for event in (*events, last)} == {last["id"]}


def test_usage_comes_only_when_asked_for(twin: TwinServer) -> None:
    assert not any("usage" in event for event in completion(twin, stream=True).events[:-1])
    some = completion(twin, stream=True, stream_options={"include_usage": True}).events[:-1]
    assert ["usage" in event for event in some] == [False, False, False, False, True]


def test_a_chat_opens_with_its_role(twin: TwinServer) -> None:
    *events, last, _ = chat(twin, stream=True, stream_options=USAGE, max_completion_tokens=2).events
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": " the"}, {"content": " time"}]
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert last["usage"]["prompt_tokens"] == twin.post("/tokenize", {"messages": messages}).json["count"]
    whole = chat(twin, max_tokens=2).json
    assert whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": " the time"}


def test_an_answer_without_a_limit_ends_by_itself_unless_told_not_to(twin: TwinServer) -> None:
    answer = chat(twin).json
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 256
    assert chat(twin, min_tokens=300).json["usage"]["completion_tokens"] == 300
    endless = chat(twin, ignore_eos=True, messages=[{"role": "user", "content": " word" * 2000}]).json
    assert endless["usage"]["total_tokens"] == FLAGS.max_model_len
    assert endless["choices"][0]["finish_reason"] == "length"


def test_old_http_without_chunks(twin: TwinServer) -> None:
    body = json.dumps({"prompt": [1], "max_tokens": 3, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", twin.port), timeout=30) as connection:
        connection.sendall(head + body)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert received.count(b"\n\ndata: ") == 3
    assert received.endswith(b"\n\ndata: [DONE]\n\n")


def test_detokenize_gives_the_text_back(twin: TwinServer) -> None:
    reply = twin.post("/tokenize", {"prompt": "Grüße, world", "return_token_strs": True}).json
    assert twin.post("/detokenize", {"tokens": reply["tokens"]}).json == {"prompt": "Grüße, world"}
    assert len(reply["token_strs"]) == reply["count"]
    assert reply["max_model_len"] == FLAGS.max_model_len


# --- what it refuses


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"model": "other"}, 404, "The model `other` does not exist."),
        ({"prompt": [1] * 2049}, 400, "This model's maximum context length is 2048 tokens. However, your prompt"),
        ({"prompt": [1] * 2048}, 400, "plus the number of requested output tokens (at least 1) is longer than"),
        ({"prompt": "x" * 13000}, 400, "your prompt contains 13000 characters (more than 12288 characters"),
        ({"prompt": []}, 400, "The decoder prompt cannot be empty"),
        ({"prompt": [2**60]}, 400, f"Token id {2**60} is out of vocabulary"),
        ({"prompt": [-1]}, 400, "Token id -1 is out of vocabulary"),
        ({"prompt": [2**70]}, 400, f"Token id {2**70} is out of vocabulary"),
        ({"prompt": {"text": "x"}}, 400, "prompt"),
        ({"max_tokens": 4096}, 400, "max_tokens=4096 cannot be greater than max_model_len=2048"),
        ({"max_tokens": 0}, 400, "max_tokens must be at least 1, got 0."),
        ({"max_tokens": "many"}, 400, "max_tokens: Input should be a valid integer"),
        ({"min_tokens": 9}, 400, "min_tokens must be less than or equal to max_tokens=4, got 9."),
        ({"n": 2}, 400, "n must be 1, got 2"),
        ({"stream_options": USAGE}, 400, "Stream options can only be defined when `stream=True`."),
        ({"echo": True}, 400, "echo is not emulated"),
        ({"prompt": ["a", "b"]}, 400, "one prompt a request"),
    ],
)
def test_what_cannot_be_served(twin: TwinServer, change: dict[str, Any], status: int, words: str) -> None:
    reply = completion(twin, **change)
    error = reply.json["error"]
    assert (reply.status, error["code"]) == (status, status)
    assert words in error["message"]
    assert error["type"] == ("NotFoundError" if status == 404 else "BadRequestError")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": ' + b"[" * 5000, b"null"])
def test_what_is_no_request(twin: TwinServer, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        reply = twin.post(path, body)
        assert reply.status == 400
        assert reply.json["error"]["message"]


def test_a_body_that_is_too_large_is_not_read(twin: TwinServer) -> None:
    reply = twin.post("/v1/completions", {"prompt": "x" * 1_000_000})
    assert (reply.status, reply.json["error"]["code"]) == (413, 413)


def test_routes_that_it_does_not_have(twin: TwinServer) -> None:
    assert twin.get("/v1/embeddings").json == {"detail": "Not Found"}
    assert twin.get("/v1/completions").status == 405


# --- what it says of itself


def test_it_is_taken_for_a_vllm_of_the_profile(twin: TwinServer) -> None:
    endpoint = discover(twin.url)
    assert (endpoint.model, endpoint.engine, endpoint.engine_version) == ("quick-7b", "vllm", "0.32.0")
    assert endpoint.max_model_len == FLAGS.max_model_len
    known = discover_flags(endpoint, info=server_info(endpoint))
    assert known.flags == FLAGS
    assert known.contradictions == []
    assert endpoint.kv_bytes_per_token == 65536
    fingerprint = completion(twin).json["system_fingerprint"]
    assert fingerprint_facts(fingerprint)["engine_version"] == "0.32.0"
    for path in ("/health", "/ping", "/load", "/version"):
        assert twin.get(path).status == 200


def test_development_mode_is_off_unless_told() -> None:
    with serve_twin(PROFILE) as plain:
        assert plain.get("/server_info").status == 404


def test_metrics_count_what_happened(twin: TwinServer) -> None:
    before = parse_metrics(twin.get("/metrics").text)
    completion(twin, prompt=list(range(100, 200)), max_tokens=7)
    completion(twin, prompt=list(range(100, 200)), max_tokens=7)
    after = parse_metrics(twin.get("/metrics").text)

    def grown(name: str) -> Any:
        return getattr(after, name) - getattr(before, name)

    assert (grown("prompt_tokens"), grown("generation_tokens"), grown("requests_finished")) == (200, 14, 2)
    assert grown("prefix_cache_queries") == 200
    assert grown("prefix_cache_hits") == 96, "the second prompt is known but for its last block"
    for name in ("ttft", "queue_time", "prefill_time", "decode_time"):
        assert grown(name).count == 2
    assert (after.running, after.waiting, after.kv_usage) == (0, 0, 0.0)


def test_gauges_alone_are_short(twin: TwinServer) -> None:
    text = twin.get(GAUGES_PATH).text
    assert parse_metrics(text).idle
    assert len(text.splitlines()) == 9


@pytest.mark.parametrize(("version", "has_tokens", "has_tpot"), [("0.11.0", False, False), ("0.27.1", True, True)])
def test_metrics_are_those_of_the_version(version: str, has_tokens: bool, has_tpot: bool) -> None:
    flags = EngineFlags(engine_version=version)
    with serve_twin(make_profile(flags, constant=1e-3)) as old:
        text = old.get("/metrics").text
        assert ("kv_cache_size_tokens" in text) == has_tokens
        assert ("request_time_per_output_token_seconds" in text) == has_tpot
        assert old.get("/version").json == {"version": version}


# --- clients that leave, and a clock that runs faster


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_request(stream: bool) -> None:
    with serve_twin(make_profile(EngineFlags(max_num_seqs=1), constant=1e-3)) as twin:
        body = json.dumps({"prompt": [1] * 64, "max_tokens": 30000, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", twin.port), timeout=30) as connection:
            connection.sendall(head + body)
            while twin.metric("num_requests_running") < 1:
                time.sleep(0.01)
        assert completion(twin).status == 200, "the only slot is free again"
        assert twin.metric('request_success_total{engine="0",finished_reason="abort"') == 1
        assert parse_metrics(twin.get("/metrics").text).idle


def test_a_hurried_twin_says_so_and_its_times_are_shorter() -> None:
    slow = make_profile(EngineFlags(), constant=1.0)
    with serve_twin(slow, speed=500) as twin:
        reply = completion(twin, stream=True)
        assert reply.headers["X-Capsim-Speed"] == "500"
        text = twin.get("/metrics").text
        assert "capsim:speed 500" in text
        metrics = parse_metrics(text)
        assert metrics.decode_time is not None
        assert metrics.decode_time.sum == pytest.approx(3 * 1.0 / 500)
    with serve_twin(slow) as twin:
        assert "X-Capsim-Speed" not in twin.get("/health").headers


def test_two_twins_do_not_share_a_port(twin: TwinServer) -> None:
    async def second() -> None:
        async with Twin(PROFILE) as other:
            with pytest.raises(OSError, match="in use"):
                await other.listen(port=twin.port)

    asyncio.run(second())


# --- the command


@pytest.fixture
def quick_file(tmp_path: Path) -> Path:
    path = tmp_path / "quick.yaml"
    PROFILE.save(path)
    return path


def test_the_command_serves_until_it_is_interrupted(quick_file: Path, twin: TwinServer) -> None:
    options = ("--port", "0", "--max-num-seqs", "4", "--served-model-name", "mine", "--output-len", "9")
    command = [sys.executable, "-m", "capsim", "emulate", "--profile", str(quick_file), *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_SERVER_DEV_MODE": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith("mine is served at http://127.0.0.1:")
        own = TwinServer(line.split()[4].rstrip(";,"))
        assert chat(own).json["usage"]["completion_tokens"] == 9
        scheduler = own.get("/server_info?config_format=json").json["vllm_config"]["scheduler_config"]
        assert scheduler["max_num_seqs"] == 4
        server.send_signal(signal.SIGINT)
        rest, errors = server.communicate(timeout=30)
    assert (server.returncode, rest, errors) == (0, "", "")

    taken = CliRunner().invoke(app, ["emulate", "--profile", str(quick_file), "--port", str(twin.port)])
    assert taken.exit_code == 1
    assert taken.stderr == (
        f"error: cannot listen at 127.0.0.1:{twin.port} (address already in use): give another --port or --host\n"
    )


def test_a_speed_that_makes_no_sense(quick_file: Path) -> None:
    result = CliRunner().invoke(app, ["emulate", "--profile", str(quick_file), "--speed", "0"])
    assert result.exit_code == 2
    assert "0.0 is not a positive number" in result.stderr


@pytest.mark.slow
def test_a_twin_is_calibrated_like_any_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From end to end, with little to fit; `tests/live/test_twin_clients.py` measures enough to recover a profile."""
    flags = EngineFlags(max_num_seqs=16, max_num_batched_tokens=512, max_model_len=2048, num_gpu_blocks=1001)
    profile = make_profile(flags, constant=3e-3, per_sequence=1e-4, per_prefill_token=1e-5)
    monkeypatch.setattr("calibration.sweep_plan.probe_levels", lambda *_: ([], []))
    load = ("--concurrency", "1", "--shapes", "32-512/4-24", "--num-prompts", "16", "--hold-out", "0")
    with serve_twin(profile, dev_mode=True) as twin:
        command = ["calibrate", "--endpoint", twin.url, "--no-repeat", *load, "-o", str(tmp_path / "fit.yaml")]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output + result.stderr
        assert twin.metric("request_success_total") > 16
    fit = Profile.load(tmp_path / "fit.yaml")
    assert fit.engine_flags == flags
    assert (fit.model, fit.engine_version, fit.kv_bytes_per_token) == ("quick-7b", "0.32.0", 65536)
    assert fit.coefficients.step_time["constant"].origin == "measured"
    assert not any("max_num" in sentence for sentence in fit.assumed)
