"""Streams in numbers and in groups, and every way in which a client leaves or lags."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from llmserve import LLM, AsyncLLM, SamplingParams, _core_testing
from offline import memory_bytes
from serving import (
    RunningServer,
    data_of,
    events,
    running_server,
    text_of,
)

MakeOracle = Callable[..., AsyncLLM]

COMPLETIONS = "/v1/completions"
LONG: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 2000, "ignore_eos": True, "timeout": 600}


def test_two_hundred_streams_at_once_give_what_the_batch_gives(
    demo: AsyncLLM, offline: LLM
) -> None:
    prompts = [[5 + i % 90, 6 + i // 90, 7] for i in range(200)]
    params = SamplingParams(max_tokens=8, seed=5, ignore_eos=True)
    wanted = [o.outputs[0].text for o in offline.generate(prompts, params, use_tqdm=False)]

    async def one(client: openai.AsyncOpenAI, prompt: list[int]) -> str:
        stream = await client.completions.create(
            model="demo", prompt=prompt, max_tokens=8, seed=5, stream=True, temperature=1.0,
            top_p=1.0, extra_body={"ignore_eos": True, "top_k": 0},
        )  # fmt: skip
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def main(port: int) -> list[str]:
        url = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(api_key="x", base_url=url, timeout=300) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    with running_server(demo, request_timeout=0.0) as server:
        assert asyncio.run(main(server.port)) == wanted
        server.wait_until_idle()


def _leave_at_random_moments(server: RunningServer, num_clients: int) -> None:
    rng = random.Random(1)

    def leave() -> None:
        sock = server.open_stream(COMPLETIONS, stream=rng.random() < 0.7, **LONG)
        time.sleep(rng.random() * 0.1)
        if rng.random() < 0.5:  # with a reset, as a crash has it
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()

    with ThreadPoolExecutor(32) as pool:
        for future in [pool.submit(leave) for _ in range(num_clients)]:
            future.result()
    server.wait_until_idle()


def test_two_hundred_clients_leave_at_random_moments_and_everything_is_free(
    make_oracle: MakeOracle,
) -> None:
    # Steps of 5 ms: what runs takes 10 s, longer than a loaded machine looks away. What has ended
    # when its client is found to have left was not aborted.
    with running_server(make_oracle(5000), max_waiting_requests=1000) as server:
        num_fds = len(os.listdir("/proc/self/fd"))
        _leave_at_random_moments(server, 200)
        server.wait_until(lambda: server.num_connections == 0, "all connections are gone")
        server.wait_until(
            lambda: len(os.listdir("/proc/self/fd")) <= num_fds, "their descriptors are gone"
        )
        # Some were gone before their request was read.
        num_ended = server.activity.ended["client_left"]
        assert 100 <= num_ended <= 200
        assert server.llm.get_metrics().num_requests_aborted == num_ended
        assert server.post(COMPLETIONS, prompt=[5], max_tokens=2)[0] == 200


@pytest.mark.long
def test_ten_thousand_clients_leave_no_memory_and_no_descriptor_behind(
    make_oracle: MakeOracle,
) -> None:
    with running_server(make_oracle(1000), max_waiting_requests=1000) as server:
        _leave_at_random_moments(server, 1000)  # pools and caches have grown
        num_fds, (_, resident) = len(os.listdir("/proc/self/fd")), memory_bytes()
        for _ in range(10):
            _leave_at_random_moments(server, 1000)
        server.wait_until(lambda: server.num_connections == 0, "all connections are gone")
        assert len(os.listdir("/proc/self/fd")) <= num_fds
        assert memory_bytes()[1] - resident < 20 * 2**20


def test_a_client_that_leaves_frees_its_blocks_within_a_step(
    make_oracle: MakeOracle, caplog: pytest.LogCaptureFixture
) -> None:
    gate = _core_testing.StepGate(3)
    with running_server(make_oracle(gate=gate)) as server:
        sock = server.open_stream(COMPLETIONS, stream=True, **LONG)
        lines = events(sock)
        next(lines)
        gate.wait_until_held()
        with caplog.at_level(logging.INFO, "llmserve.server.access"):
            sock.close()
            server.wait_until(lambda: server.activity.ended["client_left"] == 1, "it has left")
            gate.open()
            server.wait_until_idle()
        trace = server.llm.trace()
        (record,) = trace.requests
        assert record.finish_reason == "abort"
        assert max(step.step_id for step in trace) <= 4  # the held one and its commit
        (line,) = [r for r in caplog.records if r.name == "llmserve.server.access"]
        assert line.finish == "client_left"  # type: ignore[attr-defined]
        assert server.activity.ended == {"client_left": 1}


def test_a_client_that_leaves_before_its_answer_is_counted_as_a_499(
    make_oracle: MakeOracle, caplog: pytest.LogCaptureFixture
) -> None:
    gate = _core_testing.StepGate(1)
    caplog.set_level(logging.INFO, "llmserve.server.access")
    with running_server(make_oracle(gate=gate)) as server:
        sock = server.open_stream(COMPLETIONS, **LONG)
        gate.wait_until_held()
        sock.close()
        server.wait_until(lambda: server.activity.ended["client_left"] == 1, "it has left")
        gate.open()
        counted = str(server.request("GET", "/metrics")[1])
    assert 'http_responses_total{status="499"} 1.0' in counted
    (line,) = [r for r in caplog.records if getattr(r, "finish", "") == "client_left"]
    assert line.status == 499  # type: ignore[attr-defined]


def test_a_client_that_does_not_read_is_cut_and_holds_nobody_up(make_oracle: MakeOracle) -> None:
    llm = make_oracle(200, max_model_len=2048)
    settings: dict[str, Any] = {"stream_buffer_tokens": 50, "stream_grace": 0.5}
    with running_server(llm, **settings) as server:
        # Large lines, so that the buffers of both kernels are soon full.
        lazy = server.open_stream(
            COMPLETIONS, stream=True, logprobs=20, n=8, **{**LONG, "max_tokens": 2000}
        )
        lazy_events = events(lazy)
        next(lazy_events)
        for _ in range(5):
            status, answer = server.post(COMPLETIONS, prompt=[9], max_tokens=5, seed=1)
            assert (status, answer["usage"]["completion_tokens"]) == (200, 5)
        server.wait_until(lambda: not server.activity.runs, "the slow client is gone")
        assert server.activity.ended == {"slow_client": 1}
        server.wait_until_idle()
        lazy.close()


def test_a_client_that_does_not_read_the_end_is_cut_too(make_oracle: MakeOracle) -> None:
    llm = make_oracle(200, max_model_len=1024)
    settings: dict[str, Any] = {"stream_buffer_tokens": 10**6, "stream_grace": 0.3}
    with running_server(llm, **settings) as server:
        lazy = server.open_stream(
            COMPLETIONS, stream=True, logprobs=20, n=8, **{**LONG, "max_tokens": 900}
        )
        next(events(lazy))
        server.wait_until(lambda: not server.activity.runs, "the slow client is gone")
        assert server.activity.ended == {"slow_client": 1}
        server.wait_until_idle()
        lazy.close()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("num_requests", [1, 2])
def test_a_client_that_does_not_read_a_whole_answer_is_cut(
    demo: AsyncLLM, loop: str, num_requests: int
) -> None:
    with running_server(demo, loop=loop, stream_grace=0.3) as server:
        lazy = server.open_stream("/tokenize", prompt="word " * 150_000, return_token_strs=True)
        if num_requests == 2:  # the next one, whose answer waits for the first to be read
            lazy.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        lazy.recv(1)
        server.wait_until(lambda: server.num_connections == 0, "the connection is cut")
        lazy.close()


def test_a_client_that_reads_a_whole_answer_slowly_gets_all_of_it(demo: AsyncLLM) -> None:
    with running_server(demo, stream_grace=1.0) as server:
        text = "word " * 150_000
        whole = server.post("/tokenize", prompt=text, return_token_strs=True)[1]
        sock = server.open_stream("/tokenize", prompt=text, return_token_strs=True)
        data = b""
        for _ in range(30):  # three times the grace
            data += sock.recv(2**14)
            time.sleep(0.1)
        head, _, data = data.partition(b"\r\n\r\n")
        (length,) = re.findall(rb"content-length: (\d+)", head)
        while len(data) < int(length):
            piece = sock.recv(2**20)
            assert piece, "the server has cut a client that reads"
            data += piece
        assert json.loads(data) == whole
        sock.close()


def test_a_slow_client_within_its_bounds_gets_every_token(make_oracle: MakeOracle) -> None:
    with running_server(make_oracle(200)) as server:
        body = {"prompt": [5], "max_tokens": 600, "ignore_eos": True, "seed": 2}
        whole = server.post(COMPLETIONS, **body)[1]["choices"][0]["text"]
        sock = server.open_stream(COMPLETIONS, stream=True, **body)
        got = []
        for number, line in enumerate(events(sock)):
            got.append(line)
            if number < 20:
                time.sleep(0.02)
        assert text_of(got) == whole


def test_the_first_token_is_sent_at_once_and_others_in_groups(make_oracle: MakeOracle) -> None:
    gate = _core_testing.StepGate(2)
    with running_server(make_oracle(gate=gate), stream_flush_tokens=5) as server:
        sock = server.open_stream(
            COMPLETIONS, stream=True, return_token_ids=True, **{**LONG, "max_tokens": 18}
        )
        lines = events(sock)
        first = next(lines)
        gate.open()
        sizes = [len(d["choices"][0]["token_ids"]) for d in data_of([first, *lines])]
        assert sizes[0] == 1
        assert sum(sizes) == 18
        assert min(sizes[1:-1]) >= 5


def test_a_group_waits_no_longer_than_its_interval(make_oracle: MakeOracle) -> None:
    settings = {"stream_flush_tokens": 1000, "stream_flush_interval": 0.05}
    with running_server(make_oracle(5000), **settings) as server:
        sock = server.open_stream(COMPLETIONS, stream=True, **{**LONG, "max_tokens": 60})
        assert len(data_of(list(events(sock)))) > 3


def test_a_line_break_ends_a_group(make_oracle: MakeOracle) -> None:
    body = {"prompt": [5], "max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
    llm = make_oracle(0)

    def break_at(server: RunningServer, seed: int) -> int | None:
        (choice,) = server.post(COMPLETIONS, seed=seed, **body)[1]["choices"]
        texts = map(llm.get_tokenizer().token_text, choice["token_ids"])
        return next((idx for idx, text in enumerate(texts) if "\n" in text), None)

    with running_server(llm) as server:
        found = ((seed, break_at(server, seed)) for seed in range(1000))
        seed, idx = next((seed, idx) for seed, idx in found if idx is not None and idx >= 5)
    gate = _core_testing.StepGate(idx + 2)  # the one after that of the line break
    settings: dict[str, Any] = {"stream_flush_tokens": 1000, "stream_flush_newline": True}
    with running_server(make_oracle(gate=gate), **settings) as server:
        lines = events(server.open_stream(COMPLETIONS, stream=True, seed=seed, **body))
        num_tokens = 0
        while num_tokens < idx + 1:
            for chunk in data_of([next(lines)]):
                num_tokens += len(chunk["choices"][0]["token_ids"])
        assert num_tokens == idx + 1
        gate.open()
        rest = data_of(list(lines))
        assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in rest) == 60 - num_tokens


@pytest.mark.parametrize("max_tokens", [50, None])
def test_no_output_is_longer_than_the_servers_cap(
    make_oracle: MakeOracle, max_tokens: int | None
) -> None:
    with running_server(make_oracle(0), max_output_tokens=7) as server:
        message = {"role": "user", "content": "Hi"}
        body = {"messages": [message], "max_tokens": max_tokens, "ignore_eos": True}
        answer = server.post("/v1/chat/completions", **body)[1]
        assert answer["usage"]["completion_tokens"] == 7
        assert answer["choices"][0]["finish_reason"] == "length"


def test_an_output_is_as_long_as_the_model_says_where_the_request_does_not(
    make_oracle: MakeOracle, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 5}')
    message = {"role": "user", "content": "Hi"}
    for config, num_of_chat, num_of_completion in ((str(tmp_path), 5, 5), ("vllm", 24, 16)):
        llm = make_oracle(0, generation_config=config)
        with running_server(llm, max_output_tokens=24) as server:
            chat = server.post("/v1/chat/completions", messages=[message], ignore_eos=True)[1]
            assert chat["usage"]["completion_tokens"] == num_of_chat
            completion = server.post(COMPLETIONS, prompt=[5], ignore_eos=True)[1]
            assert completion["usage"]["completion_tokens"] == num_of_completion


def test_comments_keep_a_quiet_stream_alive(make_oracle: MakeOracle) -> None:
    with running_server(make_oracle(400_000), stream_keep_alive=0.1) as server:
        sock = server.open_stream(COMPLETIONS, stream=True, prompt=[5], max_tokens=2)
        lines = list(events(sock))
        assert lines[0] == ": keep-alive"
        assert lines[-1] == "data: [DONE]"
        assert data_of(lines)[-1]["choices"][0]["finish_reason"] == "length"
