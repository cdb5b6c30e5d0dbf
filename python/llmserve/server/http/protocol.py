"""uvicorn's HTTP protocol, with a bound on the request's head, errors in JSON, a way to cut a
connection, and no other protocol that a connection could be upgraded to."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from email.utils import formatdate
from functools import lru_cache
from typing import Any, ClassVar, cast

import httptools
import msgspec
from starlette.types import Scope
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from llmserve.server.http.connection import EXTENSION, Connection
from llmserve.server.http.errors import ApiError
from llmserve.server.http.refusals import RefusalPace, Refuser
from llmserve.server.settings import ServerSettings

_log = logging.getLogger(__name__)

# Of a head, and of what frames a body's bytes: sizes of chunks, their extensions, trailers.
_MAX_HEAD_BYTES = 2**15
# Requests that a client may send ahead of their answers: each takes kilobytes, of 18 bytes read.
_MAX_NUM_AHEAD = 64
_VERSIONS = ("1.0", "1.1")
# An answer that is none yet, which every client of HTTP/1.1 reads over (RFC 9110, 15.2).
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
# When to see whether a client has refused it: after a way there and back, then ever less often.
_FIRST_LOOK_S, _LAST_LOOK_S = 0.005, 1.0
# Who only reads on says so with its request.
_SAYS_SO_WITHIN_S = 0.25
_TCP_CLOSE = 7  # Linux, net/tcp_states.h


def http_protocol(
    settings: ServerSettings,
    answered: Callable[[int], None],
    refusing: Refuser,
) -> type[HttpToolsProtocol]:
    """The protocol class of a server with these bounds. answered: told the status of what gets its
    answer here, since it is no request. refusing: knows the requests whose
    body need not be read, by their heads."""

    class Protocol(_BoundedProtocol):
        bounds = settings
        count_answer = staticmethod(answered)
        refuser = refusing
        pace = RefusalPace()
        waiting: ClassVar = {}

    return Protocol


@lru_cache(maxsize=1)
def _date_header(now_s: int) -> list[tuple[bytes, bytes]]:
    return [(b"date", formatdate(now_s, usegmt=True).encode())]


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """For a client of HTTP/1.0, which knows no chunks (RFC 9112, 6.1): an answer of unknown length
    ends with the connection, which uvicorn closes after it in any case."""
    send = cycle.send

    async def send_plain(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            cycle.chunked_encoding = False
        elif message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]


def _new_parser(protocol: HttpToolsProtocol) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(protocol)
    # As uvicorn's: what follows a request that closes the connection is no error.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


class _BoundedProtocol(HttpToolsProtocol):
    bounds: ServerSettings
    count_answer: Callable[[int], None]
    refuser: Refuser
    pace: RefusalPace
    # The connections that owe a head or a body, not an answer; who has for longest comes first.
    waiting: ClassVar[dict["_BoundedProtocol", None]]
    _whole_at = 0.0  # when the last request had come, by the loop's clock
    _num_head_bytes = 0  # since the last byte of a body, or the last whole request
    _is_in_head = True
    _is_in_body = False  # of the request that `cycle` answers
    _is_dropped = False  # the body that comes: its request has an answer
    _is_due = False  # that request's answer, which is paced
    _is_refused = False
    _last_words: bytes | None = None  # of a refusal that earlier answers go before
    _head_timer: asyncio.TimerHandle | None = None
    _rest_timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None
    _reset_timer: asyncio.TimerHandle | None = None
    _connection: Connection | None = None

    def connection_made(self, transport: Any) -> None:
        if len(self.connections) >= self.bounds.max_connections and not self._make_room():
            self._is_refused = True
            transport.abort()
            return
        super().connection_made(transport)
        self._connection = Connection(self)
        self.waiting[self] = None
        self._expect_head()

    def _make_room(self) -> bool:
        """Cuts the connection that has owed a request for longest, or silent ones would keep out
        all others. Returns whether there is one."""
        owing = (one for one in self.waiting if not one.transport.get_write_buffer_size())
        silent = next(owing, None)
        if silent is None:
            return False
        del self.waiting[silent]
        self.connections.discard(silent)
        silent.transport.abort()
        _log.info("a silent connection makes room", extra={"client": silent._client_host})
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.waiting.pop(self, None)
        self._stop_timer()
        for timer in (self._reader_timer, self._rest_timer, self._reset_timer):
            if timer is not None:
                timer.cancel()
        if self._connection is not None:
            self._connection.lose()
        if self.transport is not None:
            super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client may say that it sends no more and read on (RFC 9112, 9.6). One that has left
        looks the same, until its side refuses what is written to it. Returns whether the connection
        stays open."""
        if self._is_refused or self._is_in_body or self._is_answered or self.scheme == "https":
            return False
        if self.scope["http_version"] == "1.0":  # no interim answers, by which to find out
            return False
        if not self.pipeline and not self.cycle.response_started:
            self.transport.write(_INTERIM)
        elif self.loop.time() - self._whole_at > _SAYS_SO_WITHIN_S:
            return False  # a stream that its reader has had enough of
        self.cycle.keep_alive = False
        self._watch_for_reset(_FIRST_LOOK_S)
        return True

    def _watch_for_reset(self, wait_s: float) -> None:
        """Nobody reads from a socket that has ended, so that nobody is told of a reset."""
        if self.transport.is_closing() or self._is_answered:
            return
        sock = self.transport.get_extra_info("socket")
        if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
            self.transport.abort()
            return
        wait_s = min(2 * wait_s, _LAST_LOOK_S)
        self._reset_timer = self.loop.call_later(wait_s, self._watch_for_reset, wait_s)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        # What comes in one piece with a head may be its body, and what comes with a body's last
        # chunk its trailers: a piece is 256 KiB at most, and the parser tells.
        self._num_head_bytes += len(data)
        if self._num_head_bytes - len(data) > _MAX_HEAD_BYTES:
            self._refuse_head()
            return
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        try:
            while rest and not self._is_refused:
                rest = self._feed(rest)
        except httptools.HttpParserError:
            self.send_400_response("")
        is_between = self._is_answered and not self._is_in_body and self._head_timer is None
        if is_between and self.timeout_keep_alive_task is None:
            # The rest of a body has come whose answer did not wait for it.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _feed(self, data: memoryview) -> memoryview:
        """Returns what follows a head that asks for an upgrade, where there is one: its body, if it
        has one, and else the next request. uvicorn drops it."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            head = self._head_without_upgrade()
            self.parser = _new_parser(self)
            if not self._is_refused:
                self.parser.feed_data(head)
            return data[upgrade.args[0] :]
        return data[:0]

    def _head_without_upgrade(self) -> bytes:
        """The head that was read last, for a parser that has not seen it: with the field, which
        RFC 9110, 7.8, lets a server ignore, it would read no body."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % field for field in self.headers if field[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        self._send_early()
        super().on_message_begin()
        self.server_state.default_headers = _date_header(int(time.time()))
        if self._head_timer is None:
            self._expect_head()
        self._is_in_head = True
        self.scope["extensions"] = {EXTENSION: self._connection}  # type: ignore[dict-item]

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers come by the same way. They are no part of the head, which has been acted upon.
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._is_in_head = False
        self._num_head_bytes = 0
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > _MAX_HEAD_BYTES:
            self._refuse_head()
        elif self.parser.get_http_version() not in _VERSIONS:
            self._refuse(505, "this server speaks HTTP/1.1 and HTTP/1.0")
        elif self.parser.get_method() == b"CONNECT":
            self._refuse(400, "CONNECT is for proxies, and this is none")
        elif len(self.pipeline) >= _MAX_NUM_AHEAD:
            self._refuse(429, f"more than {_MAX_NUM_AHEAD} requests were sent ahead of an answer")
        elif not self.parser.should_upgrade() and not self._answer_early():  # or it comes again
            super().on_headers_complete()
            self._is_in_body = True
            if self.scope["http_version"] == "1.0":
                _send_without_chunks(self.cycle)

    def _answer_early(self) -> bool:
        """Whether a request has been answered without its body, which is dropped."""
        if not self._is_answered or self.flow.write_paused:
            return False  # those before it come first
        self.scope["method"] = self.parser.get_method().decode("ascii")
        self.scope["path"] = self.url.decode("latin-1")
        if not self.refuser.refuses(cast(Scope, self.scope)):
            return False
        if self.parser.get_http_version() == "1.0" or not self.parser.should_keep_alive():
            self._is_refused = True  # reads no more
        self._is_dropped = self._is_in_body = self._is_due = True
        if not self.pace.soon(self._send_early):
            self.flow.pause_reading()
        return True

    def _send_early(self) -> None:
        if not self._is_due:
            return
        self._is_due = False
        if self.transport.is_closing():
            return
        answer = self.refuser.answer(cast(Scope, self.scope))
        fields = [*self.server_state.default_headers, *answer.raw_headers]
        if self._is_refused:
            fields.append((b"connection", b"close"))
        lines = [b"%b: %b\r\n" % field for field in fields]
        data = b"".join([STATUS_LINE[answer.status_code], *lines, b"\r\n", answer.body])
        if self._is_refused:
            self._end_with(data)
            return
        self.transport.write(data)
        self.flow.resume_reading()
        self._await_request()

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        if not self._is_refused and not self._is_dropped:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_head_bytes = 0
        self._whole_at = self.loop.time()
        if not self._is_refused and not self.parser.should_upgrade():
            if not self._is_dropped:
                super().on_message_complete()
            self._is_in_body = self._is_dropped = False
            self.waiting.pop(self, None)
            if self._rest_timer is not None:
                self._rest_timer.cancel()
                self._rest_timer = None
            if self._is_answered and not self._is_due:
                self._await_request()
        self._is_in_head = True

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        super().on_response_complete()
        if is_last and not self.transport.is_closing():
            self._await_request()
        # TLS does not tell what waits below it, and gives up by itself 30 s after it is closed.
        is_watched = self.bounds.stream_grace and self.scheme != "https"
        if is_watched and self._reader_timer is None:
            self.loop.call_soon(self._expect_reader)  # once what the loop can write is written

    def _await_request(self) -> None:
        """Every request that has come has its answer."""
        if self._last_words is not None:
            self._end_with(self._last_words)
            return
        self.waiting[self] = None
        if self._is_in_body and self.bounds.read_timeout:
            # An answer did not wait for the rest, which is read so that a client that is busy
            # sending finds its answer, and dropped.
            self._rest_timer = self.loop.call_later(self.bounds.read_timeout, self.transport.abort)

    def shutdown(self) -> None:
        self._send_early()
        super().shutdown()

    def send_400_response(self, msg: str) -> None:
        if not self._is_refused:
            self._refuse(400, "this is not HTTP/1.1")

    def _refuse_head(self) -> None:
        self._refuse(431, f"the request's head is longer than {_MAX_HEAD_BYTES} bytes")

    def _expect_head(self) -> None:
        """A client that opens a connection and says nothing, or a letter a minute, is let go."""
        if self.bounds.read_timeout:
            self._head_timer = self.loop.call_later(self.bounds.read_timeout, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if not self._is_refused and not self.transport.is_closing():
            self._refuse(408, "no request came within read_timeout")

    def _expect_reader(self) -> None:
        """The last of an answer waits in the transport, whoever made it: a client that takes
        nothing of it is cut as one that lags behind a stream is."""
        num_bytes = self.transport.get_write_buffer_size()
        if num_bytes and self._reader_timer is None:
            grace_s = self.bounds.stream_grace
            self._reader_timer = self.loop.call_later(grace_s, self._check_reader, num_bytes)

    def _check_reader(self, num_bytes_before: int) -> None:
        self._reader_timer = None
        # More than before: the next answer has begun, and has as long.
        if self.transport.get_write_buffer_size() != num_bytes_before:
            self._expect_reader()
            return
        client = self.client[0] if self.client else ""
        _log.info("an answer was not read within stream_grace", extra={"client": client})
        self.transport.abort()

    @property
    def _is_answered(self) -> bool:
        """Whether every request whose head has come has its answer."""
        return not self.pipeline and (self.cycle is None or self.cycle.response_complete)

    @property
    def _client_host(self) -> str:
        return self.client[0] if self.client else ""

    def _refuse(self, status: int, message: str) -> None:
        """Reads no more, and says why once all that was asked before has its answer."""
        self._send_early()
        self._is_refused = True
        _log.info("no request", extra={"status": status, "client": self._client_host})
        is_answered = self._is_answered
        if self._is_in_body and self.pipeline:
            self.pipeline.popleft()  # what is refused is the last that came
        elif self._is_in_body:
            if (
                self._is_dropped or self.cycle.response_started
            ):  # another would be taken for the next request's
                self._end_with(b"")
                return
            is_answered = True
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.count_answer(status)
        body = msgspec.json.encode(ApiError(status, message).body())
        head = [
            STATUS_LINE[status],
            b"content-type: application/json\r\nconnection: close\r\ncontent-length: ",
            str(len(body)).encode(),
            b"\r\n\r\n",
        ]
        self._last_words = b"".join([*head, body])
        if is_answered:
            self._end_with(self._last_words)

    def _end_with(self, last_words: bytes) -> None:
        if self._connection is not None:
            self._connection.claim()
        if last_words:
            self.transport.write(last_words)
        self.transport.close()
