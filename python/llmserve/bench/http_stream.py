"""One streamed completion over HTTP/1.1, and when each of its events came."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from llmserve.errors import InvalidArgument

# Of a connection, and of what comes over it.
FAILURES = (
    *(OSError, ValueError, RecursionError),
    *(asyncio.IncompleteReadError, asyncio.LimitOverrunError),
)


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go."""

    host: str
    port: int
    path: str  # before /v1
    is_tls: bool
    api_key: str

    @classmethod
    def of(cls, base_url: str, api_key: str) -> "Target":
        """Of http://host:port. Raises InvalidArgument."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidArgument(f"--base-url must be http://host:port, got {base_url!r}")
        is_tls = parts.scheme == "https"
        port = parts.port or (443 if is_tls else 80)
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port, path, is_tls, api_key)


@dataclass(slots=True)
class Measured:
    """A request. Times are of time.perf_counter, in seconds."""

    sent_at: float
    num_prompt_tokens: int
    num_output_tokens: int = 0
    answered_at: float = 0.0  # the status line and headers were there
    arrivals: list[float] = field(default_factory=list)  # of events with text
    ended_at: float = 0.0
    error: str = ""

    @property
    def ttfb_s(self) -> float:
        """Time to the first byte: to the headers, which many servers send before any token."""
        return self.answered_at - self.sent_at if self.answered_at else 0.0

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.arrivals[0] - self.sent_at if self.arrivals else 0.0

    @property
    def e2el_s(self) -> float:
        """From sending to the end."""
        return self.ended_at - self.sent_at

    @property
    def tpot_s(self) -> float:
        """Mean time of a token after the first."""
        if self.num_output_tokens < 2 or not self.arrivals:
            return 0.0
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        """Between events."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


async def measure(target: Target, body: dict[str, object], num_prompt_tokens: int) -> Measured:
    """Sends a completion with "stream" and reads it to its end; what goes wrong is in `error`."""
    measured = Measured(time.perf_counter(), num_prompt_tokens)
    try:
        status = await _run(target, body, measured)
        if status != 200 and not measured.error:
            measured.error = f"status {status}"
    except FAILURES as error:
        measured.error = str(error) or type(error).__name__
    measured.ended_at = time.perf_counter()
    return measured


async def get_json(target: Target, path: str) -> object:
    """A GET. Raises InvalidArgument if the server does not answer with JSON."""
    try:
        reader, writer = await _open(target)
        try:
            writer.write(_head(target, "GET", path, 0))
            status, lines = await _answer(reader)
            text = "\n".join([line async for line in lines])
        finally:
            writer.close()
        if status != 200:
            raise InvalidArgument(f"{path} of {target.host}:{target.port} says {status}: {text}")
        return json.loads(text)
    except FAILURES as error:
        raise InvalidArgument(
            f"no server answers at {target.host}:{target.port}: {error}; start one with "
            f"`llmserve serve` or give --base-url"
        ) from None


async def _run(target: Target, body: dict[str, object], measured: Measured) -> int:
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    reader, writer = await _open(target)
    try:
        writer.write(_head(target, "POST", "/v1/completions", len(data)) + data)
        status, lines = await _answer(reader)
        measured.answered_at = time.perf_counter()
        await read_events(lines, measured)
        return status
    finally:
        writer.close()


async def read_events(lines: AsyncIterator[str], measured: Measured) -> None:
    """Notes what a stream tells, whatever a server sends. Raises one of FAILURES."""
    async for line in lines:
        now = time.perf_counter()
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            error = event["error"]
            measured.error = str(error.get("message") if isinstance(error, dict) else error)
        if event.get("choices"):
            measured.arrivals.append(now)
        usage = event.get("usage")
        num_tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if isinstance(num_tokens, int):
            measured.num_output_tokens = max(num_tokens, 0)


async def _open(target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.create_default_context() if target.is_tls else None
    return await asyncio.open_connection(target.host, target.port, ssl=context, limit=2**24)


def _head(target: Target, method: str, path: str, length: int) -> bytes:
    lines = [
        f"{method} {target.path}{path} HTTP/1.1",
        f"Host: {target.host}:{target.port}",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        "Connection: close",
    ]
    if target.api_key:
        lines.append(f"Authorization: Bearer {target.api_key}")
    return "\r\n".join([*lines, "", ""]).encode()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, AsyncIterator[str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(head[0].split()[1] if " " in head[0].strip() else "")
    is_chunked = any(line.lower() == "transfer-encoding: chunked" for line in head[1:])
    return status, _lines(reader, is_chunked)


async def _lines(reader: asyncio.StreamReader, is_chunked: bool) -> AsyncIterator[str]:
    rest = b""
    while True:
        if is_chunked:
            size = int(await reader.readuntil(b"\r\n"), 16)
            data = (await reader.readexactly(size + 2))[:size]
        else:
            data = await reader.read(2**16)
        if not data:
            break
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", "replace").rstrip("\r")
    if rest:
        yield rest.decode("utf-8", "replace")
