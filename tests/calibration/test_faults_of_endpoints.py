"""Whatever answers at an address, and whatever /metrics says: one line on the one, no request lost by the other."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from hostile_server import (
    DEEP,
    HostileServer,
    Route,
    always,
    drip,
    hang_up,
    many_headers,
    metrics,
    models,
    raw,
    reset,
    response,
    serve,
)
from played_levels import PATIENT, closed, kept

from calibration.clients import Job, record
from calibration.endpoint import EndpointError, discover
from calibration.load import level_of


def refused(server: HostileServer, timeout: float = 10.0) -> str:
    with pytest.raises(EndpointError) as caught:
        discover(server.url, timeout=timeout)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 400
    return message


@dataclass(frozen=True)
class Address:
    """What /v1/models does, and what its visitor is told."""

    does: Route
    words: str
    timeout: float = 10.0


ADDRESSES = {
    "a proxy's page": Address(always(response("<html>Sign in</html>", "text/html")), "gives a web page"),
    "sends on to elsewhere": Address(
        always(response("", status="301 Moved", Location="https://elsewhere.example/\x1b[31m?token=secret")),
        "sends visitors on to https://elsewhere.example/",
    ),
    "sends on in a circle": Address(always(response("", status="302 Found", Location="/v1/models")), "sends visitors"),
    "drips": Address(drip, "did not answer in time", 0.5),
    "headers without end": Address(many_headers, "does not speak HTTP"),
    "hangs up": Address(hang_up, "hung up without an answer"),
    "resets": Address(reset, "cannot be reached (Connection reset by peer)"),
    "nested 100,000 deep": Address(always(response(DEEP)), "something else than a list"),
    "cards are texts": Address(always(response('{"data": ["demo"]}')), "something else than a list"),
    "a list": Address(always(response("[1, 2]")), "something else than a list"),
    "a name that no terminal can show": Address(always(models({"id": "de\x1b[31mmo"}, {"id": " "})), "serves no model"),
    "429": Address(always(response("", status="429 Too Many Requests", Retry_After="9")), "limits the rate"),
    "500 with a long page": Address(
        always(response("out of memory\x00 " * 999, "text/plain", status="500 Oops")), "answers HTTP 500 (out of memory"
    ),
    "500 nested deep": Address(always(response(DEEP, status="500 Oops")), "answers HTTP 500"),
    "no HTTP": Address(raw(b"SSH-2.0-OpenSSH_9.6\r\n"), "does not speak HTTP"),
    "gzip that is none": Address(always(response("{}", Content_Encoding="gzip")), "does not speak HTTP"),
}


@pytest.mark.parametrize("name", ADDRESSES)
def test_an_address_of_something_else_is_refused_in_one_line(name: str) -> None:
    place = ADDRESSES[name]
    with serve(models=place.does) as server:
        message = refused(server, place.timeout)
        assert place.words in message
        assert server.asked["/v1/completions"] == 0
        assert "secret" not in message


HALF = "half a body"
TELLS = {
    "nothing": response("", "text/plain"),
    "a page": response("<html>", "text/html"),
    "no counters": response("a b c d\n", "text/plain"),
    "NaN": response("vllm:num_requests_running NaN\n", "text/plain"),
    "infinity": response("vllm:num_requests_running +Inf\nvllm:kv_cache_usage_perc -Inf\n", "text/plain"),
    "1e308": response("vllm:num_requests_running 1e308\nvllm:num_requests_waiting 1e308\n", "text/plain"),
    "less than none": response(
        "vllm:num_requests_running 0\nvllm:kv_cache_usage_perc -5\n"
        'vllm:cache_config_info{block_size="-16",num_gpu_blocks="0",kv_cache_size_tokens="0",'
        'kv_cache_memory_bytes="nan",gpu_memory_utilization="inf"} 1\n',
        "text/plain",
    ),
    "another encoding": response(b"\xff\xfe\x00vllm", "text/plain"),
    "sends on": response("", status="302 Found", Location="/metrics"),
    "500": response("", status="500 Oops"),
    HALF: b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\nvllm:num_requests_running 1\n",
}


@pytest.mark.parametrize("name", TELLS)
@pytest.mark.parametrize("when", ["always", "in the level"])
def test_wrong_metrics_cost_no_request(name: str, when: str, tmp_path: Path) -> None:
    """Whatever /metrics says, from the start or once the server is known, the requests are measured and kept."""
    route = (raw if name == HALF else always)(TELLS[name])
    with serve(metrics=route if when == "always" else metrics) as server:
        endpoint = discover(server.url)
        server.routes |= dict.fromkeys(["/metrics", "/metrics/"], route)
        job = Job(endpoint, closed(1, 3, 32, 8), 1, patience=PATIENT, sample_every=0.02)
        level = level_of(job, asyncio.run(record(job, lambda _: None)))
    assert level.requests["error"].tolist() == ["", "", ""]
    assert (level.timeline["running"] >= -1).all()
    assert level.timeline["kv_tokens"].fillna(0).between(0, 16_000).all()
    assert json.dumps(endpoint.server(), allow_nan=False)
    assert kept(level, tmp_path / "run").requests.equals(level.requests)
    if when == "in the level" and name in ("nothing", "a page", "no counters", "500", HALF, "sends on"):
        assert any("/metrics did not answer" in note for note in level.notes)


def test_sizes_that_make_no_sense_are_not_told() -> None:
    card: dict[str, object] = {"id": "demo", "owned_by": "x" * 5000, "max_model_len": -1}
    with serve(models=always(models(card)), metrics=always(TELLS["less than none"])) as server:
        found = discover(server.url)
    assert (found.max_model_len, found.kv_pool_tokens, found.block_size) == (None, None, None)
    assert (found.kv_bytes_per_token, found.gpu_memory_utilization) == (None, None)
    assert found.engine is not None
    assert len(found.engine) <= 200
