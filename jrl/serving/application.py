"""HTTP endpoints of the OpenAI-compatible API, as an ASGI application."""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as Call
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jrl.serving.answers import Answer, event, fingerprint
from jrl.serving.asked import Asked, chat_of, check_model, completion_of
from jrl.serving.job import Event, Job
from jrl.serving.metrics import GONE, Metrics
from jrl.serving.policy import Served
from jrl.serving.refusal import Refused, one_line
from jrl.serving.service import Service, closing
from jrl.serving.transcript import Pieces

BODY_SECONDS = 60.0
"""Timeout of a request's body."""
PATIENCE = 8
"""Multiple of the largest body that is read and discarded, so that the client gets the error."""
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Front:
    """HTTP front end between connections and the service.

    Args:
      service: its `flush` is set to that of this object.
      served: the model.
      metrics: of the server.
      api_key: required of clients, except at ``/health``; None requires none.
      most_bytes: limit of a body.
    """

    def __init__(
        self,
        service: Service,
        served: Served,
        metrics: Metrics,
        *,
        api_key: str | None,
        most_bytes: int,
    ):
        self._service, self._served, self._metrics = service, served, metrics
        self._api_key, self._most_bytes = api_key, most_bytes
        self._pieces = Pieces(served.format.tokenizer)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outbox: list[tuple[asyncio.Queue[Event | None], Event]] = []
        self._open: set[asyncio.Timeout] = set()
        self._end: float | None = None
        service.flush = self._flush
        metrics.uncompiled.set_function(lambda: service.num_uncompiled)

    def application(self) -> Starlette:
        """All endpoints."""
        routes = [
            Route(
                "/v1/completions", self._endpoint("completions", completion_of), methods=["POST"]
            ),
            Route("/v1/chat/completions", self._endpoint("chat", chat_of), methods=["POST"]),
            Route("/v1/models", self._guarded(self._models)),
            Route("/v1/models/{name:path}", self._guarded(self._model)),
            Route("/v1/load", self._guarded(self._load), methods=["POST"]),
            Route("/health", self._health),
            Route("/metrics", self._guarded(self._show_metrics)),
        ]
        # Unknown paths and methods are answered in OpenAI's format too, and so are internal errors,
        # whose traceback the server logs.
        handlers: dict[Any, Any] = {HTTPException: _no_such, Exception: _went_wrong}
        return Starlette(routes=routes, exception_handlers=handlers)

    @property
    def num_open(self) -> int:
        """Number of requests whose body is not fully read or whose response is not fully sent."""
        return len(self._open)

    def end(self, seconds: float | int) -> None:
        """Limits the remaining time for clients to send a request or take a response.

        It applies to requests in progress and to later ones.
        """
        self._end = asyncio.get_running_loop().time() + seconds
        for scope in self._open:
            if not scope.expired():
                scope.reschedule(self._end)

    @asynccontextmanager
    async def _within(self, seconds: float | None) -> AsyncIterator[None]:
        """Raises TimeoutError after so many seconds (None: no timeout) or at the server's end."""
        async with asyncio.timeout(seconds) as scope:
            if self._end is not None:
                scope.reschedule(self._end)
            self._open.add(scope)
            try:
                yield
            finally:
                self._open.discard(scope)

    def _flush(self) -> None:
        """Hands all queued events of the service's thread to the event loop in one call."""
        outbox, self._outbox = self._outbox, []
        if outbox and self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended, and with it all listeners
                self._loop.call_soon_threadsafe(_deliver, outbox)

    def _endpoint(
        self, name: str, parse: Callable[[Mapping[str, Any]], Asked]
    ) -> Callable[[Call], Awaitable[ASGIApp]]:
        async def serve(call: Call) -> ASGIApp:
            self._loop = asyncio.get_running_loop()
            try:
                self._check_key(call)
                asked = parse(await self._body(call))
                check_model(asked, self._served.name)
                return self._begin(name, asked)
            except Refused as refused:
                self._count(name, str(refused.status))
                return said(refused)
            except _Gone:
                self._count(name, GONE)
                return Response(status_code=400)
            except Exception:
                self._count(name, "500")
                raise

        return serve

    def _begin(self, name: str, asked: Asked) -> ASGIApp:
        """Submits a request, and returns the ASGI app that sends its response."""
        prompts = self._served.prompts(asked)
        limits = [self._served.limit(asked, prompt) for prompt in prompts]
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        job = Job(asked, prompts, limits, lambda e: self._outbox.append((events, e)))
        self._service.submit(job)
        tokenizer = self._served.format.tokenizer
        echoes = [tokenizer.decode(prompt.tolist()) for prompt in prompts] if asked.echo else []
        answer = Answer(asked, self._pieces, job.prompt_tokens, echoes)
        return partial(self._answer, name, job, answer, events)

    def _count(self, endpoint: str, status: str) -> None:
        self._metrics.requests.labels(endpoint, status).inc()

    async def _answer(
        self,
        name: str,
        job: Job,
        answer: Answer,
        events: "asyncio.Queue[Event | None]",
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Sends the response as it is generated, or nothing more once its client has left."""
        watch = asyncio.create_task(_until_gone(receive))
        watch.add_done_callback(lambda _: events.put_nowait(None))
        status = GONE
        try:
            async with self._within(None):
                streamed = _stream if job.asked.stream else _at_once
                status = await streamed(answer, events, send)
        except OSError:  # the connection broke during a send, or the client does not read
            pass
        except Exception:
            status = "500"
            raise
        finally:
            watch.cancel()
            if not answer.finished:
                self._service.leave(job)
            self._count(name, status)

    def _guarded(
        self, handler: Callable[[Call], Awaitable[Response]]
    ) -> Callable[[Call], Awaitable[Response]]:
        async def serve(call: Call) -> Response:
            try:
                self._check_key(call)
                return await handler(call)
            except Refused as refused:
                return said(refused)

        return serve

    def _check_key(self, call: Call) -> None:
        if self._api_key is None:
            return
        given = call.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(), self._api_key.encode()):
            raise Refused(
                401,
                "the API key is missing or not that of this server: send the header "
                "Authorization: Bearer KEY.",
                code="invalid_api_key",
            )

    async def _body(self, call: Call) -> Mapping[str, Any]:
        content, size = bytearray(), 0
        try:
            async with self._within(BODY_SECONDS):
                async for part in _parts(call.receive):
                    size += len(part)
                    if size <= self._most_bytes:
                        content += part
                    elif size > PATIENCE * self._most_bytes:
                        break
        except TimeoutError as error:
            if self._service.closing:
                raise closing() from error
            raise Refused(
                408,
                f"{size} bytes of the body came within {BODY_SECONDS:g} s, and not its end: send "
                "all that Content-Length says, or less at a time.",
                code="body_timeout",
            ) from error
        if size > self._most_bytes:
            raise Refused(
                413,
                f"the body has more than {self._most_bytes} bytes: send less at a time, or serve "
                "with a larger --max-body.",
                code="body_too_large",
            )
        try:
            body = json.loads(bytes(content))
            _check_characters(body)
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is not JSON: {error}.") from error
        if not isinstance(body, dict):
            raise Refused(400, f"the body is a JSON {type(body).__name__}, not an object.")
        return body

    async def _models(self, call: Call) -> Response:
        return JSONResponse({"object": "list", "data": [self._about()]})

    async def _model(self, call: Call) -> Response:
        name = call.path_params["name"]
        if name != self._served.name:
            raise Refused(
                404,
                f"model {name!r} is not served here: ask for {self._served.name!r}.",
                "model",
                "model_not_found",
            )
        return JSONResponse(self._about())

    def _about(self) -> dict[str, Any]:
        return {
            "id": self._served.name,
            "object": "model",
            "created": self._served.created,
            "owned_by": "jrl",
            "max_model_len": self._served.length,
            "system_fingerprint": fingerprint(self._service.version),
        }

    async def _load(self, call: Call) -> Response:
        if self._api_key is None:
            raise Refused(
                403,
                "a policy is loaded for whoever shows the API key, and this server has none: "
                "serve with --api-key, or with --follow.",
            )
        future: Future[int] = self._service.load()
        try:
            version = await asyncio.wrap_future(future)
        except Refused:
            raise
        except Exception as error:
            what = f"no policy could be loaded: {one_line(error)}"
            raise Refused(409, what, code="not_loaded") from error
        return JSONResponse({"version": version, "system_fingerprint": fingerprint(version)})

    async def _health(self, call: Call) -> Response:
        # It needs no API key, so it returns less than /metrics.
        if self._service.failure is not None or self._service.closing:
            return JSONResponse({"status": "unavailable"}, 503)
        return JSONResponse({"status": "ok"})

    async def _show_metrics(self, call: Call) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)


class _Gone(Exception):
    """A client left before its request was read."""


def said(refused: Refused) -> Response:
    """HTTP response of a rejected request."""
    return JSONResponse(refused.body, refused.status, refused.headers)


async def _no_such(call: Call, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{call.method} {call.url.path}: {error.detail}."
    return JSONResponse(Refused(error.status_code, what).body, error.status_code, error.headers)


async def _went_wrong(call: Call, error: Exception) -> Response:
    what = "the server made a mistake with this request, of which its log has the traceback."
    return said(Refused(500, what))


def _check_characters(body: object) -> None:
    """Raises Refused for a lone surrogate in a text of the body, which JSON can escape."""
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise Refused(
            400,
            f"the body has {half}, a half of a character in UTF-16, without the other: send whole "
            "characters.",
        ) from error


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        more = message.get("more_body", False)
        yield message.get("body", b"")


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _at_once(answer: Answer, events: "asyncio.Queue[Event | None]", send: Send) -> str:
    """Sends the full response when it is complete, and returns its status."""
    while not answer.finished:
        piece = await events.get()
        if piece is None:
            return GONE
        if isinstance(piece, Refused):
            await _send_whole(send, piece.status, piece.body)
            return str(piece.status)
        answer.take(piece)
    await _send_whole(send, 200, answer.whole())
    return "200"


async def _stream(answer: Answer, events: "asyncio.Queue[Event | None]", send: Send) -> str:
    """Sends a stream of events, and returns its status."""
    await send({"type": "http.response.start", "status": 200, "headers": STREAM})
    status = "200"
    while not answer.finished:
        piece, text = await events.get(), ""
        # Events that arrived meanwhile are sent together.
        while True:
            if piece is None:
                return GONE
            if isinstance(piece, Refused):
                text, status = text + event(piece.body), str(piece.status)
                break
            answer.take(piece)
            text += answer.chunks(piece)
            if events.empty():
                break
            piece = events.get_nowait()
        await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        if status != "200":
            break
    last = answer.end() if status == "200" else ""
    await send({"type": "http.response.body", "body": last.encode()})
    return status


async def _send_whole(send: Send, status: int, body: Mapping[str, Any]) -> None:
    content = json.dumps(body, ensure_ascii=False).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def _deliver(outbox: "list[tuple[asyncio.Queue[Event | None], Event]]") -> None:
    for events, piece in outbox:
        events.put_nowait(piece)
