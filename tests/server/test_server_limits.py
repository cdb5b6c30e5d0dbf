"""What a request may take: its time, and a place beside those that wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from llmserve import AsyncLLM, _core_testing
from llmserve.server.http.errors import ApiError
from llmserve.server.models import ServedModel
from llmserve.server.running.admission import Admission
from llmserve.server.settings import ServerSettings
from serving import (
    data_of,
    events,
    running_server,
)

MakeOracle = Callable[..., AsyncLLM]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
LONG: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 2000, "ignore_eos": True, "timeout": 600}


def test_a_server_that_refuses_nobody_forgets_who_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(
        "llmserve.server.running.admission.time", SimpleNamespace(monotonic=lambda: now)
    )
    model: Any = SimpleNamespace(llm=SimpleNamespace(max_num_seqs=4, num_kv_tokens=100))
    admission = Admission(ServerSettings(), model)
    state = SimpleNamespace(params=SimpleNamespace(n=1))
    job: Any = SimpleNamespace(states=[state], num_tokens=8, model=model)
    for _ in range(100):
        now += 1.0
        with admission.entered(job):
            pass
    assert len(admission._left) == 31


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
        assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("length", "timeout")
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
    gate = _core_testing.StepGate(1)
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
    gate = _core_testing.StepGate(1)  # the first are at it while the last arrive
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
    model: Any = SimpleNamespace(llm=llm)
    admission = Admission(ServerSettings(), model)

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
    model: Any = SimpleNamespace(llm=llm)
    admission = Admission(ServerSettings(max_waiting_requests=256), model)

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
        socks.append(server.open_stream(COMPLETIONS, max_tokens=500, **body))
        assert next(events(socks[-1])).startswith("data: {")
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
