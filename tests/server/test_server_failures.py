"""Steps that fail or hang, and requests that rule everything out."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from llmserve import AsyncLLM, _core_testing
from serving import (
    data_of,
    events,
    running_server,
)

MakeOracle = Callable[..., AsyncLLM]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
LONG: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 2000, "ignore_eos": True, "timeout": 600}


def test_a_step_that_fails_ends_its_requests_and_the_server_lives_on(
    make_oracle: MakeOracle, caplog: pytest.LogCaptureFixture
) -> None:
    with running_server(make_oracle(1000, fail_at_step=20)) as server:
        sock = server.open_stream(COMPLETIONS, stream=True, **LONG)
        lines = list(events(sock))
        error = data_of(lines)[-1]["error"]
        assert error["code"] == "generation_failed"
        # The engine's own words are for the log alone.
        server.wait_until(lambda: "the engine failed: " in caplog.text, "it is in the log")
        request_id = data_of(lines)[0]["id"]
        assert error["message"].endswith(f"the server's log has {request_id}")
        (record,) = [r for r in caplog.records if "the engine failed" in r.getMessage()]
        assert "the executor was told to have no memory left" in record.getMessage()
        assert record.__dict__["request_id"] == request_id
        assert lines[-1] == "data: [DONE]"
        assert server.request("GET", "/health")[0] == 200
        assert server.post(COMPLETIONS, prompt=[5], max_tokens=4)[0] == 200
        server.wait_until_idle()


def test_a_failed_step_reaches_only_the_streams_that_ran_in_it(make_oracle: MakeOracle) -> None:
    gate = _core_testing.StepGate(1)
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
    gate = _core_testing.StepGate(1)
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
