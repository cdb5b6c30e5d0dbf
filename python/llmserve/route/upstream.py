"""HTTP/1.1 to a replica: a request, and its answer piece by piece."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from urllib.parse import urlsplit

from llmserve.errors import InvalidArgument

Headers = list[tuple[bytes, bytes]]

# Of an answer's head, and of a line that frames a chunk.
_MAX_HEAD_BYTES = 2**16
_PIECE_BYTES = 2**16
_MAX_IDLE = 256  # connections that are kept


class ReplicaLost(Exception):
    """A replica cannot be reached, or its answer broke off."""


_FAILURES = (OSError, EOFError, ValueError, asyncio.LimitOverrunError, asyncio.TimeoutError)


def _size(text: bytes, base: int) -> int:
    """Of a body, or of a chunk, whose line may say more. Raises ValueError."""
    size = int(text.partition(b";")[0], base)
    if size < 0:
        raise ValueError(f"a size of {size}")
    return size


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @property
    def is_usable(self) -> bool:
        return not self.reader.at_eof() and not self.writer.is_closing()

    def close(self) -> None:
        with suppress(*_FAILURES):
            self.writer.transport.abort()


class Reply:
    """An answer whose head has come. Its body is read once, to the end, or closed."""

    def __init__(
        self, upstream: "Upstream", connection: _Connection, status: int, headers: Headers
    ) -> None:
        self.status = status
        self.headers = headers
        self._upstream = upstream
        self._connection = connection

    def header(self, name: bytes) -> bytes:
        """The first of this name, in lower case; empty without one."""
        return next((value for key, value in self.headers if key == name), b"")

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises ReplicaLost where it breaks off."""
        reader = self._connection.reader
        is_whole = False
        try:
            if self.header(b"transfer-encoding").lower() == b"chunked":
                while size := _size(await reader.readuntil(b"\r\n"), 16):
                    while size:
                        piece = await reader.read(min(size, _PIECE_BYTES))
                        if not piece:
                            raise EOFError("the answer broke off")
                        size -= len(piece)
                        yield piece
                    await reader.readexactly(2)
                await reader.readuntil(b"\r\n")
            else:
                left = _size(self.header(b"content-length") or b"0", 10)
                while left:
                    piece = await reader.read(min(left, _PIECE_BYTES))
                    if not piece:
                        raise EOFError("the answer broke off")
                    left -= len(piece)
                    yield piece
            is_whole = self.header(b"connection").lower() != b"close"
        except _FAILURES as error:
            raise ReplicaLost(f"{self._upstream.url}: {error!r}") from None
        finally:
            self._upstream.give_back(self._connection, is_whole)

    async def read(self, max_bytes: int) -> bytes:
        """The whole body. Raises ReplicaLost, also where it is longer."""
        body = bytearray()
        async for piece in self.pieces():
            body += piece
            if len(body) > max_bytes:
                raise ReplicaLost(f"{self._upstream.url}: an answer of more than {max_bytes} bytes")
        return bytes(body)

    def close(self) -> None:
        """Reads no more: the replica ends what it runs for it."""
        self._connection.close()


class Upstream:
    """One replica's address, and the connections to it. Used on one event loop."""

    def __init__(self, url: str, connect_timeout_s: float) -> None:
        """url: http://host:port or https://, with a path before /v1 or none. Raises
        InvalidArgument."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        is_plain = not (parts.query or parts.fragment or parts.username or parts.password)
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or not is_plain
            or port == -1
        ):
            raise InvalidArgument(f"replicas are given as http://host:port, got {url!r}")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._host = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[_Connection] = []

    async def request(
        self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]], body: bytes = b""
    ) -> Reply:
        """Sends it and returns once the head of its answer is there. Raises ReplicaLost."""
        host = self._host if ":" not in self._host else f"[{self._host}]"
        head = [f"{method} {self._path}{path} HTTP/1.1\r\nhost: {host}:{self._port}\r\n".encode()]
        head += [b"%b: %b\r\n" % item for item in headers]
        head.append(b"content-length: %d\r\n\r\n" % len(body))
        data = b"".join(head) + body
        while self._idle:  # one that the replica has closed meanwhile is no sign of its death
            connection = self._idle.pop()
            if connection.is_usable:
                with suppress(ReplicaLost):
                    return await self._exchange(connection, data)
        return await self._exchange(await self._connect(), data)

    async def _connect(self) -> _Connection:
        try:
            opened = asyncio.open_connection(
                self._host, self._port, ssl=self._tls, limit=_MAX_HEAD_BYTES
            )
            return _Connection(*await asyncio.wait_for(opened, self._connect_timeout_s))
        except _FAILURES as error:
            raise ReplicaLost(f"{self.url} cannot be reached: {error!r}") from None

    async def _exchange(self, connection: _Connection, data: bytes) -> Reply:
        try:
            connection.writer.write(data)
            await connection.writer.drain()
            status = 100
            while status < 200:
                head = await connection.reader.readuntil(b"\r\n\r\n")
                first, *lines = head[:-4].split(b"\r\n")
                version, code, *_ = first.split(b" ", 2)
                if not version.startswith(b"HTTP/1."):
                    raise ValueError(f"no HTTP/1.1: {first[:80]!r}")
                status = int(code)
            fields = [line.partition(b":") for line in lines]
            headers = [(name.strip().lower(), value.strip()) for name, _, value in fields]
        except _FAILURES as error:
            connection.close()
            raise ReplicaLost(f"{self.url}: {error!r}") from None
        except BaseException:
            connection.close()
            raise
        return Reply(self, connection, status, headers)

    def give_back(self, connection: _Connection, is_whole: bool) -> None:
        """Of a reply that has ended; is_whole: another request may use the connection."""
        if is_whole and connection.is_usable and len(self._idle) < _MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Closes what is idle."""
        while self._idle:
            self._idle.pop().close()
