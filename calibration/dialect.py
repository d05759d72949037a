"""How a server wants to be asked, found by asking: which usage options and which token ids it takes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Literal

import aiohttp
import numpy as np

from calibration.endpoint import Endpoint, EndpointError, http_error
from calibration.stream import Answer, Patience, ask

# Ordinary words in every common vocabulary: byte and control tokens lie below 1000 or, in Llama and Qwen, above
# 100,000. The later ranges are for small models.
TOKEN_IDS = ((1000, 8000), (100, 1000), (10, 100))

USAGE: tuple[Literal["continuous", "final", "none"], ...] = ("continuous", "final", "none")

TRIAL_PROMPT, TRIAL_OUTPUT = 16, 16  # tokens
MORE_TRIALS = 2  # before a server is said not to stream


@dataclass(frozen=True)
class Dialect:
    """What a server takes: usage with every event, at the end or never, and prompts of ids in [low, high)."""

    usage: Literal["continuous", "final", "none"] = "continuous"
    token_ids: tuple[int, int] = TOKEN_IDS[0]
    fingerprint: str = ""  # vLLM's system fingerprint: version and parallel sizes

    def body(self, model: str, prompt_tokens: int, output_tokens: int, seed: tuple[int, ...]) -> bytes:
        """A request with a random prompt; the same seed gives the same prompt."""
        prompt = np.random.default_rng(seed).integers(*self.token_ids, size=prompt_tokens).tolist()
        request: dict[str, object] = {
            "model": model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "min_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        if self.usage != "none":
            request["stream_options"] = {"include_usage": True}
        if self.usage == "continuous":
            request["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        return json.dumps(request, separators=(",", ":")).encode()


async def learn_dialect(session: aiohttp.ClientSession, endpoint: Endpoint, seed: int, patience: Patience) -> Dialect:
    """Try requests until one is taken. Raises `EndpointError` where none is, or where the answer does not stream."""
    refusal = Answer(0, TRIAL_PROMPT, TRIAL_OUTPUT, 0.0)
    for token_ids in TOKEN_IDS:
        for usage in USAGE:
            dialect = Dialect(usage, token_ids)
            answer = await _try(session, endpoint, dialect, seed, patience)
            for _ in range(MORE_TRIALS):
                if answer.error or not _came_at_once(answer):
                    break
                answer = await _try(session, endpoint, dialect, seed, patience)  # a busy client may have read late
            if not answer.error:
                _check_streaming(endpoint, answer)
                return replace(dialect, fingerprint=answer.fingerprint)
            if answer.error not in ("http 400", "http 422"):
                raise _explain(endpoint, answer)
            refusal = answer
            if _about_token_ids(answer.detail):
                break
        if not _about_token_ids(refusal.detail):
            break
    raise _explain(endpoint, refusal)


async def _try(
    session: aiohttp.ClientSession, endpoint: Endpoint, dialect: Dialect, seed: int, patience: Patience
) -> Answer:
    answer = Answer(0, TRIAL_PROMPT, TRIAL_OUTPUT, 0.0)
    # A second key keeps trial prompts apart from those of the load.
    body = dialect.body(endpoint.model, TRIAL_PROMPT, TRIAL_OUTPUT, (seed, 2**32))
    await ask(session, f"{endpoint.url}/v1/completions", body, answer, patience)
    return answer


def _about_token_ids(message: str) -> bool:
    return any(word in message.lower() for word in ("vocab", "token id", "token_id"))


def _check_streaming(endpoint: Endpoint, answer: Answer) -> None:
    tokens = answer.counted_output or answer.tokens
    if answer.events <= 1 and tokens > 1:
        raise EndpointError(
            f"{endpoint.url} does not stream: {tokens} tokens came in one event; turn its streaming on "
            "or measure the server behind it"
        )
    if _came_at_once(answer):
        took = answer.arrivals[-1][0] - answer.sent
        raise EndpointError(
            f"{endpoint.url} does not stream: {tokens} tokens came at once after {took:.1f} s; "
            "is there a proxy that buffers? Measure the server behind it"
        )


def _came_at_once(answer: Answer) -> bool:
    """Whether all tokens arrived together though they took long, as behind a proxy that buffers."""
    tokens = answer.counted_output or answer.tokens
    if not answer.arrivals or len(answer.arrivals) > 2 or tokens < TRIAL_OUTPUT:
        return False
    return answer.arrivals[-1][0] - answer.sent > 0.2


def _explain(endpoint: Endpoint, answer: Answer) -> EndpointError:
    detail = answer.detail if endpoint.api_key is None else answer.detail.replace(endpoint.api_key, "***")
    said = f": {detail}" if detail else ""
    if answer.error == "http 404":
        return EndpointError(
            f"{endpoint.url} has no /v1/completions for {endpoint.model!r}{said}; prompts of token ids need it"
        )
    if answer.error in ("http 400", "http 422"):
        if _about_token_ids(detail):
            low, high = TOKEN_IDS[-1]
            return EndpointError(f"{endpoint.url} takes no prompt of token ids, not even of {low} to {high}{said}")
        return EndpointError(f"{endpoint.url} refuses a request with a prompt of token ids and ignore_eos{said}")
    if answer.error == "no stream":
        return EndpointError(
            f"{endpoint.url} does not stream{said}; turn its streaming on or measure the server behind it"
        )
    if answer.error.startswith("http "):
        return http_error(endpoint.url, int(answer.error[5:]), answer.detail, endpoint.api_key)
    return EndpointError(f"{endpoint.url} did not answer a short request ({answer.error}{said}): see the server's log")
