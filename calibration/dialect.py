"""How a server wants to be asked, found by asking: which API, usage options and token ids it takes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Literal

import aiohttp
import numpy as np

from calibration.endpoint import Endpoint, EndpointError, headers, http_error
from calibration.own_thread import answer_of
from calibration.secrecy import keepable, without_key
from calibration.stream import PATIENCE, Answer, Patience, ask

# Ordinary words in every common vocabulary: byte and control tokens lie below 1000 or, in Llama and Qwen, above
# 100,000. The later ranges are for small models.
TOKEN_IDS = ((1000, 8000), (100, 1000), (10, 100))

# A chat takes text. Each of these is one token, with the space before it, in the common vocabularies.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education"
)
WORDS = _TEXT.split()

Usage = Literal["continuous", "final", "none"]
USAGE: tuple[Usage, ...] = ("continuous", "final", "none")

TRIAL_PROMPT, TRIAL_OUTPUT = 16, 16  # tokens
MORE_TRIALS = 2  # before a server is said not to stream
YARDSTICKS = (64, 320)  # words of the two prompts that tell how many tokens a chat makes of them
REFUSALS = ("http 400", "http 422")  # of what was asked for
ABSENCES = ("http 404", "http 405", "http 501")  # of the API itself


@dataclass(frozen=True)
class Dialect:
    """What a server takes: usage with every event, at the end or never, and prompts of ids in [low, high).

    Where it takes no ids, a prompt is text to its chat, of as many words as make the tokens that are asked for.
    """

    usage: Usage = "continuous"
    token_ids: tuple[int, int] = TOKEN_IDS[0]
    fingerprint: str = ""  # vLLM's system fingerprint: version and parallel sizes
    chat: bool = False
    template_tokens: float = 0.0  # that the chat's template adds to a prompt
    tokens_per_word: float = 1.0

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, model: str, prompt_tokens: int, output_tokens: int, seed: tuple[int, ...]) -> bytes:
        """A request with a random prompt; the same seed gives the same prompt."""
        rng = np.random.default_rng(seed)
        request: dict[str, object] = {"model": model}
        if self.chat:
            text = " ".join(WORDS[index] for index in rng.integers(len(WORDS), size=self._words(prompt_tokens)))
            request["messages"] = [{"role": "user", "content": text}]
        else:
            request["prompt"] = rng.integers(*self.token_ids, size=prompt_tokens).tolist()
        request |= {
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

    def _words(self, prompt_tokens: int) -> int:
        return max(1, round((prompt_tokens - self.template_tokens) / self.tokens_per_word))


async def learn_dialect(session: aiohttp.ClientSession, endpoint: Endpoint, seed: int, patience: Patience) -> Dialect:
    """Try requests until one is taken. Raises `EndpointError` where none is, or where the answer does not stream."""
    trials = _Trials(session, endpoint, seed, patience)
    dialect = await trials.completions()
    return dialect or await trials.chat()


def dialect_of(endpoint: Endpoint, patience: Patience = PATIENCE) -> Dialect:
    """Ask a few short questions, of 16 tokens each, to learn how a server wants to be asked.

    Raises `EndpointError`, as `learn_dialect` does.
    """
    return answer_of(_dialect_of(endpoint, patience))


async def _dialect_of(endpoint: Endpoint, patience: Patience) -> Dialect:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=patience.connect)
    connector = aiohttp.TCPConnector(ssl=not endpoint.insecure)
    told = {"Content-Type": "application/json", "Accept-Encoding": "identity"} | headers(endpoint.api_key)
    async with aiohttp.ClientSession(connector=connector, headers=told, timeout=timeout) as session:
        return await learn_dialect(session, endpoint, 0, patience)


class _Trials:
    """Short requests, each with a prompt of its own, that show what the server takes."""

    def __init__(self, session: aiohttp.ClientSession, endpoint: Endpoint, seed: int, patience: Patience) -> None:
        self._session, self._endpoint, self._seed, self._patience = session, endpoint, seed, patience
        self._asked = 0
        self._no_ids: Answer | None = None  # how prompts of token ids were refused

    async def completions(self) -> Dialect | None:
        """The dialect of /v1/completions; None where there is none, or where it takes no token ids."""
        for token_ids in TOKEN_IDS:
            found = await self._first_taken(Dialect(token_ids=token_ids))
            if isinstance(found, Dialect):
                return found
            self._no_ids = found
            if not _about_vocabulary(found.detail):
                break
        return None

    async def chat(self) -> Dialect:
        found = await self._first_taken(Dialect(chat=True))
        if isinstance(found, Dialect):
            return found if found.usage == "none" else await self._measure_words(found)
        raise _explain(self._endpoint, self._no_ids or found, found)

    async def _first_taken(self, dialect: Dialect) -> Dialect | Answer:
        """`dialect` with the richest usage that the server takes, or how it refused the last."""
        for usage in USAGE:
            dialect = replace(dialect, usage=usage)
            answer = await self._ask(dialect, TRIAL_PROMPT)
            for _ in range(MORE_TRIALS):
                if answer.error or not _came_at_once(answer):
                    break
                answer = await self._ask(dialect, TRIAL_PROMPT)  # a busy client may have read late
            if not answer.error:
                _check_streaming(self._endpoint, answer)
                return replace(dialect, fingerprint=keepable(answer.fingerprint, self._endpoint.api_key))
            if answer.error in ABSENCES or _about_vocabulary(answer.detail):
                return answer
            if answer.error not in REFUSALS:
                raise _explain(self._endpoint, answer, None)
        return answer

    async def _measure_words(self, dialect: Dialect) -> Dialect:
        """How many tokens this model makes of our words, by the server's count of two prompts."""
        few, many = [(await self._ask(dialect, words, 1)).counted_prompt for words in YARDSTICKS]
        if few is None or many is None or many <= few:
            return dialect
        per_word = (many - few) / (YARDSTICKS[1] - YARDSTICKS[0])
        return replace(dialect, tokens_per_word=per_word, template_tokens=few - per_word * YARDSTICKS[0])

    async def _ask(self, dialect: Dialect, prompt_tokens: int, output_tokens: int = TRIAL_OUTPUT) -> Answer:
        answer = Answer(0, prompt_tokens, output_tokens, 0.0)
        self._asked += 1
        # A second key keeps trial prompts apart from those of the load.
        body = dialect.body(self._endpoint.model, prompt_tokens, output_tokens, (self._seed, 2**32 + self._asked))
        await ask(self._session, f"{self._endpoint.url}{dialect.path}", body, answer, self._patience)
        return answer


def _about_vocabulary(message: str) -> bool:
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


def _explain(endpoint: Endpoint, answer: Answer, chat: Answer | None) -> EndpointError:
    """What a refused trial means; `chat` is the refusal of the chat that was tried after it."""
    detail = without_key(answer.detail, endpoint.api_key)
    said = f": {detail}" if detail else ""
    if chat is not None and answer.error in ABSENCES and chat.error in ABSENCES:
        return EndpointError(
            f"{endpoint.url} has neither /v1/completions nor /v1/chat/completions for {endpoint.model!r}{said}; "
            "check the address and the model"
        )
    if answer.error in ABSENCES and chat is not None:
        return _explain(endpoint, chat, None)
    if answer.error in REFUSALS:
        if _about_vocabulary(detail):
            low, high = TOKEN_IDS[-1]
            return EndpointError(f"{endpoint.url} takes no prompt of token ids, not even of {low} to {high}{said}")
        return EndpointError(f"{endpoint.url} refuses a request with ignore_eos and min_tokens{said}")
    if answer.error == "no stream":
        return EndpointError(
            f"{endpoint.url} does not stream{said}; turn its streaming on or measure the server behind it"
        )
    if answer.error.startswith("http "):
        return http_error(endpoint.url, int(answer.error[5:]), answer.detail, endpoint.api_key)
    return EndpointError(f"{endpoint.url} did not answer a short request ({answer.error}{said}): see the server's log")
