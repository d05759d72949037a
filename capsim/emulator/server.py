"""The twin's HTTP server: vLLM's routes, answered by an engine that is simulated.

async with Twin(profile) as twin:
    print(await twin.listen("127.0.0.1", 8000))
    await twin.wait()
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from itertools import count
from types import TracebackType
from typing import Self

from aiohttp import web
from aiohttp.http import HttpProcessingError, HttpVersion11

from capsim.emulator import server_facts, tokenizer
from capsim.emulator.answers import Events, EventStream, Heading, WholeAnswer, whole_answer
from capsim.emulator.api_request import (
    ApiError,
    DetokenizeBody,
    Generation,
    TokenizeBody,
    chat_text,
    check_ids,
    parse,
    read_chat,
    read_completion,
)
from capsim.emulator.clock import Clock
from capsim.emulator.engine_metrics import CONTENT_TYPE, EngineMetrics
from capsim.emulator.live_engine import LiveEngine, Receiver
from capsim.emulator.live_scheduler import LiveScheduler
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.request import Request
from simulator.engine.scheduler import CannotFit
from simulator.profile import Profile

OUTPUT_LEN = 256  # tokens after which an answer ends by itself where its request sets no limit
BYTES_A_TOKEN = 32  # of a body, at the most
LEAST_BODY = 1 << 16  # bytes that a body may have in any case
SHUTDOWN = 0.5  # s, for connections to close by themselves

NO_HTTP = (HttpProcessingError, web.RequestPayloadError)

_LOG = logging.getLogger(__name__)
_LOG.addFilter(lambda record: not _is_of_client(record))

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Reader = Callable[[bytes, int, int], tuple[str | None, Generation]]


class Twin:
    """A server with the timing of a profile.

    `flags` default to the profile's and `model`, the name it is served under, to its model. `speed` is how many times
    faster than real time it runs. An answer to a request that sets no limit has `output_len` tokens. `dev_mode` opens
    /server_info, as VLLM_SERVER_DEV_MODE=1 does.
    """

    def __init__(
        self,
        profile: Profile,
        flags: EngineFlags | None = None,
        *,
        model: str | None = None,
        speed: float = 1.0,
        output_len: int = OUTPUT_LEN,
        dev_mode: bool = False,
    ) -> None:
        self._profile, self._flags = profile, flags or profile.engine_flags
        self.model = model or profile.model
        self.speed = speed
        self._output_len, self._dev_mode = output_len, dev_mode
        self._created = int(time.time())
        self._fingerprint = server_facts.fingerprint(profile)
        self._numbers = count()
        self._metrics = EngineMetrics(
            self.model,
            server_facts.release(profile.engine_version),
            self._flags.max_model_len,
            server_facts.cache_config(profile, self._flags),
            speed,
            self._flags.enable_prefix_caching,
        )

    async def __aenter__(self) -> Self:
        scheduler = LiveScheduler(self._flags)
        times = self._profile.step_time, self._profile.host_time
        self._engine = LiveEngine(scheduler, *times, Clock(self.speed), self._metrics)
        self._serving = asyncio.create_task(self._engine.run())
        # a handler is cancelled when its client leaves
        self._runner = web.AppRunner(
            self._app(), handler_cancellation=True, access_log=None, logger=_LOG, shutdown_timeout=SHUTDOWN
        )
        await self._runner.setup()
        gc.collect()
        gc.freeze()  # what is here stays: looking at it again and again would hold up the tokens
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        gc.unfreeze()

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Take requests at this address, port 0 for any free one; returns the URL. Raises `OSError`."""
        await web.TCPSite(self._runner, host, port, backlog=2048).start()
        address = self._runner.addresses[0]
        name = f"[{address[0]}]" if ":" in address[0] else address[0]
        return f"http://{name}:{address[1]}"

    async def wait(self) -> None:
        """Serve until cancelled; an error of the engine comes out here."""
        await asyncio.shield(self._serving)

    def _app(self) -> web.Application:
        size = LEAST_BODY + BYTES_A_TOKEN * self._flags.max_model_len
        app = web.Application(middlewares=[_errors_as_json], client_max_size=size)
        routes: dict[str, Handler] = {
            "/health": _nothing,
            "/ping": _nothing,
            "/version": self._version,
            "/load": self._load,
            "/v1/models": self._models,
            "/metrics": self._show_metrics,
            "/metrics/": self._show_metrics,
        }
        if self._dev_mode:
            routes["/server_info"] = self._server_info
        for path, handler in routes.items():
            app.router.add_get(path, handler)
        app.router.add_post("/ping", _nothing)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.on_response_prepare.append(self._tell_speed)
        return app

    async def _tell_speed(self, http: web.Request, response: web.StreamResponse) -> None:
        """Whoever measures a twin that hurries can know it."""
        if self.speed != 1:
            response.headers["X-Capsim-Speed"] = f"{self.speed:g}"

    # --- what it is

    async def _version(self, http: web.Request) -> web.Response:
        return web.json_response({"version": self._profile.engine_version})

    async def _models(self, http: web.Request) -> web.Response:
        card = server_facts.model_card(self.model, self._profile, self._flags, self._created)
        return web.json_response({"object": "list", "data": [card]})

    async def _load(self, http: web.Request) -> web.Response:
        return web.json_response({"server_load": self._engine.requests})

    async def _show_metrics(self, http: web.Request) -> web.Response:
        text = self._metrics.text(http.query.getall("name[]", []))
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def _server_info(self, http: web.Request) -> web.Response:
        info = server_facts.server_info(self._profile, self._flags)
        if http.query.get("config_format", "text") == "text":
            info["vllm_config"] = str(info["vllm_config"])
        return web.json_response(info)

    # --- tokens

    async def _tokenize(self, http: web.Request) -> web.Response:
        body = parse(TokenizeBody, await http.read())
        self._check_model(body.model)
        if body.messages is not None:
            text = chat_text(body.messages, body.add_generation_prompt)
        elif body.prompt is not None:
            text = body.prompt
        else:
            raise ApiError("prompt: Field required", parameter="prompt")
        ids = tokenizer.encode(text)
        words = [tokenizer.decode([number]) for number in ids] if body.return_token_strs else None
        told = {"count": len(ids), "max_model_len": self._flags.max_model_len, "tokens": ids, "token_strs": words}
        return web.json_response(told)

    async def _detokenize(self, http: web.Request) -> web.Response:
        body = parse(DetokenizeBody, await http.read())
        self._check_model(body.model)
        check_ids(body.tokens, "tokens")
        return web.json_response({"prompt": tokenizer.decode(body.tokens)})

    # --- answers

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, read_completion)

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, read_chat)

    async def _generate(self, http: web.Request, read: Reader) -> web.StreamResponse:
        sent = self._engine.clock.now()  # reading the body is a part of what the profile counts
        model, generation = read(await http.read(), self._flags.max_model_len, self._output_len)
        self._check_model(model)
        request = self._request(generation, sent)
        heading = Heading(self.model, self._fingerprint, request.request_id, int(time.time()))
        if generation.stream:
            return await self._stream(http, request, Events(heading, generation))
        answer = WholeAnswer()
        await self._answer(request, answer, answer.ended)
        return web.json_response(whole_answer(heading, generation))

    async def _stream(self, http: web.Request, request: Request, events: Events) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        chunked = http.version >= HttpVersion11
        if chunked:
            response.enable_chunked_encoding()
        await response.prepare(http)
        if http.transport is None:
            return response
        stream = EventStream(http.transport, chunked, events)
        await self._answer(request, stream, stream.ended)
        await response.write_eof()
        return response

    async def _answer(self, request: Request, receiver: Receiver, ended: asyncio.Future[None]) -> None:
        """Serve a request to its end, or free it when its client leaves."""
        ticket = self._engine.submit(request, receiver)
        try:
            await ended
        finally:
            self._engine.abort(ticket)

    def _request(self, generation: Generation, sent: float) -> Request:
        prompt, output = generation.prompt, generation.output_tokens
        contents = []
        if self._flags.enable_prefix_caching:
            ids = [*prompt.ids, *tokenizer.speech_ids(output)]
            contents = tokenizer.block_contents(ids, self._flags.block_size)
        request = Request(
            next(self._numbers), prompt.tokens, output, generation.max_tokens, generation.priority, prefix=contents
        )
        request.sent = sent
        try:
            self._engine.scheduler.check(request)
        except CannotFit as problem:
            raise ApiError(str(problem)) from None
        return request

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self.model:
            message = f"The model `{model}` does not exist."
            raise ApiError(message, HTTPStatus.NOT_FOUND, "NotFoundError", "model")


def _is_of_client(record: logging.LogRecord) -> bool:
    """Whether a client sent what is no HTTP, which it is told and nobody else needs to read of."""
    return record.exc_info is not None and isinstance(record.exc_info[1], NO_HTTP)


async def _nothing(_: web.Request) -> web.Response:
    return web.Response()


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return web.json_response(error.body(), status=error.status)
    except web.HTTPRequestEntityTooLarge as error:
        return web.json_response(ApiError("Request body too large", error.status).body(), status=error.status)
    except NO_HTTP:  # a body that is not what its headers say
        return web.json_response(ApiError("Request body cannot be read").body(), status=HTTPStatus.BAD_REQUEST)
    except web.HTTPException as error:  # no such route, or not with this method
        return web.json_response({"detail": error.reason}, status=error.status, headers=_allowed(error))


def _allowed(error: web.HTTPException) -> dict[str, str]:
    allow = error.headers.get("Allow")
    return {"Allow": allow} if allow else {}
