"""One request on its way: to a replica, to others where it fails, and its answer back."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from llmserve.route.frames import FramePlayer, FrameRecord
from llmserve.route.front import Answer, Front, Seat, SendFailed
from llmserve.route.outgoing import Outgoing, canonical
from llmserve.route.protocols import CHOICES, is_answered, is_stream, last_event, sent_body
from llmserve.route.replay import StreamRecord
from llmserve.route.streams import CannotGoOn, Player
from llmserve.route.upstream import Headers, ReplicaLost
from llmserve.server.http.errors import ApiError
from llmserve.server.http.head import given_request_id, header, header_bytes
from llmserve.server.routes.request_body import check_media_type
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


@dataclass(slots=True)
class _Sent:
    """A request that a replica answers."""

    reply: Answer
    seat: Seat
    own: ExitStack  # leaves the seat


class Forwarded:
    """See above; what a front is told of it is Asked."""

    def __init__(self, front: Front, request: Request, body: dict[str, Any], data: bytes) -> None:
        self._front = front
        self.request = request
        self.body = body
        self.path = request.url.path
        if is_answered(self.path) and request.method == "POST":
            _check_type(request)
            data = sent_body(self.path, body, data)
        query = "?" + request.url.query if request.url.query else ""
        self._outgoing = Outgoing(request.method, self.path + query, data)
        self._id = given_request_id(request.scope) or new_id("req").partition("-")[2].encode()
        self.prompt = front.prompts.read(self.path, body)
        self.failed: list[str] = []
        self.needed_class: str | None = None
        self._num_sent = 0  # to go on

    async def answer(self) -> Response:
        """Raises ApiError."""
        self._front.num_running += 1
        stack = ExitStack()
        stack.callback(self._leave)
        try:
            return await self._answered(stack)
        except BaseException:
            stack.close()
            raise

    def _leave(self) -> None:
        self._front.num_running -= 1

    async def _answered(self, stack: ExitStack) -> Response:
        streams = self.request.method == "POST" and is_stream(self.path, self.body)
        record: StreamRecord | FrameRecord | None = None
        outgoing = self._outgoing
        if streams and self._front.settings.replay:
            if canonical(self.path) in CHOICES:
                record = StreamRecord(self.body)
                outgoing = self._with_body(record.request())
            else:
                record = FrameRecord(outgoing)
                outgoing = record.request()
        while True:
            sent = await self._send(stack, outgoing)
            headers = _head(sent.reply, self._id)
            if streams and sent.reply.status == 200:
                if record is None:
                    return _Stream(self._pass_on(sent, stack), headers)
                return _Stream(self._lines(self._player(record, sent.seat), sent, stack), headers)
            try:
                with sent.seat.reading(sent.reply):
                    answer = await sent.reply.read(_MAX_ANSWER_BYTES)
            except ReplicaLost as error:
                sent.own.close()
                await self._note_failure(sent.seat, str(error))
                continue  # nothing has gone out: from the beginning, elsewhere
            stack.close()
            return Response(answer, sent.reply.status, headers)

    def _with_body(self, body: dict[str, Any]) -> Outgoing:
        is_resumed = "resume_token_ids" in body
        data = msgspec.json.encode(body)
        return replace(self._outgoing, data=data, is_resumed=is_resumed)

    async def _pass_on(self, sent: _Sent, stack: ExitStack) -> AsyncGenerator[bytes, None]:
        """A stream that ends where its replica does."""
        with stack, sent.seat.reading(sent.reply):
            try:
                async for piece in sent.reply.pieces():
                    sent.seat.note_life()
                    yield piece
            finally:
                sent.reply.close()

    def _player(self, record: StreamRecord | FrameRecord, seat: Seat) -> Player | FramePlayer:
        self.needed_class = seat.numerics_class(self.body.get("model"))
        can_go_on = bool(self.needed_class)
        if isinstance(record, FrameRecord):
            return FramePlayer(record, self._reopen, can_go_on)

        async def reopen(body: dict[str, Any]) -> _Opened:
            return await self._reopen(self._with_body(body))

        return Player(record, reopen, can_go_on)

    async def _lines(
        self, player: Player | FramePlayer, sent: _Sent, stack: ExitStack
    ) -> AsyncGenerator[bytes, None]:
        first = _Opened(sent.reply, sent.seat, stack)
        try:
            async with aclosing(player.lines(first)) as lines:
                async for line in lines:
                    yield line
        except (CannotGoOn, ApiError) as error:
            _log.warning("a stream ends: %s", error, extra={"request_id": self._id.decode()})
            self._front.metrics.cut.inc()
            said = "its replica was lost, and no other one can go on with it"
            yield last_event(self.path, ApiError(503, said, code="replica_lost"))
        finally:
            first.close()
            self._front.metrics.replays.inc(player.num_replays)
            self._front.metrics.resumed_tokens.inc(player.record.num_resumed)

    async def _reopen(self, outgoing: Outgoing) -> "_Opened":
        self.failed = []  # who is dead is not chosen, and who lives again may be
        self._num_sent += 1
        stack = ExitStack()
        self._front.num_running += 1
        stack.callback(self._leave)
        try:
            sent = await self._send(stack, outgoing)
            if sent.reply.status != 200:
                answer = await sent.reply.read(_MAX_ANSWER_BYTES)
                said = f"{sent.seat.name} answers {sent.reply.status}: {answer[:500]!r}"
                raise CannotGoOn(said)
        except (ReplicaLost, ApiError) as error:
            stack.close()
            raise CannotGoOn(str(error)) from None
        except BaseException:
            stack.close()
            raise
        return _Opened(sent.reply, sent.seat, stack)

    async def _send(self, stack: ExitStack, outgoing: Outgoing) -> _Sent:
        """To the replica that costs least, or to others where it fails. Raises ApiError (503)
        where none is left."""
        front = self._front
        while len(self.failed) <= front.settings.retries:
            own = stack.enter_context(ExitStack())
            try:
                sent = await front.send(self, own, outgoing)
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
            return _Sent(reply, seat, own)
        raise ApiError(503, "no replica takes the request now", code="no_replica", retry_after=1)

    async def _note_failure(self, seat: Seat, why: str) -> None:
        _log.warning("%s: %s", seat.name, why, extra={"request_id": self._id.decode()})
        self.failed.append(seat.name)
        self._front.metrics.retries.inc()
        await seat.check()

    @property
    def model(self) -> object:
        """That the body names."""
        return self.body.get("model")

    @property
    def is_posted_prompt(self) -> bool:
        """Whether it asks for what follows a prompt, or a conversation."""
        return self.request.method == "POST" and is_answered(self.path)

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
            if self.is_posted_prompt and self.body:  # which was looked at here
                media_type = b"application/json"
            own.append((b"content-type", media_type or b"text/plain"))
        return [*own, *kept]


def _check_type(request: Request) -> None:
    """Programs of Ollama's do not say that a body is JSON; a page of another origin has to. Raises
    ApiError (415)."""
    is_ollamas = request.url.path.startswith("/api/") and not request.url.path.startswith("/api/v0")
    if not is_ollamas or header(request.scope, b"origin"):
        check_media_type(request.scope)


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
