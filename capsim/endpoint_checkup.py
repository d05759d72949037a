"""What a live server offers, what it does not tell, and how to give capsim the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from calibration.dialect import Dialect, dialect_of
from calibration.endpoint import Endpoint, EndpointError, headers
from calibration.gpu import fetch
from calibration.secrecy import keepable, shown_url
from calibration.server_flags import Found, ServerFlags
from capsim.findings import Finding, State
from capsim.measuring import KnownServer, ask_server
from capsim.measuring_options import ServerOptions
from simulator.engine.engine_rules import version_note

FLAGS = "Its engine flags"
# Found flags by the option that gives them.
OPTIONS = {
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_model_len": "--max-model-len",
    "num_gpu_blocks": "--num-gpu-blocks-override",
    "block_size": "--block-size",
    "long_prefill_token_threshold": "--long-prefill-token-threshold",
    "scheduling_policy": "--scheduling-policy",
    "enable_chunked_prefill": "--enable-chunked-prefill",
    "enable_prefix_caching": "--enable-prefix-caching",
    "async_scheduling": "--async-scheduling",
}
DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1, or give its log with --server-log, or its flags as below"


def offered(url: str, options: ServerOptions) -> list[Finding]:
    """What the server at `url` offers. A server that cannot be measured is one broken finding."""
    section = f"Server at {shown_url(url)}"
    try:
        server = ask_server(url, options)
        dialect = dialect_of(server.endpoint)
    except EndpointError as problem:
        return [Finding(section, "server", "broken", "cannot be measured", str(problem))]
    return [*_server(section, server, dialect), *_flags(server.flags())]


def _server(section: str, server: KnownServer, dialect: Dialect) -> Iterator[Finding]:
    endpoint = server.endpoint

    def found(what: str, state: State, value: str, remedy: str = "") -> Finding:
        return Finding(section, what, state, value, remedy)

    others = [name for name in _served(endpoint) if name != endpoint.model]
    yield found("model", "ok", endpoint.model)
    if others:
        yield found("other models", "ok", ", ".join(others), "give --model to measure another one")
    yield _engine(section, endpoint)
    yield _prompts(section, dialect)
    yield _counts(section, dialect)
    if endpoint.round_trip is not None:
        yield found("round trip", "ok", f"{endpoint.round_trip * 1000:.1f} ms")
    if endpoint.has_metrics:
        yield found("/metrics", "ok", "shown")
    else:
        hidden = "hidden: running, waiting and KV use stay unknown"
        yield found("/metrics", "unknown", hidden, "measure the server itself, not its gateway")
    yield _pool(section, endpoint)
    if server.info:
        yield found("/server_info", "ok", "shown: it tells its flags")
    else:
        yield found("/server_info", "optional", "hidden, as vLLM has it unless in development mode", DEV_MODE)
    kind = server.gpus.kind
    if kind is not None:
        yield found("GPU", "ok", str(kind.name))
    else:
        yield found("GPU", "optional", "not told", f"give --dcgm-url where an exporter runs ({server.gpus.reason})")
    for sentence in server.flags().contradictions:
        yield found("doubt", "unknown", sentence)


def _engine(section: str, endpoint: Endpoint) -> Finding:
    if endpoint.engine_version is None:
        remedy = "/version is hidden: measure the server itself, or give its log with --server-log"
        return Finding(section, "engine", "unknown", f"{endpoint.engine or 'an engine'} of unknown version", remedy)
    name = f"{endpoint.engine or 'engine'} {endpoint.engine_version}"
    note = version_note(endpoint.engine_version)
    return Finding(section, "engine", "unknown" if note else "ok", name, note)


def _prompts(section: str, dialect: Dialect) -> Finding:
    if not dialect.chat:
        return Finding(section, "prompts", "ok", "token ids to /v1/completions: lengths are exact")
    remedy = "open /v1/completions to token ids for exact lengths"
    return Finding(section, "prompts", "unknown", "chat only: lengths are near, not exact", remedy)


def _counts(section: str, dialect: Dialect) -> Finding:
    if dialect.usage == "continuous":
        return Finding(section, "token counts", "ok", "in every event of a stream")
    when = "at the end of a stream" if dialect.usage == "final" else "never"
    remedy = "an event of several tokens counts as one: measure vLLM itself, which tells with every event"
    return Finding(section, "token counts", "unknown", when, remedy)


def _pool(section: str, endpoint: Endpoint) -> Finding:
    if endpoint.kv_pool_tokens is not None:
        engines = f" on each of {endpoint.engines} engines" if endpoint.engines > 1 else ""
        return Finding(section, "KV pool", "ok", f"{endpoint.kv_pool_tokens:,} tokens{engines}")
    return Finding(section, "KV pool", "unknown", "not told", "give --num-gpu-blocks-override and --block-size")


def _flags(known: ServerFlags) -> Iterator[Finding]:
    for name, option in OPTIONS.items():
        fact = known.found[name]
        assumed = fact.source == "assumed"
        # a default that vLLM has had on every device and in every version is as good as told
        state: State = "unknown" if assumed and fact.why else "ok"
        remedy = "give it as the server was started with" if state == "unknown" else ""
        yield Finding(FLAGS, option, state, _told(fact), remedy)


def _told(fact: Found) -> str:
    value = {True: "on", False: "off"}.get(fact.value, fact.value) if isinstance(fact.value, bool) else fact.value
    if fact.source != "assumed":
        return f"{value}, from {'the ' if fact.source in ('server', 'log') else ''}{_SOURCES[fact.source]}"
    return f"{value}, assumed: {fact.why.partition('; give')[0]}" if fact.why else f"{value}, vLLM's default"


_SOURCES = {"stated": "you", "server": "server", "log": "log", "inferred": "a measured run"}


def _served(endpoint: Endpoint) -> list[str]:
    """The models at the address. It has just told them, so that an answer that fails now tells none."""
    text, _ = fetch(f"{endpoint.url}/v1/models", headers=headers(endpoint.api_key), insecure=endpoint.insecure)
    try:
        cards: Any = json.loads(text or "{}").get("data", [])
        return [str(keepable(card["id"], endpoint.api_key)) for card in cards]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []
