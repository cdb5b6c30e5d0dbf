"""Streams whose lines the engine's thread writes: the same bytes as ever, and the connection is
whole again whatever ends it."""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from llmserve import AsyncLLM, _core, _core_testing
from llmserve.errors import ResourceExhausted
from llmserve.server.http.connection import Connection
from serving import DEADLINE_S, RunningServer, data_of, events, running_server, text_of, tls_files

MakeOracle = Callable[..., AsyncLLM]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 300, "ignore_eos": True, "timeout": 600}


@contextmanager
def held_stream(
    make_oracle: MakeOracle, body: dict[str, Any], step_us: int = 300, **settings: Any
) -> Iterator[tuple[RunningServer, socket.socket, _core_testing.StepGate]]:
    """A stream whose first token has been sent and whose connection is lent; it goes on once the
    gate is open."""
    gate = _core_testing.StepGate(2)
    with running_server(make_oracle(step_us, gate=gate, max_model_len=2048), **settings) as server:
        sock = server.open_stream(COMPLETIONS, stream=True, **body)
        server.wait_until(lambda: is_lent(server), "the connection is lent")
        yield server, sock, gate
        gate.open()
        sock.close()
        server.wait_until_idle()


def is_lent(server: RunningServer) -> bool:
    runs = list(server.activity.runs)
    return bool(runs) and all(run.lent is not None for run in runs)


def num_lines(server: RunningServer) -> int:
    return server.llm.get_metrics().num_lines


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": [[5, 6], [7]], "n": 2}),
        (COMPLETIONS, {"prompt": "Once", "echo": True, "stop": ["the"]}),
        (COMPLETIONS, {"prompt": "Once", "stream_options": {"include_usage": True}}),
        (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "n": 2}),
        (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "stop": [" a"]}),
    ],
)
def test_lines_are_worded_the_same_whoever_writes_them(
    make_oracle: MakeOracle, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    body = {**body, "stream": True, "max_tokens": 60, "ignore_eos": True, "seed": 3}

    def lines(holds: bool) -> tuple[dict[int, Any], int]:
        """By choice, and how many the engine wrote. holds: until the connection is lent."""
        gate = _core_testing.StepGate(3)  # each sample has its first token
        by_choice: dict[int, list[str]] = {}
        with running_server(make_oracle(300, gate=gate)) as server:
            sock = server.open_stream(path, **body)
            if holds:
                server.wait_until(lambda: is_lent(server), "the connection is lent")
            gate.open()
            for line in events(sock):
                line = re.sub(r'"id":"[^"]*"|"created":\d+', "", line)
                if line.startswith("data: {"):
                    data = json.loads(line[6:].replace("{,", "{", 1).replace(",,", ","))
                    index = data["choices"][0]["index"] if data["choices"] else -1
                    by_choice.setdefault(index, []).append(line)
            server.wait_until_idle()
            return {i: _joined(own) for i, own in by_choice.items()}, num_lines(server)

    # Of two prompts one may come after the held step.
    has_one_prompt = not isinstance(body.get("prompt"), list)
    by_engine, num_by_engine = lines(holds=has_one_prompt)
    monkeypatch.setattr(Connection, "lend", lambda *_: None)
    by_loop, num_by_loop = lines(holds=False)
    monkeypatch.setattr("llmserve.server.routes.completions._Answer.is_plain", False)
    monkeypatch.setattr("llmserve.server.routes.chat._Answer.is_plain", False)
    by_task, num_by_task = lines(holds=False)
    assert (num_by_loop, num_by_task) == (0, 0)
    assert num_by_engine > 5 or not has_one_prompt
    assert by_engine == by_loop == by_task


def _joined(lines: list[str]) -> tuple[str, set[str]]:
    """The text of a choice, and what its lines are made of beside it: a reader who lagged for a
    moment has two tokens in a line."""
    field = re.compile(r'"(text|content)":"((?:[^"\\]|\\.)*)"')
    text = "".join(json.loads(f'"{found[2]}"') for line in lines for found in field.finditer(line))
    return text, {field.sub(r'"\1":""', line) for line in lines}


def test_the_loop_does_nothing_for_a_token(
    make_oracle: MakeOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    with held_stream(make_oracle, LONG) as (server, sock, gate):
        engine = server.llm._open_engine()
        real = engine.wait_events

        def wait_events(timeout_s: float) -> list[_core.TokenEvent]:
            asked.append(real(timeout_s))
            return asked[-1]

        monkeypatch.setattr(server.llm._runner.router, "_engine", _Engine(engine, wait_events))
        gate.open()
        lines = list(events(sock))
        assert len(data_of(lines)) == LONG["max_tokens"]
        assert num_lines(server) == LONG["max_tokens"] - 2
        (event,) = [event for batch in asked for event in batch]
        assert event.finish_reason == "length"


class _Engine:
    """An engine with another `wait_events`."""

    def __init__(self, engine: _core.Engine, wait_events: Callable[[float], Any]) -> None:
        self.wait_events = wait_events
        self.lend = engine.lend


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_connection_is_used_again_after_a_lent_one(make_oracle: MakeOracle, loop: str) -> None:
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    given = {**LONG, "max_tokens": 150, "seed": 4}
    body = json.dumps({**given, "stream": True}).encode()
    headers = {"Content-Type": "application/json"}
    with running_server(make_oracle(1500), loop=loop) as server:
        whole = server.post(COMPLETIONS, **given)[1]["choices"][0]["text"]
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
        for _ in range(3):
            connection.request("POST", COMPLETIONS, body, headers)
            lines = connection.getresponse().read().decode().split("\n")
            assert text_of(lines) == whole
            assert lines[-3] == "data: [DONE]"
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b'{"status":"ok"}'
        connection.close()
        server.wait_until_idle()
        assert num_lines(server) > 0  # of a second and more


def test_a_request_that_is_sent_ahead_is_answered_after_the_stream(
    make_oracle: MakeOracle,
) -> None:
    with held_stream(make_oracle, LONG) as (_, sock, gate):
        # As the server reads it: while the connection is lent.
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        gate.open()
        data = b""
        while piece := sock.recv(65536):
            data += piece
        first, second = data.split(b"0\r\n\r\nHTTP/1.1 200 OK\r\n")
        assert first.endswith(b"data: [DONE]\n\n\r\n")
        assert len(data_of(re.findall("data: .*", first.decode()))) == LONG["max_tokens"]
        assert second.endswith(b'{"status":"ok"}')


def test_what_is_no_http_is_refused_behind_the_stream_and_leaves_nothing_open(
    make_oracle: MakeOracle,
) -> None:
    with held_stream(make_oracle, {**LONG, "max_tokens": 40}) as (server, sock, gate):
        num_fds = len(os.listdir("/proc/self/fd"))
        sock.sendall(b"\0\0\r\n\r\n")
        gate.open()
        data = b""
        while piece := sock.recv(65536):
            data += piece
        answer, refusal = data.split(b"data: [DONE]")
        assert b'"finish_reason":"length"' in answer
        assert b"HTTP/1.1 400 " in refusal
        server.wait_until(
            lambda: len(os.listdir("/proc/self/fd")) <= num_fds - 2, "both descriptors are closed"
        )
        server.wait_until_idle()


def test_a_client_that_leaves_is_charged_for_what_it_got(
    make_oracle: MakeOracle, caplog: pytest.LogCaptureFixture
) -> None:
    gate = _core_testing.StepGate(8)

    def logged() -> list[logging.LogRecord]:
        return [r for r in caplog.records if r.name == "llmserve.server.access"]

    with running_server(make_oracle(300, gate=gate)) as server:
        sock = server.open_stream(COMPLETIONS, stream=True, **LONG)
        gate.wait_until_held()
        server.wait_until(lambda: is_lent(server), "the connection is lent")
        with caplog.at_level(logging.INFO, "llmserve.server.access"):
            sock.close()
            server.wait_until(lambda: bool(logged()), "it has left")
        (line,) = logged()
        assert line.generated_tokens == 7  # type: ignore[attr-defined]
        assert line.finish == "client_left"  # type: ignore[attr-defined]
        gate.open()
        server.wait_until_idle()


@pytest.mark.parametrize("is_patient", [True, False])
def test_a_client_that_pauses_gets_its_connection_back(
    make_oracle: MakeOracle, is_patient: bool
) -> None:
    settings: dict[str, Any] = {"stream_grace": 600.0 if is_patient else 0.3}
    body = {**LONG, "max_tokens": 2000, "seed": 8}
    with held_stream(make_oracle, body, step_us=50, **settings) as (server, sock, gate):
        gate.open()
        server.wait_until(lambda: not is_lent(server), "its buffers are full")
        if is_patient:
            lines = list(events(sock))
            assert lines[-1] == "data: [DONE]"
            whole = server.post(COMPLETIONS, **body)[1]["choices"][0]["text"]
            assert text_of(lines) == whole
            assert server.activity.ended == {}
        else:
            server.wait_until(lambda: not server.activity.runs, "the slow client is gone")
            assert server.activity.ended == {"slow_client": 1}
        assert num_lines(server) > 10


def test_a_quiet_stream_gets_its_comments_while_it_is_lent(make_oracle: MakeOracle) -> None:
    body = {**LONG, "seed": 6}
    with held_stream(make_oracle, body, stream_keep_alive=0.05) as (server, sock, gate):
        lines = events(sock)
        seen = [next(lines)]
        while seen.count(": keep-alive") < 3:
            seen.append(next(lines))
        server.wait_until(lambda: is_lent(server), "the connection is lent again")
        gate.open()
        seen += lines
        assert text_of(seen) == server.post(COMPLETIONS, **body)[1]["choices"][0]["text"]


def test_a_time_limit_ends_a_lent_stream_with_what_it_has(make_oracle: MakeOracle) -> None:
    gate = _core_testing.StepGate(30)
    body = {**LONG, "timeout": 2, "stream_options": {"include_usage": True}, "seed": 5}
    with running_server(make_oracle(300, gate=gate)) as server:
        sock = server.open_stream(COMPLETIONS, stream=True, **body)
        gate.wait_until_held()
        server.wait_until(lambda: is_lent(server), "the connection is lent")
        (run,) = server.activity.runs
        server.wait_until(lambda: run.cause == "timeout", "its time is over")
        gate.open()
        lines = list(events(sock))
        *chunks, usage = data_of(lines)
        (last,) = chunks[-1]["choices"]
        assert (last["finish_reason"], last["stop_reason"]) == ("length", "timeout")
        num_tokens = usage["usage"]["completion_tokens"]
        assert num_tokens >= 29
        alone = {**body, "stream_options": None, "timeout": 600, "max_tokens": num_tokens}
        assert text_of(lines) == server.post(COMPLETIONS, **alone)[1]["choices"][0]["text"]
        server.wait_until_idle()


def test_a_step_that_fails_ends_a_lent_stream_with_its_error(make_oracle: MakeOracle) -> None:
    with running_server(make_oracle(1000, fail_at_step=20)) as server:
        lines = list(events(server.open_stream(COMPLETIONS, stream=True, **LONG)))
        assert data_of(lines)[-1]["error"]["code"] == "generation_failed"
        assert lines[-1] == "data: [DONE]"
        assert len(text_of(lines[:-2])) > 0
        server.wait_until_idle()


def test_a_model_that_is_closed_ends_a_lent_stream(make_oracle: MakeOracle) -> None:
    gate = _core_testing.StepGate(2)
    with running_server(make_oracle(300, gate=gate)) as server:
        sock = server.open_stream(COMPLETIONS, stream=True, **LONG)
        server.wait_until(lambda: is_lent(server), "the connection is lent")
        gate.open()
        server.llm.close()
        with suppress(ConnectionResetError):
            while sock.recv(65536):
                pass
        sock.close()
        server.wait_until(lambda: not server.activity.runs, "it has ended")


def test_without_a_second_descriptor_the_loop_writes(
    make_oracle: MakeOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise ResourceExhausted("no descriptor")

    monkeypatch.setattr(_core, "LentConnection", refuse)
    with running_server(make_oracle(300)) as server:
        lines = list(events(server.open_stream(COMPLETIONS, stream=True, **LONG, seed=2)))
        assert text_of(lines) == server.post(COMPLETIONS, **LONG, seed=2)[1]["choices"][0]["text"]
        assert num_lines(server) == 0


def test_a_stream_over_tls_is_the_loop_s(make_oracle: MakeOracle, tmp_path: Path) -> None:
    files = tls_files(tmp_path)
    with running_server(make_oracle(300), **files) as server:
        context = ssl.create_default_context(cafile=files["ssl_certfile"])
        connection = http.client.HTTPSConnection(
            "127.0.0.1", server.port, timeout=DEADLINE_S, context=context
        )
        body = json.dumps({**LONG, "stream": True}).encode()
        connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
        lines = connection.getresponse().read().decode().split("\n")
        connection.close()
        assert lines[-3] == "data: [DONE]"
        assert data_of(lines)[-1]["choices"][0]["finish_reason"] == "length"
        assert num_lines(server) == 0
