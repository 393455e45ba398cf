"""HTTP endpoints of the OpenAI-compatible API, as an ASGI application."""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as Call
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jrl.processes.agreement import installed_versions
from jrl.serving.api.fields import ApiError, boolean, one_line
from jrl.serving.api.response_items import ItemsBuilder
from jrl.serving.api.sampling import with_defaults
from jrl.serving.api.tokens import ids_to_detokenize, text_to_tokenize
from jrl.serving.api_request import (
    ApiRequest,
    check_model,
    parse_chat,
    parse_completion,
    parse_generate,
    parse_response,
)
from jrl.serving.chat.page import chat_page
from jrl.serving.grammar import Grammar
from jrl.serving.metrics import CLIENT_GONE, Metrics
from jrl.serving.policy import ApiModel
from jrl.serving.responses import Event, Job, ResponseBuilder, fingerprint
from jrl.serving.service import Service, closing_error
from jrl.serving.transcript import TokenStrings
from jrl.tasks.data.fields import short

BODY_SECONDS = 60.0
"""Timeout of a request's body."""
MAX_DISCARDED_BODIES = 8
"""Multiple of the largest body that is read and discarded, so that the client gets the error."""
ENCODING_THREADS = 2
"""Threads that parse and tokenize short requests, and as many for long ones."""
SHORT_BODY = 2**16
"""Most bytes of a short request's body."""
GRAMMAR_SECONDS = 30.0
"""Timeout of the compilation of a grammar, with those before it; the first takes seconds."""
ENDPOINTS = (
    "The endpoints are /v1/completions, /v1/chat/completions, /v1/responses and /v1/models; set "
    "the base_url of a client to end in /v1."
)
"""End of the message to a request of another path."""
Handler = Callable[[Call], Awaitable[ASGIApp]]
Parse = Callable[[Mapping[str, Any]], ApiRequest]
T = TypeVar("T")
Events = asyncio.Queue[Event | None]
"""Events of a request; None when its client has left."""
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class FrontEnd:
    """HTTP front end between connections and the service.

    Args:
      service: its `flush` becomes the `flush` of this object.
      api_key: required of clients, except at ``/health``; None requires none.
      max_bytes: limit of a body.
      allowed_origins: origins of web pages that may read answers; "*" is every one.
      allowed_hosts: names of this server in the header Host, besides addresses and localhost;
        others are rejected if no key is required. "*" is every one.
    """

    def __init__(
        self,
        service: Service,
        served: ApiModel,
        metrics: Metrics,
        *,
        api_key: str | None,
        max_bytes: int,
        allowed_origins: Sequence[str] = (),
        allowed_hosts: Sequence[str] = (),
    ):
        self._service, self._served, self._metrics = service, served, metrics
        self._api_key, self._max_bytes = api_key, max_bytes
        self._allowed_origins, self._allowed_hosts = allowed_origins, allowed_hosts
        # Apart, so that neither long prompts nor grammars make other requests wait.
        self._encoding, self._encoding_long = (
            ThreadPoolExecutor(ENCODING_THREADS, f"jrl encode {kind}") for kind in ("short", "long")
        )
        self._compiling = ThreadPoolExecutor(1, "jrl grammar")
        self._token_strings = TokenStrings(served.format.tokenizer)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outbox: list[tuple[Events, Event]] = []
        self._open: set[asyncio.Timeout] = set()
        self._end: float | None = None
        service.flush = self._flush
        metrics.uncompiled.set_function(lambda: service.num_uncompiled)

    def application(self) -> Starlette:
        """All endpoints."""
        routes = [
            Route(
                "/v1/completions", self._endpoint("completions", parse_completion), methods=["POST"]
            ),
            Route("/v1/chat/completions", self._endpoint("chat", parse_chat), methods=["POST"]),
            Route("/v1/responses", self._endpoint("responses", parse_response), methods=["POST"]),
            Route(
                "/inference/v1/generate",
                self._endpoint("generate", parse_generate, has_defaults=False),
                methods=["POST"],
            ),
            Route("/tokenize", self._require_key(self._tokenize), methods=["POST"]),
            Route("/detokenize", self._require_key(self._detokenize), methods=["POST"]),
            Route("/", _show_page),
            Route("/version", self._require_key(self._show_version)),
            Route("/v1/models", self._require_key(self._models)),
            Route("/v1/models/{name:path}", self._require_key(self._model)),
            Route("/v1/load", self._require_key(self._load), methods=["POST"]),
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/metrics", self._require_key(self._show_metrics)),
        ]
        # Unknown paths and methods are answered in OpenAI's format too, and so are internal errors,
        # whose traceback the server logs.
        handlers: dict[Any, Any] = {HTTPException: _handle_http_error, Exception: _handle_exception}
        # Before the check of keys: a browser's preflight request (OPTIONS) carries none.
        cross_origin = Middleware(
            CORSMiddleware,
            allow_origins=self._allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
        host_check = Middleware(OwnHost, allowed=self._allowed_hosts)
        # A web page that resolves its own name to this machine has no key.
        middleware = [host_check] if self._api_key is None else []
        middleware += [cross_origin] if self._allowed_origins else []
        return Starlette(routes=routes, exception_handlers=handlers, middleware=middleware)

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
    async def _timeout(self, seconds: float | None) -> AsyncIterator[None]:
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

    def _endpoint(self, name: str, parse: Parse, has_defaults: bool = True) -> Handler:
        async def serve(call: Call) -> ASGIApp:
            self._loop = asyncio.get_running_loop()
            try:
                self._check_key(call)
                content = await self._content(call)
                defaults = self._served.defaults if has_defaults else {}
                request, prompts = await self._encode(self._read_request, content, parse, defaults)
                return await self._begin(name, request, prompts)
            except ApiError as refused:
                self._count(name, str(refused.status))
                return error_response(refused)
            except _ClientGone:
                self._count(name, CLIENT_GONE)
                return Response(status_code=400)
            except Exception:
                self._count(name, "500")
                raise

        return serve

    async def _encode(self, function: Callable[..., T], content: bytes, *arguments: Any) -> T:
        """Calls a function of a body, which takes long for a long one, in a thread."""
        threads = self._encoding if len(content) <= SHORT_BODY else self._encoding_long
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, partial(function, content, *arguments))

    def _read_request(
        self, content: bytes, parse: Parse, defaults: Mapping[str, Any]
    ) -> tuple[ApiRequest, list[np.ndarray]]:
        """The request in a body, and the tokens of its prompts."""
        request = parse(with_defaults(parse_body(content), defaults))
        check_model(request.model, self._served.name)
        return request, self._served.prompts(request)

    async def _compile(self, request: ApiRequest) -> Grammar | None:
        if not request.needs_grammar:
            return None
        param = "tool_choice" if request.rule is None else request.rule.param
        loop = asyncio.get_running_loop()
        compiling = loop.run_in_executor(self._compiling, self._served.grammar, request)
        try:
            return await asyncio.wait_for(compiling, GRAMMAR_SECONDS)
        except TimeoutError as error:
            raise ApiError(
                400,
                f"{param} was not compiled within {GRAMMAR_SECONDS:g} s, perhaps after grammars of "
                "other requests: make it smaller, or try again later.",
                param,
                "grammar_timeout",
            ) from error

    async def _begin(
        self, name: str, request: ApiRequest, prompts: Sequence[np.ndarray]
    ) -> ASGIApp:
        """Submits a request, and returns the ASGI app that sends its response."""
        limits = [self._served.limit(request, prompt) for prompt in prompts]
        grammar = await self._compile(request)
        events: Events = asyncio.Queue()
        job = Job(request, prompts, limits, lambda e: self._outbox.append((events, e)), grammar)
        self._service.submit(job)
        decode = self._served.decoder(request)
        echoes = [decode(prompt.tolist()) for prompt in prompts] if request.echo else []
        builder = ResponseBuilder if request.repeated is None else ItemsBuilder
        answer = builder(request, self._token_strings, prompts, echoes)
        return partial(self._send_answer, name, job, answer, events)

    def _count(self, endpoint: str, status: str) -> None:
        self._metrics.requests.labels(endpoint, status).inc()

    async def _send_answer(
        self,
        name: str,
        job: Job,
        answer: ResponseBuilder,
        events: Events,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Sends the response as it is generated, or nothing more once its client has left."""
        disconnect = asyncio.create_task(_until_disconnect(receive))
        disconnect.add_done_callback(lambda _: events.put_nowait(None))
        status = CLIENT_GONE
        try:
            async with self._timeout(None):
                send_response = _stream if job.request.stream else _send_full
                status = await send_response(answer, events, send)
        except OSError:  # the connection broke during a send, or the client does not read
            pass
        except Exception:
            status = "500"
            raise
        finally:
            disconnect.cancel()
            if not answer.finished:
                self._service.cancel(job)
            self._count(name, status)

    def _require_key(self, handler: Handler) -> Handler:
        async def serve(call: Call) -> ASGIApp:
            try:
                self._check_key(call)
                return await handler(call)
            except ApiError as refused:
                return error_response(refused)

        return serve

    def _check_key(self, call: Call) -> None:
        if self._api_key is None:
            return
        key = call.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(key.encode(), self._api_key.encode()):
            raise ApiError(
                401,
                "the API key is missing or not that of this server: send the header "
                "Authorization: Bearer KEY.",
                code="invalid_api_key",
            )

    async def _content(self, call: Call) -> bytes:
        """Body of a request."""
        content, size = bytearray(), 0
        try:
            async with self._timeout(BODY_SECONDS):
                async for chunk in _body_chunks(call.receive):
                    size += len(chunk)
                    if size <= self._max_bytes:
                        content += chunk
                    elif size > MAX_DISCARDED_BODIES * self._max_bytes:
                        break
        except TimeoutError as error:
            if self._service.closing:
                raise closing_error() from error
            raise ApiError(
                408,
                f"{size} bytes of the body came within {BODY_SECONDS:g} s, and not its end: send "
                "all that Content-Length says, or less at a time.",
                code="body_timeout",
            ) from error
        if size > self._max_bytes:
            raise ApiError(
                413,
                f"the body has more than {self._max_bytes} bytes: send less at a time, or serve "
                "with a larger --max-body.",
                code="body_too_large",
            )
        return bytes(content)

    async def _tokenize(self, call: Call) -> Response:
        content = await self._content(call)
        return JSONResponse(await self._encode(self._tokens_of, content))

    def _tokens_of(self, content: bytes) -> dict[str, Any]:
        body, served = parse_body(content), self._served
        body = {**body, "model": body.get("model") or served.name}
        if body.get("messages") is None:
            text, adds, names = text_to_tokenize(body)
            check_model(body["model"], served.name)
            ids = served.tokenize(text, adds)
        else:
            names = boolean(body, "return_token_strs")
            request = parse_chat({n: v for n, v in body.items() if n != "return_token_strs"})
            check_model(request.model, served.name)
            ids = served.prompts(request)[0].tolist()
        strings = [self._token_strings.string_of(token) for token in ids] if names else None
        counted = {"count": len(ids), "max_model_len": served.length}
        return {**counted, "tokens": ids, "token_strs": strings}

    async def _detokenize(self, call: Call) -> Response:
        content = await self._content(call)
        return JSONResponse(await self._encode(self._text_of, content))

    def _text_of(self, content: bytes) -> dict[str, Any]:
        body = parse_body(content)
        ids = ids_to_detokenize(body)
        check_model(body.get("model") or self._served.name, self._served.name)
        return {"prompt": self._served.detokenize(ids)}

    async def _show_version(self, call: Call) -> Response:
        return JSONResponse({"version": installed_versions()["jrl-reasoning"]})

    async def _models(self, call: Call) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_entry()]})

    async def _model(self, call: Call) -> Response:
        name = call.path_params["name"]
        if name != self._served.name:
            raise ApiError(
                404,
                f"model {name!r} is not served here: use {self._served.name!r}.",
                "model",
                "model_not_found",
            )
        return JSONResponse(self._model_entry())

    def _model_entry(self) -> dict[str, Any]:
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
            raise ApiError(
                403,
                "loading a policy needs the API key, and this server has none: serve with "
                "--api-key, or with --follow.",
            )
        future: Future[int] = self._service.load()
        try:
            number = await asyncio.wrap_future(future)
        except ApiError:
            raise
        except Exception as error:
            what = f"no policy could be loaded: {one_line(error)}"
            raise ApiError(409, what, code="not_loaded") from error
        return JSONResponse({"version": number, "system_fingerprint": fingerprint(number)})

    async def _health(self, call: Call) -> Response:
        # It needs no API key, so it returns less than /metrics.
        if self._service.failure is not None or self._service.closing:
            return JSONResponse({"status": "unavailable"}, 503)
        return JSONResponse({"status": "ok"})

    async def _show_metrics(self, call: Call) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def _show_page(call: Call) -> Response:
    return chat_page()


class _ClientGone(Exception):
    """A client left before its request was read."""


def error_response(error: ApiError) -> Response:
    """HTTP response of a rejected request."""
    return JSONResponse(error.body, error.status, error.headers)


async def _handle_http_error(call: Call, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{call.method} {call.url.path}: {error.detail}."
    if error.status_code == 404:
        what += f" {ENDPOINTS}"
    return JSONResponse(ApiError(error.status_code, what).body, error.status_code, error.headers)


async def _handle_exception(call: Call, error: Exception) -> Response:
    what = "internal server error: the traceback is in the server's log."
    return error_response(ApiError(500, what))


class OwnHost:
    """Rejects requests whose header Host names another machine than this one.

    Args:
      allowed: names of this machine besides its addresses and localhost; "*" is every one.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]):
        self._app, self._allowed = app, {name.lower() for name in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._app
        if scope["type"] == "http" and not self._is_allowed(
            host := Headers(scope=scope).get("host")
        ):
            app = error_response(
                ApiError(
                    403,
                    f"the header Host names {short(host)}, perhaps for a web page that gave this "
                    "machine its own name: use localhost or the address, or serve with --api-key "
                    "or --allowed-hosts.",
                    code="foreign_host",
                )
            )
        await app(scope, receive, send)

    def _is_allowed(self, host: str | None) -> bool:
        name = urlsplit(f"//{host or ''}").netloc.lower()
        name = name[: name.rfind("]") + 1] if name.startswith("[") else name.partition(":")[0]
        if not name or "*" in self._allowed or name in self._allowed:
            return True
        if name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


def parse_body(content: bytes) -> Mapping[str, Any]:
    """The JSON object in a body; raises ApiError for any other body."""
    try:
        body = json.loads(content)
        _check_characters(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}.") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a JSON {type(body).__name__}, not an object.")
    return body


def _check_characters(body: object) -> None:
    """Raises ApiError for a lone surrogate in a text of the body, which JSON can escape."""
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        surrogate = f"\\u{ord(error.object[error.start]):04x}"
        raise ApiError(
            400,
            f"the body has {surrogate}, a lone UTF-16 surrogate: send complete characters.",
        ) from error


async def _body_chunks(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientGone
        more = message.get("more_body", False)
        yield message.get("body", b"")


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_full(answer: ResponseBuilder, events: Events, send: Send) -> str:
    """Sends the full response when it is complete, and returns its status."""
    while not answer.finished:
        delta = await events.get()
        if delta is None:
            return CLIENT_GONE
        if isinstance(delta, ApiError):
            await _send_json(send, delta.status, delta.body)
            return str(delta.status)
        answer.append(delta)
    await _send_json(send, 200, answer.body())
    return "200"


async def _stream(answer: ResponseBuilder, events: Events, send: Send) -> str:
    """Sends a stream of events, and returns its status."""
    await send({"type": "http.response.start", "status": 200, "headers": STREAM})
    status = "200"
    while not answer.finished:
        delta, text = await events.get(), ""
        # Events that arrived meanwhile are sent together.
        while True:
            if delta is None:
                return CLIENT_GONE
            if isinstance(delta, ApiError):
                text, status = text + answer.error(delta), str(delta.status)
                break
            answer.append(delta)
            text += answer.chunks(delta)
            if events.empty():
                break
            delta = events.get_nowait()
        await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        if status != "200":
            break
    last = answer.end() if status == "200" else ""
    await send({"type": "http.response.body", "body": last.encode()})
    return status


async def _send_json(send: Send, status: int, body: Mapping[str, Any]) -> None:
    content = json.dumps(body, ensure_ascii=False).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def _deliver(outbox: list[tuple[Events, Event]]) -> None:
    for events, delta in outbox:
        events.put_nowait(delta)
