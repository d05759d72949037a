"""What an address tells of its server, and what its owner is told when it tells nothing."""

from __future__ import annotations

import pickle
import socket
import time
from pathlib import Path

import pytest
from fake_server import FakeServer, Manners, metrics_text, serve

from calibration.endpoint import Endpoint, EndpointError, clean_url, discover, endpoint_of, server_message
from calibration.load import play
from calibration.metrics import MetricsSnapshot, SumCount, only_gauges, parse_metrics
from simulator.loads.workload import ClosedLoop, Length, Shape, Workload

KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def _no_key_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def test_a_vllm_server_tells_its_model_and_its_pool() -> None:
    with serve() as server:
        found = discover(server.url)
    assert found == Endpoint(
        url=server.url,
        model="demo",
        engine="vllm",
        engine_version="0.32.0",
        max_model_len=8192,
        kv_tokens=16000,
        num_gpu_blocks=1001,
        block_size=16,
        enable_prefix_caching=True,
        gpu_memory_utilization=0.9,
        has_metrics=True,
    )
    assert found.kv_pool_tokens == 16000  # 1001 blocks of 16, one of them never used


def test_an_old_vllm_tells_its_pool_in_blocks() -> None:
    with serve(Manners(old_metrics=True)) as server:
        found = discover(server.url)
    assert found.kv_tokens == 16016
    assert found.kv_pool_tokens == 16000


def test_blocks_are_not_tokens_in_a_hybrid_model() -> None:
    hybrid = Endpoint("http://x", "m", kv_tokens=9000, num_gpu_blocks=1001, block_size=16)
    assert hybrid.kv_pool_tokens == 9000


def test_data_parallel_engines_share_the_blocks() -> None:
    assert Endpoint("http://x", "m", num_gpu_blocks=2002, block_size=16, engines=2).kv_pool_tokens == 16000


def test_a_server_without_metrics_is_still_an_endpoint() -> None:
    with serve(Manners(shows_metrics=False)) as server:
        found = discover(server.url)
    assert (found.model, found.kv_tokens, found.has_metrics) == ("demo", None, False)


def test_a_certificate_that_nobody_vouches_for_is_taken_only_when_asked() -> None:
    certificate = str(Path(__file__).with_name("self_signed.pem"))
    with serve(Manners(certificate=certificate)) as server:
        with pytest.raises(EndpointError, match=r"is its certificate unknown\? \(--insecure takes any\)"):
            discover(server.url)
        endpoint = discover(server.url, insecure=True)
        shape = Shape(Length.fixed(8), Length.fixed(4))
        level = play(endpoint, Workload(ClosedLoop(1), (shape,), 2))
    assert endpoint.url.startswith("https://")
    assert len(level.completed) == 2


def test_the_way_to_the_server_is_timed() -> None:
    with serve() as server:
        near = discover(server.url).round_trip
    with serve(Manners(seconds_away=0.03)) as server:
        far = discover(server.url).round_trip
    assert near is not None
    assert far is not None
    assert near < 0.03 <= far


def test_a_model_is_chosen_by_name_and_a_wrong_name_lists_what_is_served() -> None:
    with serve(Manners(models=("llama", "qwen"))) as server:
        assert discover(server.url).model == "llama"
        assert discover(server.url, model="qwen").model == "qwen"
        with pytest.raises(EndpointError, match=r"does not serve 'mistral'.*llama, qwen"):
            discover(server.url, model="mistral")


def test_a_key_opens_a_server_and_is_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(Manners(key=KEY)) as server:
        with pytest.raises(EndpointError, match=r"wants an API key \(HTTP 401\): set OPENAI_API_KEY or"):
            discover(server.url)
        with pytest.raises(EndpointError, match="refuses the API key"):
            discover(server.url, api_key="sk-wrong")
        found = discover(server.url, api_key=f"{KEY}\n")
        assert found.api_key == KEY
        assert KEY not in repr(found)
        assert KEY not in str(found.server())
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        assert discover(server.url).model == "demo"


def test_a_key_that_is_no_key_is_refused_without_showing_it() -> None:
    with pytest.raises(EndpointError, match="characters that no header can carry") as caught:
        discover("localhost:1", api_key="sk-a\nb")
    assert "sk-a" not in str(caught.value)


def test_the_servers_words_never_repeat_the_key() -> None:
    assert server_message('{"error": {"message": "bad key sk-very-secret,\\n sorry"}}', KEY) == "bad key ***, sorry"


def test_nothing_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(EndpointError, match=rf"nothing listens at http://{address} .*start the server"):
        discover(address)


def test_an_unknown_host() -> None:
    with pytest.raises(
        EndpointError, match=r"host of http://no-such-host\.invalid:8000 is not known: check the spelling"
    ):
        discover("no-such-host.invalid:8000")


def test_a_server_that_never_answers_is_given_up() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        began = time.monotonic()
        with pytest.raises(EndpointError, match="did not answer in time"):
            discover(f"127.0.0.1:{silent.getsockname()[1]}", timeout=0.2)
        assert time.monotonic() - began < 2


def test_something_else_than_a_language_model_answers() -> None:
    with (
        serve(Manners(web_page=True)) as server,
        pytest.raises(EndpointError, match="gives a web page; check host and"),
    ):
        discover(server.url)
    with (
        serve() as server,
        pytest.raises(EndpointError, match=r"no language model server at .*/elsewhere \(HTTP 404\)"),
    ):
        discover(f"{server.url}/elsewhere")
    with serve(Manners(models=())) as server, pytest.raises(EndpointError, match="serves no model"):
        discover(server.url)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("host:8000", "http://host:8000"),
        ("http://host:8000/", "http://host:8000"),
        ("http://host:8000/v1", "http://host:8000"),
        ("http://host:8000/v1/completions", "http://host:8000"),
        (" https://gate.example/llm/v1/ ", "https://gate.example/llm"),
        ("[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses_are_taken_as_people_write_them(written: str, meant: str) -> None:
    assert clean_url(written) == meant


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("/v1/completions", "is a path; --endpoint takes the server's address"),
        ("ftp://host", "is not an address"),
        ("http://", "is not an address"),
        ("host:notaport", "is not an address"),
        ("my host:8000", "is not an address"),
        ("http://user:secret@host", "without user"),
        ("http://host?x=1", "without user, query"),
    ],
)
def test_what_is_no_address_is_refused_with_a_hint(written: str, hint: str) -> None:
    with pytest.raises(EndpointError, match=hint) as caught:
        clean_url(written)
    assert "secret" not in str(caught.value)


def test_a_snapshot_holds_what_the_server_counts() -> None:
    server = FakeServer("", Manners(cached_tokens=3), running=2, finished=4, generated=64)
    assert parse_metrics(metrics_text(server)) == MetricsSnapshot(
        running=2,
        waiting=0,
        kv_usage=0.2,
        preemptions=0,
        prompt_tokens=256,
        generation_tokens=64,
        prefix_cache_queries=256,
        prefix_cache_hits=12,
        requests_finished=4,
        ttft=SumCount(1.0, 4),
        queue_time=SumCount(0.5, 4),
        cache_config=parse_metrics(metrics_text(server)).cache_config,
    )


def test_old_names_are_read_and_missing_ones_are_none() -> None:
    old = parse_metrics(metrics_text(FakeServer("", Manners(old_metrics=True, cached_tokens=3), running=5, finished=1)))
    assert (old.kv_usage, old.prefix_cache_hits) == (0.5, 3)
    assert parse_metrics("") == MetricsSnapshot()
    assert parse_metrics("vllm:external_prefix_cache_hits_total 7\n").external_prefix_cache_hits == 7
    assert parse_metrics("sglang:num_running_reqs 3\n").running is None


def test_engines_add_up_and_their_usage_is_averaged() -> None:
    two = 'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_running{engine="1"} 4\n'
    two += 'vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} 0.4\n'
    snapshot = parse_metrics(two)
    assert (snapshot.engines, snapshot.running) == (2, 7)
    assert snapshot.kv_usage == pytest.approx(0.3)


def test_two_snapshots_give_an_exact_mean() -> None:
    assert (SumCount(10.0, 5) - SumCount(4.0, 3)).mean == 3.0
    assert (SumCount(4.0, 3) - SumCount(4.0, 3)).mean is None


def test_gauges_cut_out_of_the_text_read_as_they_do_within_it() -> None:
    text = metrics_text(FakeServer("", Manners(), running=3))
    cut, whole = parse_metrics(only_gauges(text.encode()).decode()), parse_metrics(text)
    assert (cut.running, cut.waiting, cut.kv_usage) == (whole.running, whole.waiting, whole.kv_usage)
    assert len(only_gauges(text.encode())) < len(text) / 3


def test_an_endpoint_reaches_the_load_process_with_its_key() -> None:
    assert pickle.loads(pickle.dumps(Endpoint("http://x", "m", api_key=KEY))).api_key == KEY


@pytest.mark.parametrize("value", ["1e40", "0", "-0.9", "nan", "inf", "1.01", "all"])
def test_a_share_of_the_memory_that_cannot_be_is_not_told(value: str) -> None:
    config = f'vllm:cache_config_info{{gpu_memory_utilization="{value}",block_size="{value}"}} 1\n'
    found = endpoint_of("http://x", {"id": "m"}, None, None, f"vllm:num_requests_running 0\n{config}")
    assert (found.has_metrics, found.gpu_memory_utilization, found.block_size) == (True, None, None)
