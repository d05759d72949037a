"""Who answers at an address: the model it serves and what it tells of its engine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from calibration.metrics import MetricsSnapshot, parse_metrics

KEY_HINT = "set OPENAI_API_KEY or give --api-key-file"
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
        # For hybrid and sliding-window models blocks times size is not tokens; there the server's own figure holds.
        if self.kv_tokens is not None and not 0.95 <= usable / self.kv_tokens <= 1.05:
            return self.kv_tokens
        return usable

    @property
    def kv_bytes_per_token(self) -> int | None:
        """KV cache bytes of a token, all layers, to within a block in the pool."""
        if self.kv_cache_memory_bytes is None or self.num_gpu_blocks is None or self.block_size is None:
            return None
        return self.kv_cache_memory_bytes // (self.num_gpu_blocks // self.engines * self.block_size)

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
    with ThreadPoolExecutor(1) as thread:  # a thread of its own: a notebook has an event loop already
        return thread.submit(asyncio.run, _discover(url, model, key, timeout, insecure)).result()


def clean_url(url: str) -> str:
    """The server's address with scheme and without /v1, from what people write: ``host:8000``, ``http://host/v1``."""
    text = url.strip()
    if text.startswith("/"):
        raise EndpointError(
            f"{text!r} is a path; --endpoint takes the server's address, such as http://localhost:8000 "
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
        raise EndpointError(f"{url.strip()!r} is not an address of a server, such as http://localhost:8000")
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
    except ValueError:
        text = "" if "<html" in body.lower() else body
    text = " ".join(text.split())
    if api_key:
        text = text.replace(api_key, "***")
    return text if len(text) <= 200 else f"{text[:197]}..."


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
        served = await _models(session, url, api_key)
        card = _choose(url, served, model)
        version = _object(await _get_if_there(session, f"{url}/version")).get("version")
        scheduler = await _scheduler_config(session, url)
        metrics = await _metrics_if_there(session, url)
        round_trip = await _round_trip(session, f"{url}/{'version' if version else 'v1/models'}")
    config = metrics.cache_config if metrics else {}
    return Endpoint(
        url=url,
        model=str(card["id"]),
        api_key=api_key,
        engine=_text(card.get("owned_by")),
        engine_version=_text(version),
        max_model_len=_integer(card.get("max_model_len")),
        kv_tokens=_integer(config.get("kv_cache_size_tokens")) or _blocks_times_size(config, metrics),
        num_gpu_blocks=_integer(config.get("num_gpu_blocks")),
        block_size=_integer(config.get("block_size")),
        engines=metrics.engines if metrics else 1,
        enable_prefix_caching={"True": True, "False": False}.get(config.get("enable_prefix_caching", "")),
        gpu_memory_utilization=_real(config.get("gpu_memory_utilization")),
        kv_cache_memory_bytes=_integer(config.get("kv_cache_memory_bytes")),
        cache_dtype=_text(config.get("cache_dtype")),
        max_num_seqs=_integer(scheduler.get("max_num_seqs")),
        max_num_batched_tokens=_integer(scheduler.get("max_num_batched_tokens")),
        has_metrics=metrics is not None,
        insecure=insecure,
        round_trip=round_trip,
    )


async def _models(session: aiohttp.ClientSession, url: str, api_key: str | None) -> list[dict[str, Any]]:
    try:
        async with session.get(f"{url}/v1/models", allow_redirects=False) as response:
            body = await response.text(errors="replace")
            status, place = response.status, response.headers.get("Location")
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise connection_error(url, error) from None
    if place is not None and 300 <= status < 400:
        raise EndpointError(f"{url} sends visitors on to {place}: give the server's own address")
    if status != 200:
        raise http_error(url, status, body, api_key)
    try:
        served = [card for card in json.loads(body)["data"] if isinstance(card["id"], str)]
    except (ValueError, KeyError, TypeError):
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
    names = ", ".join(card["id"] for card in served[:10])
    raise EndpointError(f"{url} does not serve {model!r}; give --model one of: {names}")


async def _scheduler_config(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Scheduler flags, which vLLM shows in development mode only."""
    info = _object(await _get_if_there(session, f"{url}/server_info?config_format=json"))
    config = info.get("vllm_config")
    return _object(config.get("scheduler_config")) if isinstance(config, dict) else {}


async def _metrics_if_there(session: aiohttp.ClientSession, url: str) -> MetricsSnapshot | None:
    text = await _get_if_there(session, f"{url}/metrics")
    try:
        metrics = parse_metrics(text or "")
    except ValueError:
        return None
    return metrics if metrics.running is not None else None  # a web page, or another server's metrics


async def _get_if_there(session: aiohttp.ClientSession, url: str) -> str | None:
    """What `url` answers, None where it does not: many gateways hide all but /v1."""
    try:
        async with session.get(url, allow_redirects=False) as response:
            return await response.text() if response.status == 200 else None
    except (aiohttp.ClientError, OSError, TimeoutError, UnicodeDecodeError):
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
    return None if blocks is None or size is None or metrics is None else blocks // metrics.engines * size


def _object(value: object) -> dict[str, Any]:
    """A JSON object, from text or as it is; empty for anything else."""
    try:
        data = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value not in ("", "None") else None


def _integer(value: object) -> int | None:
    try:
        return int(str(value))
    except ValueError:
        return None


def _real(value: object) -> float | None:
    try:
        return float(str(value))
    except ValueError:
        return None
