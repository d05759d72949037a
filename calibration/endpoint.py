"""Who answers at an address: the model it serves and what it tells of its engine."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from calibration.foreign_text import one_line
from calibration.metrics import MetricsSnapshot, parse_metrics
from calibration.own_thread import answer_of
from calibration.secrecy import keepable, shown_url, without_key

KEY_HINT = "set OPENAI_API_KEY or give --api-key-file"
MAX_ANSWER = 1 << 24  # bytes, of an answer that is read whole
ROUND_TRIPS = 5  # questions, of which the quickest tells the network's time


class EndpointError(Exception):
    """The server cannot be measured. The message is one line: what is wrong, and what to do about it."""


@dataclass(frozen=True)
class Endpoint:
    """A live server. None is what it does not tell."""

    url: str  # without /v1
    model: str
    api_key: str | None = field(default=None, repr=False, compare=False)
    engine: str | None = None  # "vllm", as /v1/models says who owns the model
    engine_version: str | None = None
    max_model_len: int | None = None  # tokens, prompt and output together
    kv_tokens: int | None = None  # KV pool of one engine as its log states it, vLLM's unused null block included
    num_gpu_blocks: int | None = None  # of all data-parallel engines together, a null block in each included
    block_size: int | None = None  # tokens
    engines: int = 1  # data-parallel engines
    enable_prefix_caching: bool | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None  # of one engine, where its owner chose it
    cache_dtype: str | None = None
    max_num_seqs: int | None = None  # only where the server is in development mode
    max_num_batched_tokens: int | None = None  # likewise
    has_metrics: bool = False  # whether /metrics answers
    insecure: bool = False  # whether any certificate is taken, such as one that the server signed itself
    round_trip: float | None = field(default=None, compare=False)  # s, of a cheap question on an open connection

    @property
    def kv_pool_tokens(self) -> int | None:
        """Tokens of one engine that a KV usage of 1 stands for: the null block is not among them."""
        if self.num_gpu_blocks is None or self.block_size is None:
            return self.kv_tokens
        usable = (self.num_gpu_blocks // self.engines - 1) * self.block_size
        if usable <= 0:
            return self.kv_tokens
        # For hybrid and sliding-window models blocks times size is not tokens; there the server's own figure holds.
        if self.kv_tokens is not None and not 0.95 <= usable / self.kv_tokens <= 1.05:
            return self.kv_tokens
        return usable

    @property
    def kv_bytes_per_token(self) -> int | None:
        """KV cache bytes of a token, all layers, to within a block in the pool."""
        if self.kv_cache_memory_bytes is None or self.num_gpu_blocks is None or self.block_size is None:
            return None
        return self.kv_cache_memory_bytes // (max(1, self.num_gpu_blocks // self.engines) * self.block_size)

    def server(self) -> dict[str, object]:
        """What a run keeps of it: all that is known but the key."""
        secret_or_ours = ("api_key", "has_metrics", "insecure")
        known = {name: value for name, value in vars(self).items() if name not in secret_or_ours}
        known["kv_bytes_per_token"] = self.kv_bytes_per_token
        return {name: value for name, value in known.items() if value is not None}


def discover(
    url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    timeout: float = 10.0,
    insecure: bool = False,
) -> Endpoint:
    """Ask the server at `url` what it is.

    `model` defaults to the first that it serves, `api_key` to the environment's OPENAI_API_KEY; `timeout` (seconds)
    bounds each question; `insecure` takes a certificate that nobody vouches for. Raises `EndpointError` where no
    language model answers.
    """
    url = clean_url(url)
    key = _clean_key(api_key if api_key is not None else os.environ.get("OPENAI_API_KEY"))
    return answer_of(_discover(url, model, key, timeout, insecure))


def clean_url(url: str) -> str:
    """The server's address with scheme and without /v1, from what people write: ``host:8000``, ``http://host/v1``."""
    text = url.strip()
    if text.startswith("/"):
        raise EndpointError(
            f"{shown_url(text)!r} is a path; --endpoint takes the server's address, such as http://localhost:8000 "
            "(what vLLM bench calls --base-url)"
        )
    if "://" not in text:
        text = f"http://{text}"
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or re.search(r"\s", text):
        raise EndpointError(f"{shown_url(url.strip())!r} is not an address of a server, such as http://localhost:8000")
    if parts.username is not None or parts.query or parts.fragment:
        raise EndpointError(
            f"give the address as http://host:port, without user, query or fragment; for a key {KEY_HINT}"
        )
    path = re.sub(r"/v1(/(chat/)?completions|/models)?$", "", parts.path.rstrip("/"))
    return f"{parts.scheme}://{parts.netloc}{path}"


def headers(api_key: str | None) -> dict[str, str]:
    """Request headers for this key."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def connection_error(url: str, error: Exception) -> EndpointError:
    """What a failure to talk to `url` means to its owner."""
    cause = getattr(error, "os_error", error)
    if isinstance(error, aiohttp.ClientConnectorDNSError) or isinstance(cause, socket.gaierror):
        return EndpointError(f"the host of {url} is not known: check the spelling of the address")
    if isinstance(error, TimeoutError):
        return EndpointError(f"{url} did not answer in time: is the server up, and does a firewall let you reach it?")
    if isinstance(error, aiohttp.ClientSSLError):
        return EndpointError(
            f"no secure connection to {url}: is it http instead of https, or is its certificate unknown? "
            "(--insecure takes any)"
        )
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return EndpointError(f"{url} hung up without an answer: is it https instead of http, or has the server died?")
    if isinstance(cause, ConnectionRefusedError):
        return EndpointError(f"nothing listens at {url} (connection refused): start the server or correct the address")
    if isinstance(cause, OSError) and cause.strerror:
        return EndpointError(f"{url} cannot be reached ({cause.strerror}): check the address and the network")
    return EndpointError(f"no language model server at {url}: what answers there does not speak HTTP as expected")


def http_error(url: str, status: int, body: str, api_key: str | None) -> EndpointError:
    """What a refusal by the server at `url` means to its owner."""
    if status in (401, 403):
        if api_key:
            return EndpointError(f"{url} refuses the API key (HTTP {status}): {KEY_HINT} with the right one")
        return EndpointError(f"{url} wants an API key (HTTP {status}): {KEY_HINT}")
    if 300 <= status < 400:
        return EndpointError(f"{url} sends requests elsewhere (HTTP {status}): give the server's own address")
    if status == 404:
        return EndpointError(f"no language model server at {url} (HTTP 404): give the address where /v1/models answers")
    if status == 429:
        return EndpointError(
            f"{url} limits the rate of requests (HTTP 429): measure the server itself, not its gateway"
        )
    if status == 503:
        return EndpointError(f"{url} is not ready (HTTP 503): wait until the server has loaded its model")
    return EndpointError(f"{url} answers HTTP {status}{_quote(body, api_key)}: see the server's log")


def server_message(body: str, api_key: str | None) -> str:
    """The server's own words in an error answer, on one line, short, and without the key."""
    try:
        data = json.loads(body)
        error = data.get("error", data) if isinstance(data, dict) else data
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (ValueError, RecursionError):
        text = "" if "<html" in body.lower() else body
    return one_line(without_key(text, api_key))


def _quote(body: str, api_key: str | None) -> str:
    message = server_message(body, api_key)
    return f" ({message})" if message else ""


def _clean_key(api_key: str | None) -> str | None:
    key = (api_key or "").strip()
    if not key.isascii() or not key.isprintable():
        raise EndpointError("the API key holds characters that no header can carry: is its file the right one?")
    return key or None


async def _discover(url: str, model: str | None, api_key: str | None, timeout: float, insecure: bool) -> Endpoint:
    limits = aiohttp.ClientTimeout(total=timeout)
    connector = aiohttp.TCPConnector(ssl=not insecure)
    async with aiohttp.ClientSession(connector=connector, headers=headers(api_key), timeout=limits) as session:
        card = _choose(url, await _models(session, url, api_key), model)
        version = await _get_if_there(session, f"{url}/version")
        info = await _get_if_there(session, f"{url}/server_info?config_format=json")
        metrics = await _get_if_there(session, f"{url}/metrics")
        known = endpoint_of(url, card, version, info, metrics)
        round_trip = await _round_trip(session, f"{url}/{'version' if known.engine_version else 'v1/models'}")
    told = {name: keepable(value, api_key) for name, value in vars(known).items() if name != "url"}
    return replace(known, **told | {"api_key": api_key, "insecure": insecure, "round_trip": round_trip})


def endpoint_of(
    url: str, card: Mapping[str, Any], version: str | None, info: str | None, metrics_text: str | None
) -> Endpoint:
    """What a server's own words tell: its model's card, and its answers to /version, /server_info and /metrics."""
    metrics = metrics_in(metrics_text or "")
    config = metrics.cache_config if metrics else {}
    scheduler = _object(_object(_object(info).get("vllm_config")).get("scheduler_config"))
    return Endpoint(
        url=url,
        model=str(card["id"]),
        engine=_text(card.get("owned_by")),
        engine_version=_text(_object(version).get("version")),
        max_model_len=_integer(card.get("max_model_len")),
        kv_tokens=_integer(config.get("kv_cache_size_tokens")) or _blocks_times_size(config, metrics),
        num_gpu_blocks=_integer(config.get("num_gpu_blocks")),
        block_size=_integer(config.get("block_size")),
        engines=metrics.engines if metrics else 1,
        enable_prefix_caching={"True": True, "False": False}.get(config.get("enable_prefix_caching", "")),
        gpu_memory_utilization=_share(config.get("gpu_memory_utilization")),
        kv_cache_memory_bytes=_integer(config.get("kv_cache_memory_bytes")),
        cache_dtype=_text(config.get("cache_dtype")),
        max_num_seqs=_integer(scheduler.get("max_num_seqs")),
        max_num_batched_tokens=_integer(scheduler.get("max_num_batched_tokens")),
        has_metrics=metrics is not None,
    )


async def _models(session: aiohttp.ClientSession, url: str, api_key: str | None) -> list[dict[str, Any]]:
    try:
        async with session.get(f"{url}/v1/models", allow_redirects=False) as response:
            body = (await read_answer(response)).decode(errors="replace")
            status, place = response.status, response.headers.get("Location")
    except AnswerTooLong:
        raise EndpointError(
            f"no language model server at {url}: /v1/models gives more than {MAX_ANSWER >> 20} MiB; check host and port"
        ) from None
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise connection_error(url, error) from None
    if place is not None and 300 <= status < 400:
        shown = one_line(shown_url(without_key(place, api_key)))
        raise EndpointError(f"{url} sends visitors on to {shown}: give the server's own address")
    if status != 200:
        raise http_error(url, status, body, api_key)
    cards: list[dict[str, Any]] = keepable(models_in(url, body), api_key)
    return cards


def models_in(url: str, body: str) -> list[dict[str, Any]]:
    """The cards of the models in an answer to /v1/models. Raises `EndpointError` where there are none."""
    try:
        cards = [card for card in json.loads(body)["data"] if card["id"].strip() and card["id"].isprintable()]
        served = [
            {name: value for name, value in card.items() if not isinstance(value, (dict, list))} for card in cards
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        what = "a web page" if "<html" in body.lower() else "something else than a list of models"
        raise EndpointError(
            f"no language model server at {url}: /v1/models gives {what}; check host and port"
        ) from None
    if not served:
        raise EndpointError(f"{url} serves no model: wait until it has loaded one")
    return served


def _choose(url: str, served: list[dict[str, Any]], model: str | None) -> dict[str, Any]:
    for card in served:
        if model is None or card["id"] == model:
            return card
    names = ", ".join(one_line(card["id"], 80) for card in served[:10])
    raise EndpointError(f"{url} does not serve {model!r}; give --model one of: {names}")


def metrics_in(text: str) -> MetricsSnapshot | None:
    """What /metrics tells; None for a web page, for another server's metrics, and for what cannot be read."""
    try:
        metrics = parse_metrics(text)
    except (ValueError, OverflowError):
        return None
    return metrics if metrics.running is not None else None


class AnswerTooLong(ValueError):
    """More than `MAX_ANSWER` bytes."""


async def read_answer(response: aiohttp.ClientResponse) -> bytes:
    """The whole body. Raises `AnswerTooLong`."""
    pieces, size = [], 0
    while piece := await response.content.readany():
        pieces.append(piece)
        size += len(piece)
        if size > MAX_ANSWER:
            raise AnswerTooLong
    return b"".join(pieces)


async def _get_if_there(session: aiohttp.ClientSession, url: str) -> str | None:
    """What `url` answers, None where it does not: many gateways hide all but /v1."""
    try:
        async with session.get(url, allow_redirects=False) as response:
            return (await read_answer(response)).decode() if response.status == 200 else None
    except (aiohttp.ClientError, OSError, TimeoutError, AnswerTooLong, UnicodeDecodeError):
        return None


async def _round_trip(session: aiohttp.ClientSession, url: str) -> float | None:
    """Seconds from a small question to its answer on an open connection: the network and little else."""
    times = []
    for _ in range(ROUND_TRIPS):
        asked = perf_counter()
        if await _get_if_there(session, url) is None:
            return None
        times.append(perf_counter() - asked)
    return round(min(times), 6)


def _blocks_times_size(config: dict[str, str], metrics: MetricsSnapshot | None) -> int | None:
    """The pool of one engine where the server is too old to tell it in tokens."""
    blocks, size = _integer(config.get("num_gpu_blocks")), _integer(config.get("block_size"))
    return None if blocks is None or size is None or metrics is None else blocks // metrics.engines * size or None


def _object(value: object) -> dict[str, Any]:
    """A JSON object, from text or as it is; empty for anything else."""
    try:
        data = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _text(value: object) -> str | None:
    return one_line(value) or None if isinstance(value, str) and value != "None" else None


def _integer(value: object) -> int | None:
    """A size; nothing that a server tells here can be less than one."""
    try:
        number = int(str(value))
    except ValueError:
        return None
    return number if 0 < number < 2**63 else None


def _share(value: object) -> float | None:
    """More than nothing and at most all."""
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if 0 < number <= 1 else None
