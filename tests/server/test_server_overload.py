"""A server that is full: what it says to whom, and that it says so before it does any work."""

from __future__ import annotations

import itertools
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from llmserve import AsyncLLM, _core_testing
from llmserve.server.app import ROUTES
from llmserve.server.early_refusal import _PATHS
from llmserve.server.http import refusals
from llmserve.server.routes import request_body
from llmserve.tokenization.tokenizer import Tokenizer
from serving import DEADLINE_S, RunningServer, running_server

MakeOracle = Callable[..., AsyncLLM]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
LONG: dict[str, Any] = {"prompt": [5, 6], "max_tokens": 500, "ignore_eos": True, "stream": True}


@pytest.fixture
def full(make_oracle: MakeOracle) -> Iterator[RunningServer]:
    """A server whose every place is taken, until the test ends."""
    gate = _core_testing.StepGate(1)
    llm = make_oracle(gate=gate, max_num_seqs=1)
    with running_server(llm, max_waiting_requests=1) as server:
        socks = [server.open_stream(COMPLETIONS, **LONG) for _ in range(2)]
        server.wait_until(lambda: len(server.activity.runs) == 2, "both places are taken")
        yield server
        gate.open()
        for sock in socks:
            sock.close()
        server.wait_until_idle()


def test_a_full_server_reads_no_body(
    full: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("the body is parsed")

    monkeypatch.setattr(request_body, "_decode", refuse)
    caplog.set_level(logging.INFO, "llmserve.server.access")
    for path in (COMPLETIONS, CHAT, "/v1/messages", "/api/chat", "/v1/responses", "/invocations"):
        status, answer, headers = full.request("POST", path, {"prompt": "x"}, {"X-Request-Id": "a"})
        assert status == 429, path
        error = answer["error"]
        message = error if path == "/api/chat" else error["message"]
        assert "the model is busy: 2 sequences" in message
        assert int(headers["retry-after"]) >= 1
        assert headers["x-request-id"] == "a"
        assert headers["date"]
    assert full.request("POST", COMPLETIONS, {})[2]["x-request-id"].startswith("req-")
    (admission,) = full.activity.admissions.values()
    assert admission.num_refused == 7
    told = [r for r in caplog.records if r.name == "llmserve.server.access"]
    assert [(r.status, r.error) for r in told] == 7 * [(429, "queue_full")]  # type: ignore[attr-defined]
    _, text, _ = full.request("GET", "/metrics")
    assert 'llmserve:http_responses_total{status="429"} 7.0' in text
    assert 'llmserve:requests_refused_total{reason="queue_full"} 7.0' in text
    assert full.request("GET", "/health")[0] == 200


def test_every_route_that_a_model_answers_is_refused_early() -> None:
    others = ("tokenize", "tokens", "detokenize", "template", "show", "ping", "props")
    others = (*others, "pull", "create", "copy", "push", "delete", "cancel", "tickets", "begun")
    posts = {
        route.path.removeprefix("/v1")
        for route in ROUTES
        if "POST" in (route.methods or ()) and not any(name in route.path for name in others)
    }
    assert posts == set(_PATHS)


def test_who_has_no_key_is_not_told_that_it_is_full(demo: AsyncLLM) -> None:
    with running_server(demo, api_key="sesame", max_waiting_requests=1) as server:
        for admission in server.activity.admissions.values():
            admission._num_reserved = 10**6
        for key, status in (("no", 401), ("sesame", 429)):
            headers = {"Authorization": f"Bearer {key}"}
            assert server.request("POST", COMPLETIONS, {"prompt": "x"}, headers)[0] == status
        for admission in server.activity.admissions.values():
            admission._num_reserved = 0


def test_a_page_that_may_read_the_answer_is_told_so(demo: AsyncLLM) -> None:
    with running_server(demo, allowed_origins="https://chat.example") as server:
        for admission in server.activity.admissions.values():
            admission._num_reserved = 10**6
        sent = {"Origin": "https://chat.example"}
        status, _, headers = server.request("POST", COMPLETIONS, {"prompt": "x"}, sent)
        assert (status, headers["access-control-allow-origin"]) == (429, sent["Origin"])
        for admission in server.activity.admissions.values():
            admission._num_reserved = 0


def _responses(sock: socket.socket, num: int) -> list[tuple[int, Any]]:
    """So many answers of one connection."""
    data, found = b"", []
    while len(found) < num:
        while b"\r\n\r\n" not in data:
            data += sock.recv(65536)
        head, _, data = data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        while len(data) < length:
            data += sock.recv(65536)
        found.append((int(head.split(b" ")[1]), json.loads(data[:length])))
        data = data[length:]
    return found


@pytest.mark.parametrize("piece", [1, 50, 2**20])
def test_the_body_of_a_request_that_is_refused_early_is_no_request(
    full: RunningServer, piece: int
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    hidden = b"GET /nope HTTP/1.1\r\nHost: x\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    data = head + b"Content-Length: %d\r\n\r\n" % len(hidden) + hidden
    data += head + b"Transfer-Encoding: chunked\r\n\r\n"
    data += b"%x\r\n%b\r\n0\r\nA: b\r\n\r\n" % (len(hidden), hidden) + last
    with socket.create_connection(("127.0.0.1", full.port), timeout=DEADLINE_S) as sock:
        for at in range(0, len(data), piece):
            sock.sendall(data[at : at + piece])
        assert [status for status, _ in _responses(sock, 3)] == [429, 429, 200]
        sock.sendall(head + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}")
        assert _responses(sock, 1)[0][0] == 429
        assert sock.recv(1) == b""


def test_a_client_that_reads_none_of_its_refusals_makes_the_server_keep_few(
    full: RunningServer,
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", full.port))
        sock.settimeout(1.0)
        num_sent = 0
        with suppress(TimeoutError):
            while num_sent < 2**26:
                num_sent += sock.send(head * 1000)
    assert num_sent < 2**24
    assert full.request("GET", "/health")[0] == 200


def test_refusals_are_paced_and_keep_their_order(
    full: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each takes a second of this clock, and all a fifth of it, so that four looks pass between two.
    seconds = itertools.count(int(time.monotonic()) + 1)
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)))
    monkeypatch.setattr(refusals, "_SHARE", 0.2)
    monkeypatch.setattr(refusals, "time", clock)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    data = head + b"Content-Length: 2\r\n\r\n{}"
    last = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    began = time.monotonic()
    with ExitStack() as stack:
        socks = [
            stack.enter_context(socket.create_connection(("127.0.0.1", full.port), DEADLINE_S))
            for _ in range(12)
        ]
        for sock in socks:
            sock.sendall(data)
        for sock in socks:
            assert _responses(sock, 1)[0][0] == 429
        assert time.monotonic() - began > 0.3  # eleven that waited for four looks, 10 ms apart
        for sock in socks:
            sock.sendall(data + last)  # what comes after it does not overtake it
        for sock in socks:
            assert [status for status, _ in _responses(sock, 2)] == [429, 200]
        for sock in socks:
            sock.sendall(data)
            sock.sendall(b"GARBAGE\r\n\r\n")
        for sock in socks:
            assert [status for status, _ in _responses(sock, 2)] == [429, 400]
    assert full.request("GET", "/health")[0] == 200


def test_what_is_made_ready_keeps_its_place(
    demo: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that take long to tokenize are as many as may wait, though none runs yet."""
    is_open, encode = threading.Event(), Tokenizer.encode_batch

    def slow(self: Tokenizer, texts: list[str], add_special_tokens: bool = True) -> Any:
        assert is_open.wait(DEADLINE_S)
        return encode(self, texts, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode_batch", slow)
    num_places = demo.max_num_seqs + 1
    with running_server(demo, max_waiting_requests=1) as server:
        (admission,) = server.activity.admissions.values()
        body = {"prompt": "word " * 1500, "max_tokens": 1}
        socks = [server.open_stream(COMPLETIONS, **body) for _ in range(num_places)]
        server.wait_until(lambda: admission.is_full, "every place is kept")
        assert server.post(COMPLETIONS, prompt=[5], max_tokens=1)[0] == 429
        is_open.set()
        for sock in socks:
            with closing(sock):
                assert sock.recv(100).startswith(b"HTTP/1.1 200 ")
        server.wait_until_idle()
        assert server.post(COMPLETIONS, prompt=[5], max_tokens=1)[0] == 200
