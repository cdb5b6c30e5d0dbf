"""How a server ends: signals, the drain, and what its requests are told."""

from __future__ import annotations

import json
import logging
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from checkpoints import checkpoint
from llmserve import LLM, AsyncLLM, SamplingParams, _core_testing, demo_model_path
from llmserve.cli import main
from serving import (
    DEADLINE_S,
    RunningServer,
    data_of,
    events,
    running_server,
    start_command,
)

MakeOracle = Callable[..., AsyncLLM]

COMPLETIONS = "/v1/completions"
LONG: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 2000, "ignore_eos": True, "timeout": 600}


@pytest.mark.parametrize("drain_s", ["0.3", "60"])
def test_sigterm_in_mid_stream_ends_it_in_order(drain_s: str) -> None:
    process, port = start_command("--drain-timeout", drain_s)
    try:
        server = RunningServer(None, None, port)  # type: ignore[arg-type]
        num_tokens = 2000 if drain_s == "0.3" else 300
        body = {**LONG, "max_tokens": num_tokens}
        with ThreadPoolExecutor(1) as pool:
            whole = pool.submit(server.post, COMPLETIONS, **body)
            server.wait_until(
                lambda: server.request("GET", "/load")[1]["server_load"] == 1, "it runs"
            )
            sock = server.open_stream(COMPLETIONS, stream=True, **body)
            lines = events(sock)
            first = next(lines)
            process.send_signal(signal.SIGTERM)
            rest = list(lines)
            assert rest[-1] == "data: [DONE]"
            status, answer = whole.result()
        reasons = [
            data_of([first, *rest])[-1]["choices"][0]["finish_reason"],
            answer["choices"][0]["finish_reason"],
        ]
        assert reasons == 2 * ["abort" if drain_s == "0.3" else "length"]
        assert status == 200
        assert answer["choices"][0]["text"]  # what it had
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()


def test_a_second_ctrl_c_ends_the_drain_and_every_request_in_order() -> None:
    process, port = start_command("--drain-timeout", "600", "--max-num-seqs", "1")
    try:
        server = RunningServer(None, None, port)  # type: ignore[arg-type]
        with ThreadPoolExecutor(1) as pool:
            # One sample after the other: seconds.
            sock = server.open_stream(COMPLETIONS, stream=True, n=8, **LONG)
            lines = events(sock)
            first = next(lines)
            waits = pool.submit(server.request, "POST", COMPLETIONS, LONG)
            server.wait_until(
                lambda: server.request("GET", "/load")[1]["server_load"] == 2, "one waits"
            )
            process.send_signal(signal.SIGINT)
            server.wait_until(lambda: server.request("GET", "/ready")[0] == 503, "it drains")
            process.send_signal(signal.SIGINT)
            rest = list(lines)
            status, answer, _ = waits.result()
        assert rest[-1] == "data: [DONE]"
        assert data_of([first, *rest])[-1]["choices"][0]["finish_reason"] == "abort"
        assert (status, answer["error"]["code"]) == (503, "shutting_down")
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()


def test_two_checkpoints_in_one_server_answer_side_by_side_and_leave_their_traces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {"tale": demo_model_path(), "tiny": checkpoint("llama")}
    models = [f"{name}={path}" for name, path in paths.items()]
    pool = ["--kv-cache-memory-bytes", str(2**22)]
    process, port = start_command(*models, "--trace", str(tmp_path / "trace.json"), *pool)
    prompts = [[3 + i, 5, 7] for i in range(6)]
    body = {"max_tokens": 12, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    ids: dict[str, str] = {}
    try:
        server = RunningServer(None, None, port)  # type: ignore[arg-type]
        listed = [model["id"] for model in server.request("GET", "/v1/models")[1]["data"]]
        assert listed == list(paths)

        def ask(asked: tuple[str, list[int]]) -> list[int]:
            name, prompt = asked
            answer = server.post(COMPLETIONS, model=name, prompt=prompt, **body)[1]
            assert answer["model"] == name
            ids[name] = answer["id"]
            return list(answer["choices"][0]["token_ids"])

        asked = [(name, prompt) for prompt in prompts for name in paths]
        with ThreadPoolExecutor(len(asked)) as executor:
            given = dict(zip(map(str, asked), executor.map(ask, asked), strict=True))
        for name in paths:
            assert f'generation_tokens_total{{model_name="{name}"}} 72.0' in str(
                server.request("GET", "/metrics")[1]
            )
        assert server.post(COMPLETIONS, model="other", prompt=[3])[0] == 404
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)
    for name, path in paths.items():
        with LLM(path, num_threads=1, kv_cache_memory_bytes=2**22) as llm:
            alone = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        for prompt, output in zip(prompts, alone, strict=True):
            assert given[str((name, prompt))] == output.outputs[0].token_ids
        trace = tmp_path / f"trace-{name}.json"
        assert json.loads(trace.read_text())["traceEvents"]
        assert main(["explain", str(trace), ids[name]]) == 0
        assert "finished" in capsys.readouterr().out


def test_a_request_that_the_end_finds_without_a_token_is_a_503(make_oracle: MakeOracle) -> None:
    gate = _core_testing.StepGate(1)
    with ThreadPoolExecutor(1) as pool:
        with running_server(make_oracle(gate=gate), drain_timeout=0.01) as server:
            answer = pool.submit(server.request, "POST", COMPLETIONS, {"prompt": [5]})
            sock = server.open_stream(COMPLETIONS, stream=True, prompt=[5])
            gate.wait_until_held()
            server.wait_until(lambda: len(server.activity.runs) == 2, "the requests are known")
            runs = list(server.activity.runs)
            server.stop()
            causes = ["shutdown"] * 2
            server.wait_until(lambda: [run.cause for run in runs] == causes, "the drain is over")
            gate.open()
            lines = list(events(sock))
        status, error, headers = answer.result()
    assert (status, error["error"]["code"]) == (503, "shutting_down")
    assert int(headers["retry-after"]) >= 1
    assert data_of(lines) == [error]  # in a stream that has begun, an event
    assert lines[-1] == "data: [DONE]"


def _errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR or r.exc_info]


def test_a_client_in_the_middle_of_its_body_does_not_hold_up_the_end(
    demo: AsyncLLM, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with running_server(demo) as server:
        sock = socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S)
        sock.sendall(head + b"Content-Length: 100\r\n\r\n{")
        # Another's whole request has been read after it.
        assert server.post(COMPLETIONS, prompt=[5], max_tokens=1)[0] == 200
        server.stop()
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"shutting_down" in answer
    assert _errors(caplog) == []


def test_a_body_that_begins_while_it_drains_is_not_waited_for(make_oracle: MakeOracle) -> None:
    with running_server(make_oracle(5000)) as server:
        server.activity.is_draining = True
        with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as sock:
            head = "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            sock.sendall(f"{head}Content-Length: 100\r\n\r\n".encode())
            assert sock.recv(65536).startswith(b"HTTP/1.1 503")


@pytest.mark.parametrize("num_more", [1, 2])
def test_another_ctrl_c_cuts_who_does_not_read(
    demo: AsyncLLM, caplog: pytest.LogCaptureFixture, num_more: int
) -> None:
    with running_server(demo, drain_timeout=600.0, stream_grace=600.0) as server:
        socks = [server.open_stream(COMPLETIONS, stream=True, n=8, **LONG) for _ in range(2)]
        server.wait_until(
            lambda: (
                all(run.is_sending for run in server.activity.runs)
                and len(server.activity.runs) == 2
            ),
            "neither is read",
        )
        server.stop()
        server.wait_until(lambda: server.activity.is_draining, "it drains")
        for _ in range(num_more):
            server.stop(is_forced=True)
        server.wait_until(lambda: not server.num_connections, "they are cut")
        for sock in socks:
            with suppress(ConnectionResetError):
                while sock.recv(2**20):
                    pass
            sock.close()
    assert server.activity.ended == {"shutdown": 2}
    assert _errors(caplog) == []


def test_while_it_drains_new_requests_get_a_503(make_oracle: MakeOracle) -> None:
    with running_server(make_oracle(5000), drain_timeout=5.0) as server:
        sock = server.open_stream(COMPLETIONS, stream=True, **{**LONG, "max_tokens": 100})
        lines = events(sock)
        next(lines)
        server.activity.is_draining = True
        assert server.request("GET", "/ready")[0] == 503
        assert server.request("GET", "/health")[0] == 200
        assert server.post(COMPLETIONS, prompt=[5])[0] == 503
        assert data_of(list(lines))[-1]["choices"][0]["finish_reason"] == "length"
