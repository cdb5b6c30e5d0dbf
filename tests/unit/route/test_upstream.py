"""What a replica may answer, however wrong: an answer, or ReplicaLost, and never a hang."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from llmserve.errors import InvalidArgument
from llmserve.route.upstream import ReplicaLost, Upstream

DEADLINE_S = 30.0


def ask(said: bytes, num_requests: int = 1) -> list[tuple[int, bytes]]:
    """What comes of a replica that says this to each request and closes after the last."""

    async def run() -> list[tuple[int, bytes]]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for _ in range(num_requests):
                if not await reader.readuntil(b"\r\n\r\n"):
                    break
                writer.write(said)
            try:
                await writer.drain()
                writer.close()
            except ConnectionError:
                pass

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        upstream = Upstream(f"http://127.0.0.1:{port}", 5.0)
        try:
            answers = []
            for _ in range(num_requests):
                reply = await upstream.request("GET", "/x", [])
                answers.append((reply.status, await reply.read(10_000)))
            return answers
        finally:
            upstream.close()
            server.close()

    async def bounded(call: Callable[[], Awaitable[list[tuple[int, bytes]]]]) -> object:
        return await asyncio.wait_for(call(), DEADLINE_S)

    found = asyncio.run(bounded(run))
    assert isinstance(found, list)
    return found


def test_answers_come_whole_and_connections_are_used_again() -> None:
    plain = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
    assert ask(plain, 3) == [(200, b"hello")] * 3
    chunked = (
        b"HTTP/1.1 201 X\r\nTransfer-Encoding: chunked\r\n\r\n2;a=b\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
    )
    assert ask(chunked, 3) == [(201, b"hello")] * 3
    assert ask(b"HTTP/1.1 100 Continue\r\n\r\n" + plain) == [(200, b"hello")]
    assert ask(b"HTTP/1.1 204 No\r\n\r\n") == [(204, b"")]


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"garbage",
        b"garbage\r\n\r\n",
        b"HTTP/1.1 x OK\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -9\r\n\r\n" + b"x" * 99999,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhe",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n" + b"x" * 99999,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhe",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"5" * 10**6,
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 10**6 + b"\r\n\r\n",
        b"x" * 10**6,
    ],
)
def test_what_is_no_answer_is_a_lost_replica(said: bytes) -> None:
    with pytest.raises(ReplicaLost):
        ask(said)


def test_who_is_not_there_is_lost() -> None:
    async def run() -> None:
        await Upstream("http://127.0.0.1:9", 1.0).request("GET", "/", [])

    with pytest.raises(ReplicaLost, match="cannot be reached"):
        asyncio.run(run())


@pytest.mark.parametrize(
    "url", ["127.0.0.1:80", "ftp://x", "http://", "http://u:p@x", "http://x:99999", "http://x?y=1"]
)
def test_addresses_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match="replicas"):
        Upstream(url, 1.0)
