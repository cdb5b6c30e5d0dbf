"""What an answer may do with its connection past ASGI's `send` and `receive`: write a piece of the
body at once, lend the socket, be told when it is lost, cut it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Its name in the scope.
EXTENSION = "llmserve.connection"


class Connection:
    """Of one TCP connection, for each of its requests in turn. Used on the loop's thread."""

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol: HttpToolsProtocol | None = protocol
        self._take_back: Callable[[], None] | None = None  # while it is lent
        self._left: Callable[[], None] | None = None  # whom to tell that the client has

    @property
    def has_whole_body(self) -> bool:
        """Whether all of a request has come, so that nobody waits for its body. One that was sent
        ahead stands for those before it, which have come before."""
        cycle = self._protocol.cycle if self._protocol is not None else None
        return cycle is not None and not cycle.more_body

    @property
    def is_full(self) -> bool:
        """Whether a write has to wait for the client to read."""
        return self._protocol is not None and self._protocol.flow.write_paused

    @contextmanager
    def watched(self, left: Callable[[], None]) -> Iterator[None]:
        """Within it `left` is called once the client has gone, at once if it has already."""
        if self._protocol is None:
            left()
        self._left = left
        try:
            yield
        finally:
            self._left = None

    def write(self, body: bytes) -> bool:
        """A piece of the answer under way, past its task; False where that has to wait for it."""
        protocol = self._protocol
        if protocol is None or not self._is_open or self.is_full:
            return False
        protocol.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def lend(self, take_back: Callable[[], None]) -> int | None:
        """The socket's descriptor: until `return_loan`, what is to be written is written there, and
        nobody else writes. None where that cannot be: TLS, or bytes that are still to leave.
        take_back: called when the connection itself needs the socket; it returns the loan."""
        protocol = self._protocol
        if protocol is None or not self._is_open:
            return None
        transport = protocol.transport
        is_busy = transport.is_closing() or transport.get_write_buffer_size()
        sock = transport.get_extra_info("socket")
        if is_busy or sock is None or transport.get_extra_info("sslcontext") is not None:
            return None
        self._take_back = take_back
        return int(sock.fileno())

    def return_loan(self, rest: bytes = b"") -> None:
        """rest: bytes that belong before everything that is written from now on."""
        self._take_back = None
        if rest and self._protocol is not None:
            self._protocol.transport.write(rest)

    def claim(self) -> None:
        """The connection is about to write by itself, or to close."""
        if self._take_back is not None:
            self._take_back()

    def abort(self) -> None:
        """Cuts it."""
        if self._protocol is not None:
            self._protocol.transport.abort()

    def lose(self) -> None:
        """It has been closed."""
        self.claim()
        self._protocol = None  # or it and we would hold each other
        if self._left is not None:
            self._left()

    @property
    def _is_open(self) -> bool:
        """Whether a body of chunks is under way. A request that was sent before the last one was
        answered hides that one."""
        cycle = self._protocol.cycle if self._protocol is not None else None
        if cycle is None or not cycle.response_started or not cycle.chunked_encoding:
            return False
        return not (cycle.response_complete or cycle.disconnected)


def own_connection(scope: Scope) -> Connection | None:
    """The one that a request came over, where the server's own protocol reads it."""
    connection = (scope.get("extensions") or {}).get(EXTENSION)
    return connection if isinstance(connection, Connection) else None
