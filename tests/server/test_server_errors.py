"""What is refused, with which status and words; and that the next request is as before."""

from __future__ import annotations

import json
import logging
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import openai
import pytest
from llmserve import AsyncLLM
from llmserve.server.app import ROUTES
from llmserve.server.http.auth import Keys
from llmserve.tokenization.tokenizer import Tokenizer
from serving import DEADLINE_S, RunningServer, running_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}

# (route, body, status, the parameter that the error names)
BAD: list[tuple[str, dict[str, Any], int, str | None]] = [
    (COMPLETIONS, {}, 400, "prompt"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [2048]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [2**31]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [2**63]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [[1], 2]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ["a", []]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 2048}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ["x"] * 129}, 400, "prompt"),
    (COMPLETIONS, {"prompt": {"a": 1}}, 400, "prompt"),
    (COMPLETIONS, {"prompt": "x", "n": 10**6}, 400, "n"),
    (COMPLETIONS, {"prompt": "x", "n": 10**18}, 400, "n"),
    (COMPLETIONS, {"prompt": "x", "n": 0}, 400, "n"),
    (COMPLETIONS, {"prompt": "x", "n": -1}, 400, "n"),
    (COMPLETIONS, {"prompt": "x", "best_of": 10**6}, 400, "best_of"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 10**6}, 400, "logprobs"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 2**63}, 400, "logprobs"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": -2}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 2**63}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "temperature": -1}, 400, "temperature"),
    (COMPLETIONS, {"prompt": "x", "temperature": "hot"}, 400, "temperature"),
    (COMPLETIONS, {"prompt": "x", "top_p": 2}, 400, "top_p"),
    (COMPLETIONS, {"prompt": "x", "top_k": -2}, 400, "top_k"),
    (COMPLETIONS, {"prompt": "x", "seed": 2**70}, 400, "seed"),
    (COMPLETIONS, {"prompt": "x", "seed": -(2**63) - 1}, 400, "seed"),
    (COMPLETIONS, {"prompt": "x", "logprob_token_ids": [5]}, 400, "logprob_token_ids"),
    (
        COMPLETIONS,
        {"prompt": "x", "echo": True, "max_tokens": 0, "logprobs": 1, "logprob_token_ids": [5]},
        400,
        "logprob_token_ids",
    ),
    (
        COMPLETIONS,
        {"prompt": "x", "logprobs": 1, "logprob_token_ids": [2048]},
        400,
        "logprob_token_ids",
    ),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 101}}, 400, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "priority": 3}, 400, "priority"),
    (COMPLETIONS, {"prompt": "x", "stop": [""]}, 400, "stop"),
    (COMPLETIONS, {"prompt": "x", "stop": ["a"] * 65}, 400, "stop"),
    (COMPLETIONS, {"prompt": "x", "timeout": 0}, 400, "timeout"),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, 400, "suffix"),
    (COMPLETIONS, {"prompt": "x", "max_token": 3}, 400, "max_token"),
    (COMPLETIONS, {"prompt": "x", "model": "nope"}, 404, "model"),
    (COMPLETIONS, {"prompt": "x", "stream_options": {}}, 400, "stream_options"),
    ("/v1/embeddings", {"input": []}, 400, "input"),
    ("/v1/embeddings", {"input": [[]]}, 400, "input"),
    ("/v1/embeddings", {"input": ["x"] * 2049}, 400, "input"),
    ("/v1/embeddings", {"input": "x", "dimensions": 0}, 400, "dimensions"),
    ("/v1/embeddings", {"input": "x", "dimensions": 10**6}, 400, "dimensions"),
    ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, 400, "encoding_format"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "a " * 5000}]}, 400, "messages"),
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": "hello"}, 400, "messages"),
    (CHAT, {"messages": ["hello"]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages"),
    (CHAT, {"messages": [{**HELLO["messages"][0], "tool_calls": 5}]}, 400, "messages"),
    (CHAT, {**HELLO, "stream": "yes"}, 400, "stream"),
    (CHAT, {**HELLO, "stop": {"a": 1}}, 400, "stop"),
    (CHAT, {**HELLO, "n": "two"}, 400, "n"),
    (CHAT, {**HELLO, "logprobs": 3}, 400, "logprobs"),
    (CHAT, {**HELLO, "tools": {}}, 400, "tools"),
    (CHAT, {**HELLO, "max_completion_tokens": 1.5}, 400, "max_completion_tokens"),
    (CHAT, {**HELLO, "stream": True, "stream_options": {"usage": True}}, 400, "usage"),
    (
        CHAT,
        {**HELLO, "stream": True, "stream_options": {"include_obfuscation": True}},
        400,
        "stream_options",
    ),
    (CHAT, {**HELLO, "top_p": 0}, 400, "top_p"),
    (CHAT, {**HELLO, "frequency_penalty": 2.5}, 400, "frequency_penalty"),
    (CHAT, {**HELLO, "service_tier": 5}, 400, "service_tier"),
    (CHAT, {**HELLO, "service_tier": "gold"}, 400, "service_tier"),
    (CHAT, {**HELLO, "echo": True}, 400, "echo"),
    (CHAT, {**HELLO, "logprob_token_ids": [5]}, 400, "logprob_token_ids"),
    (CHAT, {**HELLO, "logprobs": True, "logprob_token_ids": [5] * 129}, 400, "logprob_token_ids"),
    (CHAT, {"messages": [{"content": "x"}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
    (CHAT, {**HELLO, "top_logprobs": 10**6, "logprobs": True}, 400, "top_logprobs"),
    (CHAT, {**HELLO, "top_logprobs": 1}, 400, "top_logprobs"),
    (CHAT, {**HELLO, "chat_template": "{{ 1 }}"}, 400, "chat_template"),
    (CHAT, {**HELLO, "chat_template_kwargs": {"tokenize": True}}, 400, "chat_template_kwargs"),
    (CHAT, {**HELLO, "functions": []}, 400, "functions"),
    (CHAT, {**HELLO, "modalities": ["audio"]}, 400, "modalities"),
    (CHAT, {**HELLO, "thinking_token_budget": 5}, 400, "thinking_token_budget"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD)
def test_a_bad_request_is_refused_by_the_parameters_name(
    server: RunningServer, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    got, answer = server.post(path, **body)
    assert (got, answer["error"]["param"]) == (status, param), answer
    assert answer["error"]["code"]
    check_error(answer)


def check_error(answer: Any) -> None:
    """OpenAI's shape, and nothing of the machine in it."""
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    text = json.dumps(answer)
    assert "Traceback" not in text
    assert not re.search(r"/(?:home|root|tmp|usr|work|opt)/", text)
    assert ".py" not in text
    assert "LLM(" not in text  # a client of the server has none to call


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": [5] * 5000}, "prompt"),
        (COMPLETIONS, {"prompt": ["x", [5] * 5000]}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "a " * 5000}]}, "messages"),
        ("/v1/embeddings", {"input": "a " * 5000}, "input"),
    ],
)
def test_a_prompt_that_is_too_long_has_the_code_that_clients_know(
    server: RunningServer, path: str, body: dict[str, Any], param: str
) -> None:
    status, answer = server.post(path, **body)
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert error["type"] == "invalid_request_error"
    assert "max_model_len=" in error["message"]


TOO_LONG = "a" * 100_000  # of the demo's longest tokens, 13 characters, 7,693


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": ["a", TOO_LONG]}, "prompt"),
        (COMPLETIONS, {"prompt": TOO_LONG, "add_special_tokens": False}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": TOO_LONG}]}, "messages"),
        ("/v1/embeddings", {"input": TOO_LONG}, "input"),
    ],
)
def test_a_text_that_cannot_fit_is_not_tokenized(
    server: RunningServer,
    path: str,
    body: dict[str, Any],
    param: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert server.post(path, **body, truncate_prompt_tokens=3)[0] == 200

    def refuse(self: Tokenizer, texts: list[str], add_special_tokens: bool = True) -> Any:
        raise AssertionError("it is tokenized")

    monkeypatch.setattr(Tokenizer, "encode_batch", refuse)
    status, answer = server.post(path, **body)
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert re.search(r"has at least 769\d tokens, but max_model_len=2048", error["message"])


def test_the_official_client_raises_its_own_errors(
    server: RunningServer, locked: RunningServer
) -> None:
    def ask(to: RunningServer, model: str = "demo", **fields: Any) -> None:
        to.openai().completions.create(model=model, prompt="x", **fields)

    with pytest.raises(openai.BadRequestError) as bad:
        ask(server, temperature=-1)
    assert (bad.value.code, bad.value.param) == ("invalid_value", "temperature")
    with pytest.raises(openai.NotFoundError) as missing:
        ask(server, "gpt-5")
    assert (missing.value.code, missing.value.type) == ("model_not_found", "invalid_request_error")
    with pytest.raises(openai.AuthenticationError) as stranger:
        ask(locked)
    assert stranger.value.code == "invalid_api_key"
    assert stranger.value.type == "invalid_request_error"
    assert all(error.value.request_id for error in (bad, missing, stranger))


def test_the_log_has_the_id_of_an_answer_that_refuses(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "llmserve.server.access"):
        _, _, headers = server.request("POST", COMPLETIONS, {"prompt": "secret", "top_p": 2})
        found: list[Any] = []

        def is_written() -> bool:
            found[:] = [
                r for r in caplog.records if getattr(r, "request_id", "") == headers["x-request-id"]
            ]
            return bool(found)

        server.wait_until(is_written, "the line")
    assert (found[0].status, found[0].error) == (400, "invalid_value")
    assert "secret" not in str(vars(found[0]))


def test_after_all_of_them_the_next_answer_is_the_same(server: RunningServer) -> None:
    def text() -> str:
        answer = server.post(COMPLETIONS, prompt="Once", seed=1, max_tokens=8)[1]
        return str(answer["choices"][0]["text"])

    before = text()
    for path, body, _, _ in BAD:
        server.post(path, **body)
    assert text() == before
    server.wait_until_idle()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e400}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"prompt": "x", "metadata": ' + b'{"a":' * 70 + b"1" + b"}" * 70 + b"}",
        b'{"prompt": "x"} trailing',
    ],
    ids=range(12),
)
def test_a_malformed_body_is_a_400(server: RunningServer, body: bytes) -> None:
    status, answer, _ = server.request("POST", COMPLETIONS, body)
    assert status == 400, answer
    check_error(answer)


def test_the_same_key_twice_is_no_way_around_a_check(server: RunningServer) -> None:
    body = b'{"prompt": "x", "n": 1, "n": 1000000, "max_tokens": 1}'
    assert server.request("POST", COMPLETIONS, body)[0] == 400


def test_a_body_that_is_too_long_is_a_413(server: RunningServer) -> None:
    body = b'{"prompt": "' + b"x" * 2**20 + b'"}'
    status, answer, _ = server.request("POST", COMPLETIONS, body)
    assert (status, answer["error"]["code"]) == (413, "request_too_large")


def test_a_body_in_endless_chunks_is_a_413(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as sock:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        sock.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        sent = 0
        with suppress(OSError):  # it answered and left
            while sent < 2**21:
                sock.sendall(b"1\r\nx\r\n" * 4096)
                sent += 4096
        assert b" 413 " in sock.recv(100)
    assert server.request("GET", "/health")[0] == 200


def test_a_head_that_is_too_long_is_a_431(server: RunningServer) -> None:
    for head in (
        b"GET /health HTTP/1.1\r\nX: " + b"a" * 2**20 + b"\r\n\r\n",
        b"GET /" + b"a" * 2**20 + b" HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 200_000 + b"\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as sock:
            with suppress(OSError):  # it answered and left
                sock.sendall(head)
            assert sock.recv(100).startswith(b"HTTP/1.1 431 ")
    assert server.request("GET", "/health")[0] == 200


def test_what_is_not_http_is_a_400_in_the_log_and_in_the_metrics(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    num_before = _num_answers(server, 400)
    caplog.set_level(logging.INFO, "llmserve.server.http.protocol")
    for garbage in (b"\x00" * 100, b"GARBAGE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as sock:
            sock.sendall(garbage)
            assert sock.recv(100).startswith(b"HTTP/1.1 400 ")
    told = [r for r in caplog.records if r.name == "llmserve.server.http.protocol"]
    assert [(r.status, r.client) for r in told] == 3 * [(400, "127.0.0.1")]  # type: ignore[attr-defined]
    assert _num_answers(server, 400) == num_before + 3
    assert server.request("GET", "/health")[0] == 200


JSON_BODY = b'{"prompt": "x", "max_tokens": 1}'
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"


def _post(body: bytes, framing: bytes = b"", more: bytes = UPGRADE) -> bytes:
    framing = framing or b"Content-Length: %d" % len(body)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head + more + framing + b"\r\n\r\n" + body


def _statuses(server: RunningServer, pieces: Sequence[bytes], num_expected: int) -> list[int]:
    """Of the answers on one connection, which takes one more request after those expected."""
    last = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answers = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            sock.sendall(piece)
            time.sleep(0.001)
        while answers.count(b"HTTP/1.1 ") < num_expected and (data := sock.recv(65536)):
            answers += data
        with suppress(OSError):  # it closed
            sock.sendall(last)
            while data := sock.recv(65536):
                answers += data
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", answers)]


@pytest.mark.parametrize(
    "request_bytes",
    [
        _post(JSON_BODY),
        _post(b"20\r\n" + JSON_BODY + b"\r\n0\r\n\r\n", b"Transfer-Encoding: chunked"),
    ],
    ids=["length", "chunked"],
)
@pytest.mark.parametrize("piece", [1, 100, 10_000])
def test_a_request_that_offers_http_2_is_answered_by_http_1(
    server: RunningServer, request_bytes: bytes, piece: int
) -> None:
    pieces = [request_bytes[at : at + piece] for at in range(0, len(request_bytes), piece)]
    assert _statuses(server, pieces, 1) == [200, 200]
    head, _, body = request_bytes.partition(b"\r\n\r\n")
    assert _statuses(server, [head + b"\r\n\r\n", body], 1) == [200, 200]
    assert _statuses(server, [2 * request_bytes], 2) == [200, 200, 200]


def test_the_body_of_a_request_that_offers_http_2_is_no_request(server: RunningServer) -> None:
    hidden = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    assert _statuses(server, [_post(hidden)], 1) == [400, 200]
    # Before it, behind it and between two of them others are read as they are.
    plain = _post(JSON_BODY, more=b"")
    assert _statuses(server, [plain + _post(hidden) + plain], 3) == [200, 400, 200, 200]


def test_a_request_that_offers_another_protocol_is_bounded_like_others(
    server: RunningServer,
) -> None:
    assert _statuses(server, [_post(b"{}", more=UPGRADE + b"X: " + b"a" * 2**16)], 1) == [431]
    assert _statuses(server, [_post(b"x" * 2**20 + b"yz")], 1)[0] == 413
    closes = UPGRADE.replace(b"Upgrade, ", b"Upgrade, close, ")
    assert _statuses(server, [_post(JSON_BODY, more=closes)], 1) == [200]
    websocket = (
        b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    assert _statuses(server, [websocket], 1) == [200, 200]


def _answer(server: RunningServer, data: bytes) -> tuple[bytes, bytes]:
    """(head, body) of what is sent until the connection is closed."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as sock:
        sock.sendall(data)
        head, _, body = b"".join(iter(lambda: sock.recv(65536), b"")).partition(b"\r\n\r\n")
    return head, body


def test_what_asks_for_a_proxy_is_refused(server: RunningServer) -> None:
    for more in (b"", b"CONNECT b.example:443 HTTP/1.1\r\nHost: b\r\n\r\n"):
        data = b"CONNECT a.example:443 HTTP/1.1\r\nHost: a.example\r\n\r\n" + more
        head, body = _answer(server, data)
        assert head.startswith(b"HTTP/1.1 400 ")
        check_error(json.loads(body))
        assert b"CONNECT is for proxies" in body


def test_a_client_of_http_1_0_gets_a_stream_without_chunks(server: RunningServer) -> None:
    body = b'{"prompt": "x", "max_tokens": 4, "stream": true, "ignore_eos": true}'
    data = _post(body, more=b"Connection: close\r\n")
    assert b"transfer-encoding: chunked" in _answer(server, data)[0]
    head, stream = _answer(server, data.replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    lines = stream.decode().split("\n\n")
    assert all(line.startswith("data: ") for line in lines[:-1])
    assert lines[-2:] == ["data: [DONE]", ""]
    # An answer of known length says it.
    head, text = _answer(server, b"GET /version HTTP/1.0\r\n\r\n")
    assert b"content-length: %d" % len(text) in head


def _num_answers(server: RunningServer, status: int) -> float:
    _, text, _ = server.request("GET", "/metrics")
    found = re.search(rf'^llmserve:http_responses_total{{status="{status}"}} (.+)$', text, re.M)
    return float(found[1]) if found else 0.0


def test_other_routes_methods_and_types_are_refused_in_the_same_shape(
    server: RunningServer,
) -> None:
    for method, path, status in (
        ("GET", "/nope", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("GET", "/invocations", 405),
    ):
        got, answer, _ = server.request(method, path)
        assert got == status
        check_error(answer)
        assert path in answer["error"]["message"]
    _, answer, headers = server.request("GET", COMPLETIONS)
    assert headers["allow"] == "POST"
    assert "takes POST, not GET" in answer["error"]["message"]
    status, answer, _ = server.request("POST", COMPLETIONS, b"{}", {"Content-Type": "text/plain"})
    assert status == 415
    check_error(answer)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ],
)
def test_a_choice_of_tools_that_are_not_there_is_refused_by_name(
    server: RunningServer, body: dict[str, Any], param: str
) -> None:
    status, answer = server.post(CHAT, **HELLO, **body)
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.fixture(scope="module")
def locked(demo: AsyncLLM) -> Iterator[RunningServer]:
    with running_server(demo, api_key="alpha, beta", admin_key="root") as server:
        yield server


PROBES = {"/health", "/ready", "/ping"}


def test_every_route_but_those_of_probes_wants_a_key(locked: RunningServer) -> None:
    paths = ["/v1/models", "/version", "/load", "/docs", "/openapi.json", "/nope", "/"]
    for path in [*paths, "/health/", "/HEALTH", "//health"]:
        status, answer, headers = locked.request("GET", path)
        assert status == 401, path
        assert headers["www-authenticate"] == "Bearer"
        check_error(answer)
    routes = [re.sub(r"\{.*\}", "x", route.path) for route in ROUTES]
    for path in {*routes, "/invocations", "/pause", "/update_weights"} - PROBES:
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS"):
            assert locked.request(method, path, {} if method == "POST" else None)[0] == 401, path
    assert {locked.request("GET", path)[0] for path in PROBES} == {200}


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ("Bearer alpha", 200),
        ("bearer beta", 200),
        ("Bearer root", 200),
        ("Bearer alph", 401),
        ("Bearer alphaa", 401),
        ("Bearer ", 401),
        ("Basic alpha", 401),
        ("alpha", 401),
        ("Bearer alpha, beta", 401),
        ("Bearer \xe4", 401),
    ],
)
def test_a_key_has_to_be_whole_and_right(locked: RunningServer, value: str, status: int) -> None:
    headers = {"Authorization": value}
    assert locked.request("GET", "/v1/models", headers=headers)[0] == status


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_key_may_be_written_in_either_encoding_of_headers(demo: AsyncLLM, encoding: str) -> None:
    with running_server(demo, api_key="größe à,beta", admin_key="Σ") as server:
        for key, status in (("größe à", 200), ("größe", 401), ("beta", 200)):
            sent = f"Bearer {key}".encode(encoding).decode("latin-1")
            assert server.request("GET", "/v1/models", headers={"Authorization": sent})[0] == status
        sent = "Bearer Σ".encode().decode("latin-1")
        assert server.request("GET", "/v1/models", headers={"Authorization": sent})[0] == 200


def test_a_key_is_compared_with_every_other_in_constant_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = []

    def compare(given: bytes, kept: bytes) -> bool:
        compared.append((given, kept))
        return given == kept

    monkeypatch.setattr("llmserve.server.http.auth.hmac.compare_digest", compare)
    keys = Keys(["alpha", "beta", "gamma"])
    for key, is_one in (("alpha", True), ("gamma", True), ("a", False), ("alpha" * 9, False)):
        compared.clear()
        assert (keys.find(key.encode()) is not None) == is_one
        # With all of them, as UTF-8 and as Latin-1, and all as long as each other: nothing depends
        # on where it differs.
        assert len(compared) == 6
        assert {len(digest) for pair in compared for digest in pair} == {32}


def test_the_clients_of_a_key_get_in(locked: RunningServer) -> None:
    assert locked.openai(api_key="beta").models.list().data[0].id == "demo"


def test_debug_routes_are_for_admins(locked: RunningServer, server: RunningServer) -> None:
    for key, status in (("alpha", 401), ("root", 404)):
        headers = {"Authorization": f"Bearer {key}"}
        assert locked.request("GET", "/debug/requests/none", headers=headers)[0] == status
    assert server.request("GET", "/debug/requests/none")[0] == 403


def test_pages_of_other_origins_are_not_let_in(server: RunningServer) -> None:
    headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    _, _, received = server.request("OPTIONS", CHAT, headers=headers)
    assert "access-control-allow-origin" not in received


def test_localhost_among_the_origins_is_that_of_any_port(demo: AsyncLLM) -> None:
    asks = {"Access-Control-Request-Method": "POST"}
    with running_server(demo, allowed_origins="localhost") as server:
        for origin, is_let_in in (
            ("http://localhost", True),
            ("http://127.0.0.1:3000", True),
            ("https://[::1]:8080", True),
            ("http://localhost.evil.example", False),
            ("http://notlocalhost", False),
        ):
            _, _, received = server.request("OPTIONS", CHAT, headers={"Origin": origin, **asks})
            allowed = received.get("access-control-allow-origin")
            assert allowed == (origin if is_let_in else None), origin


def test_a_page_of_an_origin_that_was_named_is_let_in_and_needs_a_key(demo: AsyncLLM) -> None:
    named = "https://chat.example"
    with running_server(demo, allowed_origins=f"{named}, https://b.example", api_key="k") as server:
        asks = {
            "Access-Control-Request-Method": "POST",
            # OpenAI's client for browsers sends a dozen like the last.
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
        }
        for origin, allowed in ((named, named), ("https://evil.example", None)):
            got, _, received = server.request("OPTIONS", CHAT, headers={"Origin": origin, **asks})
            assert got == (200 if allowed else 400)
            assert received.get("access-control-allow-origin") == allowed
        for key, status in (("k", 200), ("no", 401)):
            headers = {"Origin": named, "Authorization": f"Bearer {key}"}
            got, _, received = server.request("GET", "/v1/models", headers=headers)
            assert (got, received["access-control-allow-origin"]) == (status, named)
            assert received["access-control-expose-headers"] == "x-request-id, retry-after"
