"""Whatever is sent to the twin, it answers with a refusal, keeps serving, and is there for this machine alone."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_run import HOSTILE
from twin_server import TwinServer, make_profile, serve_twin

from calibration.metrics import parse_metrics
from simulator.engine.engine_flags import EngineFlags

FLAGS = EngineFlags(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=512, num_gpu_blocks=1000)
PROFILE = make_profile(FLAGS, constant=1e-4, per_sequence=1e-6)
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
BODIES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": [5, 6], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 2},
    "/tokenize": {"prompt": "hello there"},
    "/detokenize": {"tokens": [354, 355]},
}
ODD: list[object] = [None, True, -1, 0, 2**31, 2**63, 10**400, 1e308, 0.5, "", "x", "\x00", "é" * 3, [], {}, [[]]]
ODD += [[None], {"a": None}, [{}], "9" * 5000, [2**40], [-1], [[1], [2]], ["a", "b"], [["a"]], [1, "a"]]
DEEP = 100_000


@pytest.fixture(scope="module")
def twin() -> Iterator[TwinServer]:
    with serve_twin(PROFILE) as running:
        yield running


def serves_on(twin: TwinServer, caplog: pytest.LogCaptureFixture) -> None:
    """It is there, nothing of it failed, and nobody's request is left in it."""
    assert twin.get("/health").status == 200
    assert twin.post("/v1/completions", {"prompt": "a b", "max_tokens": 1}).status == 200
    assert [record.message for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []


# --- bodies


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"\xff\xfe{\x00}\x00",
        b"\x00" * 1000,
        b"[" * DEEP,
        b'{"a":' * DEEP,
        b'{"prompt":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"prompt": "' + b"x" * 70_000 + b'"}',
        b'{"prompt": "\\ud800", "tokens": [1], "messages": [{"role": "\\udfff"}]}',
        b'{"prompt": ' + b"9" * 4300 + b"}",
        b'{"tokens": [' + b"9" * 4300 + b"]}",
        b'{"prompt": [' + b"9" * 4299 + b"]}",
        b'{"max_tokens": 1e999, "prompt": NaN}',
        b'{"prompt": "a", "prompt": 1, "model": "\\u0000"}',
    ],
    ids=lambda body: str(body[:12]),
)
def test_bodies_that_are_none(twin: TwinServer, caplog: pytest.LogCaptureFixture, path: str, body: bytes) -> None:
    reply = twin.post(path, body)
    assert 400 <= reply.status < 500 or path == "/tokenize", reply.text
    assert json.loads(reply.text)
    serves_on(twin, caplog)


def test_bodies_with_one_odd_value(twin: TwinServer, caplog: pytest.LogCaptureFixture) -> None:
    names = ["n", "model", "min_tokens", "ignore_eos", "priority", "max_completion_tokens", "echo", "return_token_strs"]
    for path, body in BODIES.items():
        for name in {*body, *names}:
            for value in ODD:
                reply = twin.post(path, json.dumps(body | {name: value}).encode())
                assert reply.status == 200 or 400 <= reply.status < 500, (path, name, value, reply.text)
    serves_on(twin, caplog)


def test_bodies_with_bytes_changed(twin: TwinServer, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(7)
    for _ in range(200):
        path = rng.choice(PATHS)
        body = bytearray(json.dumps(BODIES[path]).encode())
        for _ in range(rng.randint(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        reply = twin.post(path, bytes(body))
        assert reply.status == 200 or 400 <= reply.status < 500, (path, bytes(body), reply.text)
    serves_on(twin, caplog)


def test_a_large_body_is_refused_before_it_is_held(twin: TwinServer, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(("127.0.0.1", twin.port), timeout=30) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000000\r\n\r\n")
        sent = 0
        try:
            while sent < 64 << 20:
                sent += connection.send(b"x" * (1 << 16))
            answer = b""
        except OSError:
            answer = b"it hung up"
        connection.settimeout(5)
        try:
            answer = connection.recv(100) or answer
        except OSError:
            answer = answer or b"it hung up"
    assert answer.startswith((b"HTTP/1.1 413", b"it hung up"))
    serves_on(twin, caplog)


def test_a_body_that_grows_when_it_is_unpacked(twin: TwinServer, caplog: pytest.LogCaptureFixture) -> None:
    body = gzip.compress(b'{"prompt": "' + b"x" * (50 << 20) + b'"}')
    reply = twin.post("/v1/completions", body, **{"Content-Encoding": "gzip"})
    assert 400 <= reply.status < 500
    assert 400 <= twin.post("/v1/completions", b"no gzip", **{"Content-Encoding": "gzip"}).status < 500
    serves_on(twin, caplog)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of TLS
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\r\n" * 1000 + b"\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(2000)) + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v1/models%0d%0aX-Injected:%20yes HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /../../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /metrics?name[]=%00%ff&name[]=\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"BREW /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=lambda text: repr(text[:40]),
)
def test_requests_that_are_none(twin: TwinServer, caplog: pytest.LogCaptureFixture, request_bytes: bytes) -> None:
    with socket.create_connection(("127.0.0.1", twin.port), timeout=10) as connection:
        connection.sendall(request_bytes)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while data := connection.recv(1 << 16):
            answer += data
    assert b"Traceback" not in answer
    assert b"X-Injected" not in answer.partition(b"\r\n\r\n")[0]
    assert not answer or re.match(rb"HTTP/1.[01] [24]", answer), answer[:200]
    serves_on(twin, caplog)


# --- what it says


def test_a_hostile_name_stays_inside_its_string() -> None:
    with serve_twin(PROFILE, model=HOSTILE, dev_mode=True, speed=3) as twin:
        assert twin.get("/v1/models").json["data"][0]["id"] == HOSTILE
        metrics = twin.get("/metrics").text
        assert parse_metrics(metrics).running == 0
        assert not [line for line in metrics.split("\n") if not re.match(r"# |vllm:|capsim:|python|process|$", line)]
        body = {"model": HOSTILE, "prompt": [5, 6], "max_tokens": 2, "stream": True}
        assert {event["model"] for event in twin.post("/v1/completions", body).events[:-1]} == {HOSTILE}
        for reply in (twin.get("/v1/models"), twin.post("/v1/completions", {"model": f"x{HOSTILE}", "prompt": "a"})):
            assert reply.headers["Content-Type"].startswith("application/json"), "no browser takes it for a page"
            assert {"Content-Type", "X-Capsim-Speed"} <= reply.headers.keys()
            assert not any("cmd" in value or "script" in value for value in reply.headers.values())


def test_no_page_of_another_site_may_read_it(twin: TwinServer) -> None:
    reply = twin.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, Origin="http://elsewhere")
    assert not [name for name in reply.headers if name.lower().startswith("access-control")]


# --- where it listens


def listening(pid: int) -> set[str]:
    """Addresses at which a process listens, in hexadecimal as the kernel writes them."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        if found := re.fullmatch(r"socket:\[(\d+)\]", str(entry.readlink())):
            sockets.add(found[1])
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    return {line[1].partition(":")[0] for line in lines if line[3] == "0A" and line[9] in sockets}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="no /proc on this system")
@pytest.mark.parametrize(
    ("host", "addresses", "warns"),
    [
        ((), {"0100007F"}, False),
        (("--host", "127.0.0.1"), {"0100007F"}, False),
        (("--host", "0.0.0.0"), {"00000000"}, True),
    ],
)
def test_it_listens_to_this_machine_unless_told(
    profile_file: Path, host: tuple[str, ...], addresses: set[str], warns: bool
) -> None:
    command = [sys.executable, "-m", "capsim", "emulate", "--profile", str(profile_file), "--port", "0", *host]
    known = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=known) as process:
        assert process.stdout is not None
        assert "is served at http://" in process.stdout.readline()
        found = listening(process.pid)
        process.send_signal(signal.SIGTERM)
        _, complaints = process.communicate(timeout=20)
    assert found == addresses
    assert ("whoever reaches this address can use the twin, which asks for no key" in complaints) == warns
