"""Streams in numbers, every way in which a client leaves or lags, time limits, and the end."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import random
import re
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import openai
import pytest
from checkpoints import checkpoint
from llmserve import LLM, AsyncLLM, SamplingParams, _core, demo_model_path
from llmserve.cli import main
from llmserve.outputs import Logprob
from llmserve.requests.state import RequestState
from llmserve.server.http.errors import ApiError, JsonResponse, LargeJsonResponse
from llmserve.server.main import listen
from llmserve.server.models import ServedModel
from llmserve.server.running import generation
from llmserve.server.running.admission import Admission
from llmserve.server.settings import ServerSettings
from llmserve.tokenization.tokenizer import Tokenizer
from offline import memory_bytes
from serving import DEADLINE_S, RunningServer, events, running_server, tls_files

MakeOracle = Callable[..., AsyncLLM]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
LONG: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 2000, "ignore_eos": True, "timeout": 600}


def data_of(lines: list[str]) -> list[Any]:
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def text_of(lines: list[str]) -> str:
    return "".join(c["text"] for d in data_of(lines) for c in d["choices"])


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
    with running_server(make_oracle(1000), max_waiting_requests=1000) as server:
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


def test_a_server_that_refuses_nobody_forgets_who_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(
        "llmserve.server.running.admission.time", SimpleNamespace(monotonic=lambda: now)
    )
    admission = Admission(ServerSettings())
    model = SimpleNamespace(llm=SimpleNamespace(max_num_seqs=4, num_kv_tokens=100))
    state = SimpleNamespace(params=SimpleNamespace(n=1))
    job: Any = SimpleNamespace(states=[state], num_tokens=8, model=model)
    for _ in range(100):
        now += 1.0
        with admission.entered(job):
            pass
    assert len(admission._left) == 31


def test_a_client_that_leaves_frees_its_blocks_within_a_step(
    make_oracle: MakeOracle, caplog: pytest.LogCaptureFixture
) -> None:
    gate = _core.testing.StepGate(3)
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
    gate = _core.testing.StepGate(1)
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
            data += sock.recv(2**20)
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
    gate = _core.testing.StepGate(2)
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
    gate = _core.testing.StepGate(idx + 2)  # the one after that of the line break
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


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_that_takes_too_long_returns_what_it_has(
    make_oracle: MakeOracle, is_streamed: bool
) -> None:
    with running_server(make_oracle(5000)) as server:
        body = {**LONG, "timeout": 0.8, "return_token_ids": True}
        if is_streamed:
            sock = server.open_stream(COMPLETIONS, stream=True, **body)
            choices = [d["choices"][0] for d in data_of(list(events(sock)))]
        else:
            choices = server.post(COMPLETIONS, **body)[1]["choices"]
        assert choices[-1]["finish_reason"] == "timeout"
        assert 0 < sum(len(choice["token_ids"]) for choice in choices) < 400
        server.wait_until_idle()
        assert server.activity.ended == {"timeout": 1}


def test_without_any_token_a_time_limit_is_a_503(make_oracle: MakeOracle) -> None:
    llm = make_oracle(20_000, max_num_seqs=1)
    with running_server(llm, queue_timeout=0.2) as server:
        sock = server.open_stream(COMPLETIONS, stream=True, **LONG)
        next(events(sock))
        status, answer, headers = server.request("POST", COMPLETIONS, {"prompt": [5]})
        assert (status, answer["error"]["code"]) == (503, "timeout")
        assert int(headers["retry-after"]) >= 1
        assert len(server.activity.runs) == 1  # the first runs on: it has its tokens
        sock.close()


def test_a_long_prompt_has_a_time_limit_until_its_first_token(make_oracle: MakeOracle) -> None:
    with running_server(make_oracle(500_000), first_token_timeout=0.2) as server:
        assert server.post(COMPLETIONS, prompt=[5])[0] == 503
        server.wait_until_idle()


@pytest.mark.parametrize("body", [{"prompt": [[5], [6]], "n": 2}, {"messages": HELLO}])
@pytest.mark.parametrize("limits", [{"first_token_timeout": 0.2}, {"request_timeout": 0.2}])
def test_a_stream_that_gets_no_token_in_time_is_told_what_a_503_says(
    make_oracle: MakeOracle, body: dict[str, Any], limits: dict[str, float]
) -> None:
    gate = _core.testing.StepGate(1)
    with running_server(make_oracle(gate=gate), **limits) as server:
        path = CHAT if "messages" in body else COMPLETIONS
        sock = server.open_stream(path, stream=True, **body)
        server.wait_until(lambda: any(run.cause for run in server.activity.runs), "it is over")
        gate.open()
        lines = list(events(sock))
        (document,) = data_of(lines)
        assert (document["error"]["type"], document["error"]["code"]) == ("server_error", "timeout")
        assert document["error"]["message"] == "no token came within 0.2 seconds"
        assert lines[-1] == "data: [DONE]"
        server.wait_until_idle()


def test_a_burst_of_ten_times_the_queue_is_answered_or_refused_at_once(
    make_oracle: MakeOracle,
) -> None:
    gate = _core.testing.StepGate(1)  # the first are at it while the last arrive
    llm = make_oracle(gate=gate, max_num_seqs=4)
    with running_server(llm, max_waiting_requests=6) as server:

        def one(idx: int) -> tuple[int, float, Any]:
            began = time.monotonic()
            status, answer, headers = server.request(
                "POST", COMPLETIONS, {"prompt": [5 + idx], "max_tokens": 50, "ignore_eos": True}
            )
            return status, time.monotonic() - began, headers.get("retry-after", answer)

        with ThreadPoolExecutor(100) as pool:
            futures = [pool.submit(one, idx) for idx in range(100)]
            server.wait_until(
                lambda: sum(f.done() for f in futures) + len(server.activity.runs) == 100,
                "all are admitted or refused",
            )
            gate.open()
            results = [future.result() for future in futures]
        served = [r for r in results if r[0] == 200]
        refused = [r for r in results if r[0] == 429]
        assert len(served) + len(refused) == 100
        assert len(served) >= 10
        assert len(refused) >= 50
        assert all(1 <= int(retry) <= 60 for _, _, retry in refused)
        assert all(r[2]["usage"]["completion_tokens"] == 50 for r in served)
        server.wait_until_idle()
        assert server.post(COMPLETIONS, prompt=[5], max_tokens=2)[0] == 200


def test_a_time_to_come_again_is_that_of_the_measured_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("llmserve.server.running.admission.time", clock)
    llm = SimpleNamespace(max_num_seqs=8, num_kv_tokens=10**6)
    admission = Admission(ServerSettings())

    def pass_through(num_tokens: int) -> None:
        params = SimpleNamespace(n=1)
        job = SimpleNamespace(
            states=[SimpleNamespace(params=params)],
            num_tokens=num_tokens,
            model=SimpleNamespace(llm=llm),
        )
        with admission.entered(job):  # type: ignore[arg-type]
            pass

    assert admission.estimate_s(1000) == 1  # nothing has run, nothing waits
    for _ in range(10):
        pass_through(500)
        now += 1
    assert admission.estimate_s(2500) == pytest.approx(5)  # 5,000 tokens in ten seconds
    assert admission.estimate_s(1) == 1
    assert admission.estimate_s(10**9) == 60
    now += 25
    assert admission.estimate_s(2500) == pytest.approx(30)  # 2,500 of the last thirty


def test_large_batches_get_in_beside_others_and_leave_them_room() -> None:
    llm = SimpleNamespace(max_num_seqs=256, num_kv_tokens=10**6)
    admission = Admission(ServerSettings(max_waiting_requests=256))

    def job(num_texts: int) -> Any:
        states = [SimpleNamespace(params=SimpleNamespace(n=1))] * num_texts
        model = SimpleNamespace(llm=llm)
        return SimpleNamespace(states=states, num_tokens=10 * num_texts, model=model)

    with ExitStack() as entered:
        for num_texts in (1, 2048, 1, 2048, 2048):
            entered.enter_context(admission.entered(job(num_texts)))
        for _ in range(125):
            entered.enter_context(admission.entered(job(1)))
        batch = entered.enter_context(ExitStack())
        batch.enter_context(admission.entered(job(2048)))  # the last place is as good as any
        assert admission.num_requests == 4 * 2048 + 127
        for num_texts in (1, 2048):
            with pytest.raises(ApiError, match="8319 sequences") as error:
                admission.entered(job(num_texts)).__enter__()
            assert error.value.status == 429
        batch.close()
        entered.enter_context(admission.entered(job(1)))
    assert admission.num_requests == admission.num_tokens == 0
    assert admission.num_refused == 2


def test_admission_counts_tokens_too(make_oracle: MakeOracle) -> None:
    llm = make_oracle(20_000, num_gpu_blocks_override=64, max_model_len=1024)
    with running_server(llm, max_waiting_tokens=1) as server:
        body = {"stream": True, "prompt": [5], "ignore_eos": True}
        socks = []
        for max_tokens in (900, 500):  # the second when there is room for a token at least
            socks.append(server.open_stream(COMPLETIONS, max_tokens=max_tokens, **body))
            next(events(socks[-1]))
        status, answer = server.post(COMPLETIONS, prompt=[5], max_tokens=1)
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        socks.pop(0).close()
        server.wait_until(lambda: len(server.activity.runs) == 1, "the first has left")
        assert server.post(COMPLETIONS, prompt=[5], max_tokens=500)[0] == 200
        for sock in socks:
            sock.close()


def test_a_priority_is_taken_where_the_policy_looks_at_it(make_oracle: MakeOracle) -> None:
    body = {"prompt": [5], "max_tokens": 2}
    for policy, wanted in (("priority", {-2: 200, 0: 200, 3: 200}), ("fcfs", {-2: 400, 0: 200})):
        with running_server(make_oracle(0, scheduling_policy=policy)) as server:
            got = {p: server.post(COMPLETIONS, priority=p, **body)[0] for p in wanted}
            assert got == wanted


def test_a_model_that_is_full_leaves_others_open(make_oracle: MakeOracle) -> None:
    full, idle = make_oracle(20_000, max_num_seqs=1), make_oracle(0, max_num_seqs=1)
    other = ServedModel(["idle"], idle)
    with running_server(full, others=[other], max_waiting_requests=1) as server:
        socks = [server.open_stream(COMPLETIONS, stream=True, **LONG) for _ in range(2)]
        server.wait_until(lambda: len(server.activity.runs) == 2, "both are admitted")
        assert server.post(COMPLETIONS, prompt=[5], max_tokens=2)[0] == 429
        assert server.post(COMPLETIONS, model="idle", prompt=[5], max_tokens=2)[0] == 200
        assert server.request("GET", "/load")[1]["num_sequences"] == 2
        for sock in socks:
            sock.close()


# Hardly repeats itself, since the tokenizers library remembers words.
_RNG = random.Random(3)
LONG_TEXT = " ".join("".join(_RNG.choices("abcdefgh", k=6)) for _ in range(14_000))
TRUNCATED = {"truncate_prompt_tokens": 8}  # or its length alone would tell that it cannot fit
LONG_WORDS = [LONG_TEXT[idx * 1500 : (idx + 1) * 1500] for idx in range(64)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": LONG_TEXT, **TRUNCATED}),
        (COMPLETIONS, {"prompt": LONG_TEXT, "add_special_tokens": False, **TRUNCATED}),
        (COMPLETIONS, {"prompt": ["x"] * 32, "max_tokens": 1, "bad_words": LONG_WORDS}),
        (CHAT, {"messages": [{"role": "user", "content": LONG_TEXT}], **TRUNCATED}),
        ("/v1/embeddings", {"input": [LONG_TEXT[idx:][:1000] for idx in range(20)]}),
        ("/tokenize", {"prompt": LONG_TEXT, "return_token_strs": True}),
    ],
    ids=["text", "bare text", "bad_words", "chat", "embeddings", "tokenize"],
)
def test_nobody_waits_while_a_long_text_is_tokenized(
    demo: AsyncLLM, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    threads: list[int] = []  # on which much was tokenized
    encode_batch = Tokenizer.encode_batch

    def watched(self: Tokenizer, texts: list[str], add_special_tokens: bool = True) -> Any:
        if sum(map(len, texts)) > 10_000:
            threads.append(threading.get_ident())
        return encode_batch(self, texts, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode_batch", watched)
    with running_server(demo) as server:
        (loop,) = (t for t in threading.enumerate() if t.name == f"server-{server.port}")
        assert server.post(path, **body)[0] in (200, 400)
        assert len(threads) == 1  # once for all prompts
        assert loop.ident not in threads


def test_an_answer_that_takes_long_to_word_is_no_timeout(
    demo: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    render = LargeJsonResponse.render

    def slow(self: LargeJsonResponse, content: object) -> bytes | memoryview:
        time.sleep(1.2)
        return render(self, content)

    monkeypatch.setattr(LargeJsonResponse, "render", slow)
    with running_server(demo) as server:
        body = {"prompt": "a " * 100, "max_tokens": 1, "prompt_logprobs": 1, "timeout": 1.0}
        assert server.post(COMPLETIONS, **body)[0] == 200
        server.wait_until_idle()
        assert not server.activity.ended


ASK_ROWS = {"max_tokens": 3, "temperature": 0, "return_token_ids": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": ["a b c " * 40, "d"], "prompt_logprobs": 5, **ASK_ROWS}),
        (COMPLETIONS, {"prompt": "a b c " * 40, "echo": True, "logprobs": 2, **ASK_ROWS}),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 3, "prompt_logprobs": 1}),
        ("/v1/embeddings", {"input": ["a", "b c"]}),
    ],
    ids=["prompt_logprobs", "echo", "chat", "embeddings"],
)
def test_a_large_answer_is_worded_on_a_thread_and_says_the_same(
    demo: AsyncLLM, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    threads: list[int] = []
    render = JsonResponse.render
    render_large = LargeJsonResponse.render

    def watched(self: LargeJsonResponse, content: object) -> bytes | memoryview:
        threads.append(threading.get_ident())
        large = render_large(self, content)
        assert bytes(large) == render(self, content)
        return large

    monkeypatch.setattr(LargeJsonResponse, "render", watched)
    monkeypatch.setattr(generation, "MAX_ROWS_IN_LOOP", 1)
    with running_server(demo) as server:
        (loop,) = (t for t in threading.enumerate() if t.name == f"server-{server.port}")
        assert server.post(path, **body)[0] == 200
        assert len(threads) == 1
        assert loop.ident not in threads


LONG_PROMPT = {"prompt": [[5 + i % 90 for i in range(300)], [6] * 200], "n": 2, **ASK_ROWS}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt_logprobs": 2, **LONG_PROMPT}),
        (COMPLETIONS, {"prompt_logprobs": 2, "stream": True, **LONG_PROMPT}),
        (COMPLETIONS, {"echo": True, "logprobs": 2, **LONG_PROMPT}),
        (COMPLETIONS, {**LONG_PROMPT, "prompt": [5], "logprobs": 2, "max_tokens": 100}),
        (CHAT, {"messages": HELLO * 40, "prompt_logprobs": 2, **ASK_ROWS}),
        (CHAT, {"messages": HELLO * 40, "prompt_logprobs": 2, "stream": True, **ASK_ROWS}),
    ],
    ids=["prompts", "stream", "echo", "tokens", "chat", "chat stream"],
)
def test_no_row_of_many_log_probabilities_is_made_on_the_loop(
    demo: AsyncLLM, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    threads: list[int] = []  # a call each
    to_logprob = RequestState.to_logprob

    def watched(self: RequestState, token: _core.TokenLogprob) -> Logprob:
        threads.append(threading.get_ident())
        return to_logprob(self, token)

    monkeypatch.setattr(RequestState, "to_logprob", watched)
    with running_server(demo) as server:
        (loop,) = (t for t in threading.enumerate() if t.name == f"server-{server.port}")
        assert server.post(path, **body)[0] == 200
        assert len(threads) > 2 * 100
        assert threads.count(loop.ident or 0) == 0


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_says_of_a_long_prompt_what_the_whole_answer_and_the_library_say(
    server: RunningServer, offline: LLM, path: str
) -> None:
    body = {"prompt_logprobs": 2, **LONG_PROMPT}
    prompts: Any = LONG_PROMPT["prompt"]
    if path == CHAT:
        body = {"messages": HELLO * 40, **body}
        del body["prompt"]
        prompts = offline.get_tokenizer().apply_chat_template(
            body["messages"], add_generation_prompt=True
        )
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    outputs = offline.generate(prompts, params, use_tqdm=False)
    wanted = [json.loads(msgspec.json.encode(output.prompt_logprobs)) for output in outputs]

    def said(documents: list[Any]) -> list[tuple[int, Any]]:
        """By prompt: a chat says it once, and completions with each choice of a prompt."""
        places = documents if path == CHAT else [c for d in documents for c in d["choices"]]
        found = [place for place in places if "prompt_logprobs" in place]
        return [(place.get("index", 0) // 2, place["prompt_logprobs"]) for place in found]

    whole = said([server.post(path, **body)[1]])
    with server.open_stream(path, stream=True, **body) as sock:
        streamed = said(data_of(list(events(sock))))
    assert whole == [(idx, wanted[idx]) for idx, _ in whole]
    assert {idx for idx, _ in whole} == set(range(len(wanted)))
    assert sorted(streamed, key=lambda pair: pair[0]) == whole


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Texts as long as LONG_TEXT are tokenized only once it is set."""
    is_open = threading.Event()
    encode_batch = Tokenizer.encode_batch

    def encode(self: Tokenizer, texts: list[str], add_special_tokens: bool = True) -> Any:
        if sum(map(len, texts)) >= len(LONG_TEXT):
            assert is_open.wait(DEADLINE_S)
        return encode_batch(self, texts, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode_batch", encode)
    yield is_open
    is_open.set()


def test_nobody_waits_behind_long_texts(demo: AsyncLLM, held: threading.Event) -> None:
    num_texts = (os.cpu_count() or 1) + 5  # more than asyncio has threads
    short = {"max_tokens": 2, "timeout": 50}
    with running_server(demo, admin_key="sesame") as server:
        socks = [server.open_stream("/tokenize", prompt=LONG_TEXT) for _ in range(num_texts)]
        for path in ("/health", "/metrics", "/debug/requests/none"):
            headers = {"Authorization": "Bearer sesame"}
            assert server.request("GET", path, headers=headers)[0] in (200, 404)
        for messages in (HELLO, [{"role": "user", "content": LONG_TEXT[:5000]}]):
            json_object = {"type": "json_object"}
            for more in ({}, {"response_format": json_object}):
                assert server.post(CHAT, messages=messages, **short, **more)[0] in (200, 400)
        assert server.post(COMPLETIONS, prompt="x", bad_words=LONG_WORDS[:4], **short)[0] == 200
        assert not held.is_set()
        held.set()
        for sock in socks:
            assert sock.recv(15) == b"HTTP/1.1 200 OK"
            sock.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": LONG_TEXT}),
        (COMPLETIONS, {"prompt": LONG_TEXT, "stream": True}),
        (COMPLETIONS, {"prompt": LONG_TEXT, "add_special_tokens": False}),
        (CHAT, {"messages": [{"role": "user", "content": LONG_TEXT}]}),
        ("/v1/embeddings", {"input": LONG_TEXT}),
    ],
    ids=["text", "stream", "bare text", "chat", "embeddings"],
)
def test_a_text_that_takes_longer_than_its_request_may_is_a_503(
    demo: AsyncLLM, held: threading.Event, path: str, body: dict[str, Any]
) -> None:
    with running_server(demo) as server:
        status, answer, headers = server.request(
            "POST", path, {**body, **TRUNCATED, "timeout": 0.3}
        )
        assert (status, answer["error"]["code"]) == (503, "timeout")
        assert int(headers["retry-after"]) >= 1
        assert server.activity.ended == {"timeout": 1}


@pytest.mark.parametrize("setting", ["request_timeout", "queue_timeout", "first_token_timeout"])
def test_every_time_limit_begins_when_the_request_comes(
    make_oracle: MakeOracle, held: threading.Event, setting: str
) -> None:
    limits = {"request_timeout": 0.0, setting: 0.3}
    with running_server(make_oracle(0), **limits) as server:
        assert server.post(COMPLETIONS, prompt=LONG_TEXT, **TRUNCATED)[0] == 503
        assert server.activity.ended == {"timeout": 1}


def test_the_time_of_a_text_counts_to_the_requests(
    make_oracle: MakeOracle, held: threading.Event
) -> None:
    gate = _core.testing.StepGate(1)
    body = {"prompt": LONG_TEXT, "truncate_prompt_tokens": 8, "max_tokens": 1, "timeout": 600}
    with running_server(make_oracle(gate=gate)) as server:
        sock = server.open_stream(COMPLETIONS, **body)
        time.sleep(0.5)
        came_before = time.monotonic()
        held.set()
        server.wait_until(lambda: server.activity.runs, "it is known")
        (run,) = server.activity.runs
        assert run.arrived < came_before
        sock.close()
        gate.open()


def test_a_step_that_fails_ends_its_requests_and_the_server_lives_on(
    make_oracle: MakeOracle,
) -> None:
    with running_server(make_oracle(1000, fail_at_step=20)) as server:
        sock = server.open_stream(COMPLETIONS, stream=True, **LONG)
        lines = list(events(sock))
        error = data_of(lines)[-1]["error"]
        assert error["code"] == "generation_failed"
        assert lines[-1] == "data: [DONE]"
        assert server.request("GET", "/health")[0] == 200
        assert server.post(COMPLETIONS, prompt=[5], max_tokens=4)[0] == 200
        server.wait_until_idle()


def test_a_failed_step_reaches_only_the_streams_that_ran_in_it(make_oracle: MakeOracle) -> None:
    gate = _core.testing.StepGate(1)
    llm = make_oracle(gate=gate, fail_at_step=12, max_num_seqs=2, enable_prefix_caching=False)
    with running_server(llm) as server:
        body = {"stream": True, "prompt": [5, 6], "max_tokens": 30, "ignore_eos": True}
        socks = [server.open_stream(COMPLETIONS, seed=seed, **body) for seed in range(6)]
        server.wait_until(lambda: len(server.activity.runs) == 6, "all have come")
        gate.open()
        streams = [data_of(list(events(sock))) for sock in socks]
        failed = [i for i, stream in enumerate(streams) if "error" in stream[-1]]
        assert len(failed) == 2
        for seed in set(range(6)) - set(failed):
            _, alone = server.post(COMPLETIONS, **{**body, "stream": False}, seed=seed)
            text = "".join(chunk["choices"][0]["text"] for chunk in streams[seed])
            assert text == alone["choices"][0]["text"]
        server.wait_until_idle()


def test_a_spike_of_errors_sheds_load_for_a_while(
    make_oracle: MakeOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmserve.server.running.watchdog._SHED_S", 1.0)
    llm = make_oracle(0, fail_at_step=0, num_failures=11)  # steps count from 1
    with running_server(llm) as server:
        answers = [server.post(COMPLETIONS, prompt=[5], max_tokens=2) for _ in range(10)]
        assert {answer["error"]["code"] for _, answer in answers} == {"generation_failed"}
        status, answer, headers = server.request("POST", COMPLETIONS, {"prompt": [5]})
        assert (status, answer["error"]["code"]) == (503, "failing")
        assert int(headers["retry-after"]) >= 1
        assert server.request("GET", "/health")[0] == 200  # the engine lives
        body = {"prompt": [5], "max_tokens": 2}
        server.wait_until(lambda: server.post(COMPLETIONS, **body)[0] == 200, "it takes new ones")
        assert "error_spike" in server.request("GET", "/metrics")[1]


# Compiles, and has more items after the x than llguidance follows.
_CROWDED = 'start: "x" y\ny: ' + " | ".join(f"r{i}" for i in range(300)) + "\n"
_CROWDED += "".join(
    f'r{i}: r{i} "a" | r{i} "b" | r{i} "c" | "a" r{i} | "b" r{i} | "c" r{i} | "{i}"\n'
    for i in range(300)
)
YES = {"structured_outputs": {"choice": ["yes"]}}
FORMAT = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        (
            COMPLETIONS,
            {**YES, "allowed_token_ids": [5]},
            "structured_outputs and allowed_token_ids",
        ),
        (COMPLETIONS, {**YES, "bad_words": ["y", "ye", "yes"]}, "structured_outputs and bad_words"),
        (COMPLETIONS, {"structured_outputs": {"grammar": _CROWDED}}, "structured_outputs"),
        (COMPLETIONS, {"repetition_penalty": 1e-45}, "repetition_penalty"),
        (CHAT, {**FORMAT, "allowed_token_ids": [5]}, "response_format and allowed_token_ids"),
    ],
)
def test_what_a_request_rules_out_itself_is_a_400_and_sheds_no_load(
    demo: AsyncLLM, path: str, fields: dict[str, Any], names: str
) -> None:
    given = {"prompt": "The fox"} if path == COMPLETIONS else {"messages": HELLO}
    with running_server(demo) as server:
        for _ in range(12):
            status, answer = server.post(path, max_tokens=8, **given, **fields)
            error = answer["error"]
            assert (status, error["code"]) == (400, "invalid_value"), answer
            assert error["message"].startswith(f"{names}: ")
            assert error["param"] == names.split()[0]
        sock = server.open_stream(path, stream=True, max_tokens=8, **given, **fields)
        assert data_of(list(events(sock)))[-1] == answer
        assert server.post(COMPLETIONS, prompt="The fox", max_tokens=2)[0] == 200
        server.wait_until_idle()
        metrics = str(server.request("GET", "/metrics")[1])
        assert not re.search(r'request_success_total{finished_reason="error".*} [1-9]', metrics)
        assert re.search(r'request_success_total{finished_reason="invalid".*} [1-9]', metrics)


def test_a_hung_step_shows_in_health_and_new_requests_do_not_wait_for_it(
    make_oracle: MakeOracle,
) -> None:
    gate = _core.testing.StepGate(1)
    with running_server(make_oracle(gate=gate), watchdog_timeout=0.3) as server:
        sock = server.open_stream(COMPLETIONS, stream=True, prompt=[5], max_tokens=1)

        def status() -> int:
            return int(server.request("GET", "/health")[0])

        gate.wait_until_held()
        server.wait_until(lambda: status() == 503, "the step is seen to hang")
        got, answer, headers = server.request("POST", COMPLETIONS, {"prompt": [6]})
        assert (got, answer["error"]["code"]) == (503, "engine_hung")
        assert int(headers["retry-after"]) >= 1
        assert 'requests_refused_total{reason="engine_hung"} 1' in str(
            server.request("GET", "/metrics")[1]
        )
        gate.open()
        assert data_of(list(events(sock)))[-1]["choices"][0]["finish_reason"] == "length"
        server.wait_until(lambda: status() == 200, "it goes on")
        assert server.post(COMPLETIONS, prompt=[6], max_tokens=1)[0] == 200


def test_lines_leave_at_once_and_few_of_them_wait_in_the_kernel() -> None:
    with listen(ServerSettings(port=0)) as sock, socket.create_connection(sock.getsockname()):
        ours, _ = sock.accept()
        with ours:
            assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
            assert 2**16 <= ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2**17


def test_a_client_that_sends_a_letter_at_a_time_is_let_go(demo: AsyncLLM) -> None:
    with running_server(demo, read_timeout=0.5) as server:
        for sent in (b"", b"GET /hea", b"POST /tokenize HTTP/1.1\r\nHost: x\r\n"):
            with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as sock:
                sock.sendall(sent)
                assert sock.recv(100).startswith(b"HTTP/1.1 408 ")
        with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as sock:
            head = "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            sock.sendall(f'{head}Content-Length: 100\r\n\r\n{{"prompt'.encode())
            assert sock.recv(100).startswith(b"HTTP/1.1 408 ")
        # A connection that is kept between two requests is not in a hurry.
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
        for _ in range(2):
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b'{"status":"ok"}'
            time.sleep(0.7)
        connection.close()


def test_more_connections_than_allowed_are_closed_at_once(demo: AsyncLLM) -> None:
    with running_server(demo, max_connections=5) as server:
        address = ("127.0.0.1", server.port)
        held = [socket.create_connection(address, timeout=DEADLINE_S) for _ in range(5)]
        server.wait_until(lambda: server.num_connections == 5, "five are open")
        sixth = socket.create_connection(address, timeout=DEADLINE_S)
        with sixth, suppress(ConnectionResetError):
            assert sixth.recv(10) == b""
        for sock in held:
            sock.close()
        server.wait_until(lambda: server.num_connections == 0, "they are gone")
        assert server.request("GET", "/health")[0] == 200


def test_tls_serves_https_and_nothing_else(demo: AsyncLLM, tmp_path: Path) -> None:
    files = tls_files(tmp_path)
    with running_server(demo, **files) as server:
        context = ssl.create_default_context(cafile=files["ssl_certfile"])
        url = f"https://127.0.0.1:{server.port}/health"
        with urllib.request.urlopen(url, context=context, timeout=DEADLINE_S) as answer:
            assert answer.read() == b'{"status":"ok"}'
        with pytest.raises((OSError, http.client.HTTPException)):
            server.request("GET", "/health")


@pytest.mark.parametrize("bad", ["missing", "no key", "another's key", "a password"])
def test_bad_tls_files_are_refused_before_a_model_is_loaded(
    bad: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = tls_files(tmp_path)
    key = Path(files["ssl_keyfile"])
    if bad == "missing":
        key.unlink()
    elif bad == "no key":
        key.write_text("nonsense")
    elif bad == "another's key":
        (tmp_path / "other").mkdir()
        key.write_bytes(Path(tls_files(tmp_path / "other")["ssl_keyfile"]).read_bytes())
    else:
        command = f"openssl rsa -aes128 -passout pass:sesame -in {key} -out {key}"
        subprocess.run(command.split(), check=True, capture_output=True)
    flags = [f"--{name.replace('_', '-')}={path}" for name, path in files.items()]
    assert main(["serve", "/nowhere", "--port", "0", *flags]) == 2
    assert "ssl_keyfile" in capsys.readouterr().err


def test_a_trace_that_cannot_be_written_is_refused_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, reason in ((tmp_path / "no" / "t.json", "No such file"), (tmp_path, "directory")):
        assert main(["serve", "/nowhere", "--port", "0", "--trace", str(path)]) == 2
        error = capsys.readouterr().err
        assert f"trace '{path}' cannot be written" in error
        assert reason in error


def _start(*arguments: str) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "llmserve",
            "serve",
            "--port",
            "0",
            "--num-threads",
            "1",
            *arguments,
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"serving .* on http://127\.0\.0\.1:(\d+)", line):
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process, int(found[1])
    raise AssertionError("the server did not start")


@pytest.mark.parametrize("drain_s", ["0.3", "60"])
def test_sigterm_in_mid_stream_ends_it_in_order(drain_s: str) -> None:
    process, port = _start("--drain-timeout", drain_s)
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
    process, port = _start("--drain-timeout", "600", "--max-num-seqs", "1")
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
    process, port = _start(*models, "--trace", str(tmp_path / "trace.json"), *pool)
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
    gate = _core.testing.StepGate(1)
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


def test_only_the_loopback_is_listened_on_by_default() -> None:
    psutil = pytest.importorskip("psutil")
    process, port = _start()
    try:
        listening = [
            c.laddr for c in psutil.Process(process.pid).net_connections() if c.status == "LISTEN"
        ]
        assert listening == [("127.0.0.1", port)]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
