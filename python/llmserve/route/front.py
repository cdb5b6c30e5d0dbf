"""The application of a router: takes requests, sends each to a replica, and hands its answer on."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractContextManager, ExitStack, aclosing, asynccontextmanager
from typing import Any, Protocol

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmserve._version import __version__
from llmserve.route.metrics import RouteMetrics
from llmserve.route.prompts import PromptReader
from llmserve.route.replay import StreamRecord
from llmserve.route.settings import RouteSettings
from llmserve.route.streams import CannotGoOn, Player
from llmserve.route.upstream import Headers, ReplicaLost
from llmserve.server.access import error_response, write_line
from llmserve.server.http.auth import Authentication
from llmserve.server.http.errors import ApiError, JsonResponse, to_api_error
from llmserve.server.http.events import event
from llmserve.server.http.head import given_request_id, header_bytes
from llmserve.server.running.job import new_id

_log = logging.getLogger(__name__)

# What of a client's head goes to the replica, and of a replica's to the client. Nothing else does:
# no cookies, nothing that frames a body.
_TO_REPLICA = (b"accept", b"x-api-key", b"authorization", b"traceparent", b"anthropic-version")
_TO_CLIENT = (b"content-type", b"retry-after", b"cache-control", b"x-accel-buffering")
_MAX_HEADER_BYTES = 8192
_MAX_ANSWER_BYTES = 2**28
# Of a replica that takes no requests now, where another one may.
_ELSEWHERE = (502, 503, 504)
_STREAMED = ("/v1/completions", "/completions", "/v1/chat/completions", "/chat/completions")
_POSTED = (
    *_STREAMED,
    *("/v1/embeddings", "/embeddings", "/v1/messages", "/v1/messages/count_tokens"),
    *("/tokenize", "/detokenize", "/apply-template", "/v1/tokenize", "/v1/detokenize"),
)
_GOT = ("/v1/models", "/models", "/v1/models/{model:path}", "/models/{model:path}")


class Answer(Protocol):
    """A replica's answer whose head has come."""

    @property
    def status(self) -> int:
        """Of HTTP."""

    @property
    def headers(self) -> Headers:
        """Names in lower case."""

    def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises ReplicaLost."""

    async def read(self, max_bytes: int) -> bytes:
        """The whole body. Raises ReplicaLost."""

    def close(self) -> None:
        """Reads no more."""


class Seat(Protocol):
    """A request's place at a replica."""

    @property
    def name(self) -> str:
        """The replica's, for logs and metrics."""

    def numerics_class(self, model: object) -> str:
        """Of a model there; empty if it is not known."""

    def reading(self, reply: Any) -> AbstractContextManager[None]:
        """Within it the reply is cut when its replica is lost."""

    def note_life(self) -> None:
        """Something has come from there."""

    def grew(self, num_tokens: int) -> None:
        """So many tokens have come."""

    async def check(self) -> None:
        """Something failed there: looks whether it lives."""


class Front(ABC):
    """One router. How a request comes to a replica is a subclass's."""

    def __init__(self, settings: RouteSettings) -> None:
        """Raises InvalidArgument, CorruptFile, NotSupported."""
        self.settings = settings
        self.prompts = PromptReader(settings.tokenizer)
        self.metrics = RouteMetrics()
        self.is_draining = False
        self.num_running = 0

    @abstractmethod
    async def start(self) -> None:
        """Before the first request."""

    @abstractmethod
    async def close(self) -> None:
        """After the last."""

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether a replica takes requests."""

    @abstractmethod
    def described(self) -> list[dict[str, Any]]:
        """Where each replica stands."""

    @abstractmethod
    async def send(
        self, forwarded: "Forwarded", own: ExitStack, data: bytes
    ) -> tuple[Answer, Seat] | None:
        """To the replica that costs least, of those that the request has not failed at and of its
        numerics class. `own` leaves the place. None: there is none. Raises SendFailed."""

    async def drain(self, timeout_s: float) -> None:
        """Takes no more; waits for what runs."""
        self.is_draining = True
        until = time.monotonic() + timeout_s
        while self.num_running and time.monotonic() < until:
            await asyncio.sleep(0.02)

    async def forward(self, request: Request) -> Response:
        """Of a POST: to a replica, and to the next one where it fails before its first byte."""
        if self.is_draining:
            raise ApiError(503, "the router is shutting down", code="shutting_down", retry_after=1)
        data = await self._body(request)
        return await Forwarded(self, request, _decoded(data), data).answer()

    async def get(self, request: Request) -> Response:
        """Of a GET that every replica answers alike."""
        return await Forwarded(self, request, {}, b"").answer()

    async def _body(self, request: Request) -> bytes:
        limit = self.settings.max_body_bytes
        too_large = ApiError(413, f"the body is longer than max_body_bytes={limit}")
        length = header_bytes(request.scope, b"content-length")
        if length.isdigit() and int(length[:20]) > limit:
            raise too_large
        data = bytearray()

        async def read() -> None:
            async for piece in request.stream():
                data.extend(piece)
                if len(data) > limit:
                    raise too_large

        try:
            await asyncio.wait_for(read(), self.settings.read_timeout or None)
        except asyncio.TimeoutError:
            raise ApiError(408, "the body did not come within read_timeout") from None
        return bytes(data)


class SendFailed(Exception):
    """A replica failed before its answer began."""

    def __init__(self, seat: Seat, why: str) -> None:
        super().__init__(f"{seat.name}: {why}")
        self.seat = seat


class Forwarded:
    """One request on its way."""

    def __init__(self, front: Front, request: Request, body: dict[str, Any], data: bytes) -> None:
        self._front = front
        self.request = request
        self._body = body
        self._data = data
        self.path = request.url.path
        if request.url.query:
            self.path += "?" + request.url.query
        self._id = given_request_id(request.scope) or new_id("req").partition("-")[2].encode()
        self.prompt = front.prompts.read(body)
        self.failed: list[str] = []  # replicas, by their names
        self.needed_class: str | None = None  # that the answer has begun with
        self._num_sent = 0  # to go on

    async def answer(self) -> Response:
        """Raises ApiError."""
        is_stream = self._body.get("stream") is True and self.request.url.path in _STREAMED
        self._front.num_running += 1
        stack = ExitStack()
        stack.callback(self._leave)
        try:
            if is_stream and self._front.settings.replay:
                return await self._streamed(stack)
            return await self._whole(stack)
        except BaseException:
            stack.close()
            raise

    def _leave(self) -> None:
        self._front.num_running -= 1

    async def _whole(self, stack: ExitStack) -> Response:
        is_stream = self._body.get("stream") is True
        data = self._data
        while True:
            reply, place = await self._send(stack, data)
            headers = _head(reply, self._id)
            if is_stream and reply.status == 200:
                return _Stream(self._pass_on(reply, place, stack), headers)
            try:
                with place.reading(reply):
                    answer = await reply.read(_MAX_ANSWER_BYTES)
            except ReplicaLost as error:
                await self._note_failure(place, str(error))
                continue  # nothing has gone out: from the beginning, elsewhere
            stack.close()
            return Response(answer, reply.status, headers)

    async def _pass_on(
        self, reply: Answer, place: Seat, stack: ExitStack
    ) -> AsyncGenerator[bytes, None]:
        """A stream of another kind, which ends where its replica does."""
        with stack, place.reading(reply):
            try:
                async for piece in reply.pieces():
                    place.note_life()
                    yield piece
            finally:
                reply.close()

    async def _streamed(self, stack: ExitStack) -> Response:
        record = StreamRecord(self._body)
        reply, place = await self._send(stack, msgspec.json.encode(record.request()))
        headers = _head(reply, self._id)
        if reply.status != 200:
            with place.reading(reply):
                answer = await reply.read(_MAX_ANSWER_BYTES)
            stack.close()
            return Response(answer, reply.status, headers)
        self.needed_class = place.numerics_class(self._body.get("model"))
        player = Player(record, self._reopen, is_replayable=bool(self.needed_class))
        first = _Opened(reply, place, stack)
        return _Stream(self._lines(player, first), headers)

    async def _lines(self, player: Player, first: "_Opened") -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(player.lines(first)) as lines:
                async for line in lines:
                    yield line
        except (CannotGoOn, ApiError) as error:
            _log.warning("a stream ends: %s", error, extra={"request_id": self._id.decode()})
            self._front.metrics.cut.inc()
            said = "its replica was lost, and no other one can go on with it"
            yield event(ApiError(503, said, code="replica_lost").body())
        finally:
            first.close()
            self._front.metrics.replays.inc(player.num_replays)
            self._front.metrics.resumed_tokens.inc(player.record.num_resumed)

    async def _reopen(self, body: dict[str, Any]) -> "_Opened":
        self.failed = []  # who is dead is not chosen, and who lives again may be
        self._num_sent += 1
        stack = ExitStack()
        self._front.num_running += 1
        stack.callback(self._leave)
        try:
            reply, place = await self._send(stack, msgspec.json.encode(body))
            if reply.status != 200:
                answer = await reply.read(_MAX_ANSWER_BYTES)
                raise CannotGoOn(f"{place.name} answers {reply.status}: {answer[:500]!r}")
        except (ReplicaLost, ApiError) as error:
            stack.close()
            raise CannotGoOn(str(error)) from None
        except BaseException:
            stack.close()
            raise
        return _Opened(reply, place, stack)

    async def _send(self, stack: ExitStack, data: bytes) -> tuple[Answer, Seat]:
        """To the replica that costs least, or to others where it fails. Raises ApiError (503)
        where none is left."""
        front = self._front
        while len(self.failed) <= front.settings.retries:
            own = stack.enter_context(ExitStack())
            try:
                sent = await front.send(self, own, data)
            except SendFailed as error:
                own.close()
                await self._note_failure(error.seat, str(error))
                continue
            if sent is None:
                break
            reply, seat = sent
            if reply.status in _ELSEWHERE and front.is_ready:
                own.close()
                reply.close()
                await self._note_failure(seat, f"status {reply.status}")
                continue
            front.metrics.routed.labels(seat.name, str(reply.status)).inc()
            return reply, seat
        raise ApiError(503, "no replica takes the request now", code="no_replica", retry_after=1)

    async def _note_failure(self, seat: Seat, why: str) -> None:
        _log.warning("%s: %s", seat.name, why, extra={"request_id": self._id.decode()})
        self.failed.append(seat.name)
        self._front.metrics.retries.inc()
        await seat.check()

    @property
    def model(self) -> object:
        """That the body names."""
        return self._body.get("model")

    @property
    def is_posted_prompt(self) -> bool:
        """Whether it asks for what follows a prompt, or a conversation."""
        return self.request.method == "POST" and self.request.url.path in _STREAMED

    def headers(self) -> Headers:
        """What goes to the replica."""
        key = self._front.settings.replica_key
        kept = [
            (name, value)
            for name, value in self.request.scope["headers"]
            if name in _TO_REPLICA
            and len(value) <= _MAX_HEADER_BYTES
            and not (key and name in (b"authorization", b"x-api-key"))
        ]
        # Another one for what goes on: a replica may still be at what has broken off.
        request_id = b"%b.%d" % (self._id, self._num_sent) if self._num_sent else self._id
        own = [(b"x-request-id", request_id)]
        if key:
            own.append((b"authorization", b"Bearer " + key.encode()))
        if self.request.method == "POST":
            media_type = header_bytes(self.request.scope, b"content-type")[:_MAX_HEADER_BYTES]
            own.append((b"content-type", media_type or b"text/plain"))
        return [*own, *kept]


class _Opened:
    """A replica's stream, and the request's place there."""

    def __init__(self, reply: Answer, seat: Seat, stack: ExitStack) -> None:
        self._reply = reply
        self._seat = seat
        self._stack = stack
        self._is_closed = False
        stack.enter_context(seat.reading(reply))

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """See OpenStream."""
        try:
            async for piece in self._reply.pieces():
                self._seat.note_life()
                yield piece
        except ReplicaLost:
            self.close()
            await self._seat.check()
            raise

    def note(self, num_tokens: int) -> None:
        """See OpenStream."""
        self._seat.grew(num_tokens)

    def close(self) -> None:
        """See OpenStream."""
        if self._is_closed:
            return
        self._is_closed = True
        self._reply.close()
        self._stack.close()


class _Stream(StreamingResponse):
    """Whose iterator is closed with it, so that the replica is told at once."""

    def __init__(self, lines: AsyncIterator[bytes], headers: dict[str, str]) -> None:
        super().__init__(lines, headers=headers)
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._lines.aclose()  # type: ignore[attr-defined]


def _head(reply: Answer, request_id: bytes) -> dict[str, str]:
    kept = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in reply.headers
        if name in _TO_CLIENT and len(value) <= _MAX_HEADER_BYTES
    }
    return {**kept, "x-request-id": request_id.decode("ascii")}


def _decoded(data: bytes) -> dict[str, Any]:
    """The body as far as a router reads it; what is none is the replica's to refuse."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


class Answers:
    """ASGI middleware: errors become answers, and each request leaves a line in the log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            pass
        except Exception as error:
            if status:
                raise
            answer = to_api_error(error, request_id=given_request_id(scope).decode("ascii"))
            scope["llmserve.error"] = answer
            await error_response(scope["path"], answer)(scope, receive, watched)
        finally:
            write_line(scope, status or 499, time.monotonic() - began, given_request_id(scope))


def _no_route(request: Request, error: Exception) -> Response:
    path = request.url.path[:200]
    status = error.status_code if isinstance(error, HTTPException) else 404
    said = f"a router has no {request.method} {path}; ask a replica"
    return error_response(path, ApiError(status, said))


def create_app(front: Front) -> Starlette:
    """A router as an ASGI application."""
    settings = front.settings

    async def health(_: Request) -> Response:
        return JsonResponse({"status": "ok"})

    async def ready(_: Request) -> Response:
        if front.is_draining or not front.is_ready:
            raise ApiError(503, "no replica is ready", code="no_replica", retry_after=1)
        return JsonResponse({"status": "ok"})

    async def version(_: Request) -> Response:
        return JsonResponse({"version": __version__})

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(
            generate_latest(front.metrics.registry), media_type=CONTENT_TYPE_LATEST
        )

    async def replicas(_: Request) -> Response:
        return JsonResponse({"replicas": front.described()})

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await front.start()
        try:
            yield
        finally:
            await front.close()

    app = Starlette(
        routes=[
            *(Route(path, front.forward, methods=["POST"]) for path in _POSTED),
            *(Route(path, front.get, methods=["GET"]) for path in _GOT),
            Route("/health", health, methods=["GET"]),
            Route("/ping", health, methods=["GET"]),
            Route("/ready", ready, methods=["GET"]),
            Route("/version", version, methods=["GET"]),
            Route("/metrics", metrics, methods=["GET"]),
            Route("/replicas", replicas, methods=["GET"]),
        ],
        middleware=[
            Middleware(Answers),
            Middleware(Authentication, settings=settings.listening),
        ],
        lifespan=lifespan,
        exception_handlers={HTTPException: _no_route},
    )
    app.state.front = front
    return app
