"""Bytes on a socket: what belongs to which request, and what a client can make the server keep."""

from __future__ import annotations

import random
import re
import resource
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress

import pytest
from llmserve import AsyncLLM
from serving import DEADLINE_S, RunningServer, running_server

MakeOracle = Callable[..., AsyncLLM]

JSON_BODY = b'{"prompt": "x", "max_tokens": 1}'
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
VERSION = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"


def post(framing: bytes, path: bytes = b"/v1/completions") -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head % path + framing + b"\r\n"


def chunks(*pieces: bytes) -> bytes:
    """Without the last one."""
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


WHOLE = post(CHUNKED) + chunks(JSON_BODY)


@pytest.fixture(scope="module")
def locked(demo: AsyncLLM) -> Iterator[RunningServer]:
    with running_server(demo, api_key="sesame", read_timeout=5.0) as server:
        yield server


def connected(server: RunningServer) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def statuses(data: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", data)]


def received(sock: socket.socket, num_answers: int) -> bytes:
    """Until there are so many, or the connection ends."""
    data = b""
    with suppress(ConnectionResetError):
        while len(statuses(data)) < num_answers and (more := sock.recv(65536)):
            data += more
    return data


def to_the_end(sock: socket.socket) -> bytes:
    return received(sock, 2**30)


def peak_bytes() -> int:
    """Of this process, the server's, too."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def flooded(sock: socket.socket, piece: bytes, num_bytes: int) -> int:
    """How many of these bytes were taken before the connection was closed."""
    num_sent = 0
    with suppress(OSError):
        while num_sent < num_bytes:
            sock.sendall(piece)
            num_sent += len(piece)
    return num_sent


def test_fields_behind_a_body_are_no_part_of_the_head(locked: RunningServer) -> None:
    key = b"Authorization: Bearer sesame\r\n"
    for request, status in (
        (WHOLE + b"0\r\n" + key + b"\r\n", 401),
        (WHOLE.replace(CHUNKED, CHUNKED + key) + b"0\r\nX-Checksum: 5\r\n\r\n", 200),
        (WHOLE.replace(CHUNKED, CHUNKED + key) + b"0\r\nAuthorization: Bearer no\r\n\r\n", 200),
    ):
        with connected(locked) as sock:
            for byte in (request, HEALTH):
                sock.sendall(byte)
            assert statuses(received(sock, 2)) == [status, 200]


@pytest.mark.parametrize("is_let_in", [False, True])
@pytest.mark.parametrize(
    "piece",
    [b"a: b\r\n" * 10_000, b"a" * 2**16, b"a: " + b"b" * 2**16 + b"\r\n"],
    ids=["many", "a name", "large"],
)
def test_trailers_without_an_end_are_refused(
    locked: RunningServer, piece: bytes, is_let_in: bool
) -> None:
    key = b"Authorization: Bearer sesame\r\n" if is_let_in else b""
    before = peak_bytes()
    with connected(locked) as sock:
        sock.sendall(post(CHUNKED + key) + chunks(JSON_BODY[:5]) + b"0\r\n")
        assert flooded(sock, piece, 2**26) < 2**24
        assert statuses(to_the_end(sock)) in ([431], [401], [])  # or its reset came first
    assert peak_bytes() - before < 2**26
    assert locked.request("GET", "/health")[0] == 200


def test_what_frames_a_chunk_is_bounded(locked: RunningServer) -> None:
    with connected(locked) as sock:
        sock.sendall(post(CHUNKED + b"Authorization: Bearer sesame\r\n") + b"5;")
        assert flooded(sock, b"x" * 2**16, 2**26) < 2**24
    assert locked.request("GET", "/health")[0] == 200


def test_a_body_that_nobody_waits_for_is_read_for_a_while(demo: AsyncLLM) -> None:
    with running_server(demo, api_key="sesame", read_timeout=1.0) as server:
        with connected(server) as sock:
            sock.sendall(post(CHUNKED) + chunks(JSON_BODY))
            assert statuses(received(sock, 1)) == [401]
            sock.sendall(b"0\r\n\r\n" + HEALTH)  # in time: the connection is as before
            assert statuses(received(sock, 1)) == [200]
            time.sleep(1.3)
            sock.sendall(HEALTH)
            assert statuses(received(sock, 1)) == [200]
        with connected(server) as sock:
            sock.sendall(post(CHUNKED))
            began = time.monotonic()
            with suppress(OSError):
                while time.monotonic() - began < DEADLINE_S:
                    sock.sendall(chunks(b"x"))
                    time.sleep(0.01)
            assert time.monotonic() - began < DEADLINE_S
        server.wait_until(lambda: server.num_connections == 0, "they are gone")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /health\r\n\r\n", 505),  # HTTP/0.9
        (b"GET /health\n", 400),
        (b"GET /health HTTP/0.9\r\n\r\n", 505),
        (b"GET /health HTTP/2.0\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n y\x00: z\r\n\r\n", 400),
        (post(b"Content-Length: 5\r\nContent-Length: 6\r\n") + b"{}", 400),
        (post(b"Content-Length: -1\r\n") + b"{}", 400),
        (post(b"Content-Length: +2\r\n") + b"{}", 400),
        (post(b"Content-Length: 99999999999999999999\r\n") + b"{}", 400),
        (post(b"Content-Length: 2\r\n" + CHUNKED) + b"{}", 400),
        (post(b"Transfer-Encoding: chunked, identity\r\n") + b"{}", 400),
        (post(b"Transfer-Encoding: xchunked\r\n") + b"{}", 400),
        (post(CHUNKED) + b"0x2\r\n{}\r\n0\r\n\r\n", 400),
        (post(CHUNKED) + b"-1\r\n{}\r\n0\r\n\r\n", 400),
        (post(CHUNKED) + b"fffffffffffffffff\r\n{}\r\n0\r\n\r\n", 400),
        (post(CHUNKED) + b"2\r\n{}x\r\n0\r\n\r\n", 400),
        (post(CHUNKED) + b"2\n{}\n0\n\n", 400),
    ],
)
def test_what_is_framed_in_two_ways_or_none_gets_one_answer(
    server: RunningServer, request_bytes: bytes, status: int
) -> None:
    with connected(server) as sock:
        sock.sendall(request_bytes + VERSION)
        assert statuses(to_the_end(sock)) == [status]


@pytest.mark.parametrize("garbage", [b"GARBAGE\r\n\r\n", b"\x00", b"GET / HTTP/1.1\r\nA b\r\n"])
def test_a_request_before_garbage_has_its_answer(server: RunningServer, garbage: bytes) -> None:
    whole = WHOLE + b"0\r\n\r\n"
    for before in (VERSION, whole, 3 * VERSION, VERSION + whole):
        with connected(server) as sock:
            sock.sendall(before + garbage)
            num_before = before.count(b"HTTP/1.1\r\n")
            assert statuses(to_the_end(sock)) == [200] * num_before + [400]
    with connected(server) as sock:
        sock.sendall(VERSION + post(CHUNKED) + b"zz")  # the second is at fault by its body
        assert statuses(to_the_end(sock)) == [200, 400]


def test_a_stream_ends_though_garbage_comes_meanwhile(make_oracle: MakeOracle) -> None:
    with running_server(make_oracle(2000)) as server:
        body = {"prompt": [5], "max_tokens": 50, "ignore_eos": True, "stream": True}
        with closing(server.open_stream("/v1/completions", **body)) as sock:
            data = sock.recv(65536)
            sock.sendall(b"GARBAGE\r\n\r\n")
            data += to_the_end(sock)
        assert statuses(data) == [200, 400]
        assert data.index(b"[DONE]") < data.index(b"HTTP/1.1 400")
        assert server.activity.ended == {}


def test_requests_sent_ahead_are_bounded(make_oracle: MakeOracle) -> None:
    with running_server(make_oracle(2000)) as server:
        body = {"prompt": [5], "max_tokens": 100, "ignore_eos": True}
        with closing(server.open_stream("/v1/completions", **body)) as sock:
            flooded(sock, VERSION * 1000, len(VERSION) * 1000)
            got = statuses(to_the_end(sock))
        assert got[0] == 200
        assert got[-1] == 429
        assert len(got) < 100


def test_silent_connections_do_not_keep_others_out(demo: AsyncLLM) -> None:
    with running_server(demo, max_connections=8) as server, ExitStack() as stack:
        for sent in (b"", b"GET /hea", post(b"Content-Length: 100\r\n")):
            for _ in range(12):
                sock = stack.enter_context(connected(server))
                sock.sendall(sent)
            assert server.request("GET", "/health")[0] == 200
        assert server.num_connections <= 8


def test_connections_that_are_being_answered_are_not_cut_for_others(
    make_oracle: MakeOracle,
) -> None:
    body = {"prompt": [5], "max_tokens": 200, "ignore_eos": True, "stream": True}
    with running_server(make_oracle(2000), max_connections=3) as server:
        with ExitStack() as stack:
            socks = [server.open_stream("/v1/completions", **body) for _ in range(3)]
            for sock in socks:
                stack.enter_context(closing(sock))
            server.wait_until(lambda: len(server.activity.runs) == 3, "three run")
            with connected(server) as fourth, suppress(ConnectionResetError):
                assert fourth.recv(10) == b""
            for sock in socks:
                data = b""
                while b"[DONE]" not in data:
                    data += sock.recv(65536)
        server.wait_until_idle()
        assert server.request("GET", "/health")[0] == 200


def streams_cut(server: RunningServer, num_streams: int, seed: int) -> None:
    """At a random byte of the request or of the answer, by a reset or not."""
    draws = random.Random(seed)
    body = b'{"prompt": "Once", "max_tokens": 24, "ignore_eos": true, "stream": true}'
    request = post(b"Content-Length: %d\r\n" % len(body)) + body
    for _ in range(num_streams):
        with connected(server) as sock:
            if draws.random() < 0.5:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            if draws.random() < 0.3:
                sock.sendall(request[: draws.randrange(len(request))])
                continue
            sock.sendall(request)
            num_wanted, data = draws.randrange(5000), b""
            while len(data) < num_wanted and b"[DONE]" not in data:
                piece = sock.recv(min(num_wanted - len(data), 512))
                assert piece, "the stream ended before its end"
                data += piece


def check_cut_streams(server: RunningServer, num_streams: int) -> None:
    def text() -> str:
        status, answer = server.post("/v1/completions", prompt="Once", seed=1, max_tokens=8)
        assert status == 200
        return str(answer["choices"][0]["text"])

    before = text()
    streams_cut(server, num_streams, seed=7)
    server.wait_until_idle()
    server.wait_until(lambda: server.num_connections == 0, "they are gone")
    assert text() == before


def test_streams_that_are_cut_leave_nothing_behind(server: RunningServer) -> None:
    check_cut_streams(server, 100)


@pytest.mark.long
def test_thousands_of_streams_that_are_cut_leave_nothing_behind(server: RunningServer) -> None:
    check_cut_streams(server, 20_000)


# What mutations are made of: valid requests, and what breaks them.
_SEEDS: Sequence[bytes] = (
    HEALTH,
    WHOLE + b"0\r\n\r\n",
    WHOLE + b"0\r\nA: b\r\n\r\n",
    post(b"Content-Length: %d\r\n" % len(JSON_BODY)) + JSON_BODY,
    post(b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n") + b"{}",
    post(b"Expect: 100-continue\r\nContent-Length: 2\r\n", b"/tokenize") + b"{}",
    b"GET http://x/v1/models HTTP/1.0\r\n\r\n",
)
_PIECES: Sequence[bytes] = (
    *(b"\r\n", b"\n", b"\r", b"\x00", b"\xff", b" ", b":", b";", b",", b"0\r\n\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b"Content-Length: 7\r\n", b"HTTP/1.1", b"HTTP/0.9"),
    *(b"ffffffffffffffff", b"-1", b"%00", b"{" * 100, b"[" * 100, b'"\\ud800"', b"1e999"),
)

_NUM_AT_ONCE = 50


def mutated(draws: random.Random) -> bytes:
    data = bytearray(b"".join(draws.choices(_SEEDS, k=draws.randint(1, 3))))
    for _ in range(draws.randint(1, 4)):
        at = draws.randrange(len(data) + 1)
        match draws.randrange(4):
            case 0:
                data[at:at] = draws.choice(_PIECES)
            case 1:
                del data[at : at + draws.randint(1, 30)]
            case 2 if at < len(data):
                data[at] = draws.randrange(256)
            case _:
                data[at:at] = data[at : at + draws.randint(1, 60)]
    return bytes(data)


def check_mutated_requests(server: RunningServer, num_requests: int) -> None:
    """No answer but one of a client's mistakes; all connections end; the next client is served."""
    draws = random.Random(11)
    num_answers = 0
    for _ in range(0, num_requests, _NUM_AT_ONCE):
        sent = [(mutated(draws), connected(server)) for _ in range(_NUM_AT_ONCE)]
        for half in range(2):
            for data, sock in sent:
                middle = len(data) // 2
                with suppress(OSError):
                    sock.sendall(data[middle:] if half else data[:middle])
        time.sleep(0.1)  # what is incomplete is not waited for
        for data, sock in sent:
            sock.setblocking(False)
            answers = b""
            with sock, suppress(OSError):
                answers = sock.recv(2**20)
            got = statuses(answers)
            num_answers += len(got)
            assert all(s in (100, 200, 505) or 400 <= s < 500 for s in got), (data, got)
    assert num_answers > num_requests / 10  # how many depends on how busy the machine is
    server.wait_until_idle()
    server.wait_until(lambda: server.num_connections == 0, "they are gone")
    assert server.request("GET", "/health")[0] == 200


def test_mutated_requests_are_answered_or_refused(server: RunningServer) -> None:
    check_mutated_requests(server, 400)


@pytest.mark.long
def test_many_mutated_requests_are_answered_or_refused(server: RunningServer) -> None:
    check_mutated_requests(server, 100_000)


STREAMED = b'{"prompt": "x", "max_tokens": 3, "stream": true}'


@pytest.mark.parametrize(
    ("sent", "num_answers", "end"),
    [
        (HEALTH, 1, b"}"),
        (HEALTH + VERSION, 2, b"}"),
        (WHOLE + b"0\r\n\r\n", 1, b"}"),
        (post(b"Content-Length: 48\r\n") + STREAMED, 1, b"data: [DONE]\n\n\r\n0\r\n\r\n"),
        (WHOLE + b"0\r\n\r\n" + HEALTH, 2, b"}"),
    ],
)
def test_a_client_that_sends_no_more_gets_its_answer(
    server: RunningServer, sent: bytes, num_answers: int, end: bytes
) -> None:
    with closing(connected(server)) as sock:
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
        data = b""
        while more := sock.recv(65536):  # to the end of the connection
            data += more
    assert [status for status in statuses(data) if status != 100] == [200] * num_answers
    assert data.endswith(end)
    server.wait_until(lambda: server.num_connections == 0, "the connection has ended")


def test_a_client_that_left_with_its_last_byte_is_found_out(make_oracle: MakeOracle) -> None:
    llm = make_oracle(2000, max_num_seqs=1)  # 2 ms a step
    with running_server(llm) as server:
        body = b'{"prompt": [5], "max_tokens": 2000, "ignore_eos": true}'
        framing = b"Content-Length: %d\r\n" % len(body)
        for _ in range(4):
            sock = connected(server)
            sock.sendall(post(framing) + body)
            server.wait_until(lambda: bool(server.activity.runs), "it runs")
            sock.close()
            begin = time.monotonic()
            server.wait_until(lambda: not server.activity.runs, "it was ended")
            assert time.monotonic() - begin < 2.0  # of 4 s that it would take
        server.wait_until_idle()
        assert server.activity.ended["client_left"] == 4


def test_half_a_request_has_no_answer(server: RunningServer) -> None:
    with closing(connected(server)) as sock:
        sock.sendall(post(b"Content-Length: 100\r\n") + JSON_BODY)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(100) == b""
