"""What is off by default: the pace of a tier, and runs that identical requests share."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from llmserve import AsyncLLM
from llmserve.errors import InvalidArgument
from llmserve.server.running.pacing import Pacer
from llmserve.server.settings import ServerSettings
from llmserve.server.tiers import read_tiers
from serving import RunningServer, events, running_server, text_of

MakeOracle = Callable[..., AsyncLLM]

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 30, "ignore_eos": True, "seed": 7}


def stream(server: RunningServer, **more: Any) -> tuple[str, list[float]]:
    """The text, and when each line came after the first."""
    times, lines = [], []
    for line in events(server.open_stream(COMPLETIONS, stream=True, **{**BODY, **more})):
        lines.append(line)
        times.append(time.monotonic())
    assert lines[-1] == "data: [DONE]"
    return text_of(lines), [moment - times[0] for moment in times]


def num_generated(server: RunningServer) -> int:
    return server.llm.get_metrics().num_generation_tokens


def test_a_tier_has_its_pace_and_others_have_none(make_oracle: MakeOracle) -> None:
    with running_server(make_oracle(15_000), pace="free=25,plus=1000") as server:
        _, whole = server.post(COMPLETIONS, **BODY)
        unpaced, _ = stream(server)
        paced, times = stream(server, service_tier="free")
        assert paced == unpaced == whole["choices"][0]["text"]
        # 30 tokens, the first at once. On a busy machine some come together; the rate is the same.
        assert times[-1] >= 29 / 25 * 0.7
        assert len(times) >= 8
        server.wait_until_idle()


def test_tokens_that_come_together_are_delivered_one_by_one() -> None:
    words = [" a", " long", "er", " text", "."]

    async def deliver() -> tuple[list[tuple[int, str, list[int]]], list[float], list[bool]]:
        came, times, ends = [], [], []
        loop = asyncio.get_running_loop()

        def put(event: Any) -> None:
            assert len(event.logprobs) == len(event.top_logprobs) == len(event.token_ids)
            came.append((event.sample_index, event.text, event.token_ids))
            times.append(loop.time())
            ends.append(event.is_request_finished)
            assert (event.finish_reason == "length") == (event.token_ids[-1:] == [4])
            assert event.seed == 7

        stream: Any = SimpleNamespace(
            state=SimpleNamespace(params=SimpleNamespace(n=2)), deliver=put
        )
        pacer = Pacer(stream, 50, words.__getitem__)
        for sample_idx in range(2):
            event: Any = SimpleNamespace(
                sample_index=sample_idx,
                token_ids=list(range(5)),
                text="".join(words) if sample_idx == 0 else "elsewhere.",
                logprobs=list(range(5)),
                top_logprobs=[[]] * 5,
                finish_reason="length",
                stop_reason=None,
                error="",
                seed=7,
                is_request_finished=sample_idx == 1,
            )
            assert pacer.take(event)
        began = times[0]
        while not ends[-1]:
            await asyncio.sleep(0.005)
        return came, [moment - began for moment in times], ends

    came, times, ends = asyncio.run(deliver())
    for sample_idx, pieces in ((0, words), (1, ["el", "se", "wh", "er", "e."])):
        own = [(text, ids) for idx, text, ids in came if idx == sample_idx]
        assert "".join(text for text, _ in own) == "".join(pieces)
        assert [token_id for _, ids in own for token_id in ids] == [0, 1, 2, 3, 4]
        assert own[0] == (pieces[0], [0])  # the first at once, and alone
        assert len(own) >= 3
    assert times[1] < 4 / 50 <= times[-1] + 0.002
    assert ends == [False] * (len(ends) - 1) + [True]


def test_a_fast_engine_does_not_show_in_a_paced_stream(make_oracle: MakeOracle) -> None:
    body = {**BODY, "max_tokens": 12, "logprobs": 1, "return_token_ids": True, "n": 2}
    with running_server(make_oracle(0), pace="free=25") as server:
        _, whole = server.post(COMPLETIONS, **body)
        options = {"service_tier": "free", "stream_options": {"include_usage": True}}
        sock = server.open_stream(COMPLETIONS, stream=True, **options, **body)
        chunks = [json.loads(line[6:]) for line in events(sock) if line.startswith("data: {")]
        assert chunks.pop()["usage"] == whole["usage"]
        for wanted in whole["choices"]:
            own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == wanted["index"]]
            assert len(own[0]["token_ids"]) == 1
            assert len(own) >= 4  # on a busy machine some come together
            assert "".join(c["text"] for c in own) == wanted["text"]
            assert [i for c in own for i in c["token_ids"]] == wanted["token_ids"]
            for name in ("tokens", "token_logprobs", "text_offset"):
                given = [item for c in own for item in c["logprobs"][name]]
                assert given == wanted["logprobs"][name]
            assert [c["finish_reason"] for c in own[-2:]] == [None, "length"]
        server.wait_until_idle()


def test_a_tier_that_has_no_pace_is_no_way_around_the_defaults(make_oracle: MakeOracle) -> None:
    with running_server(make_oracle(15_000), pace="default=5,free=2") as server:
        status, answer = server.post(COMPLETIONS, service_tier="gold", **BODY)
        assert (status, answer["error"]["param"]) == (400, "service_tier")
        assert "one of default, free, auto, got 'gold'" in answer["error"]["message"]
        for tier in ("auto", "default", None):
            _, times = stream(server, service_tier=tier, **{**BODY, "max_tokens": 3})
            assert times[-1] >= 2 / 5 * 0.7


def test_a_paced_stream_ends_at_once_when_it_has_to(make_oracle: MakeOracle) -> None:
    with running_server(make_oracle(500), pace="free=2") as server:
        began = time.monotonic()
        text, _ = stream(server, service_tier="free", timeout=0.5)
        assert time.monotonic() - began < 10
        assert text == server.post(COMPLETIONS, **BODY)[1]["choices"][0]["text"]  # all of it
        sock = server.open_stream(COMPLETIONS, stream=True, service_tier="free", **BODY)
        assert sock.recv(10)
        sock.close()
        server.wait_until_idle()


@pytest.mark.parametrize("pace", ["free", "free=0", "free=-1", "=3", "free=x", "free=inf", "a=1,b"])
def test_a_bad_pace_is_refused(pace: str) -> None:
    with pytest.raises(InvalidArgument, match="TIER=TOKENS_PER_SECOND"):
        ServerSettings(pace=pace)
    assert read_tiers(" a=1, b = 2.5,") == {"a": 1.0, "b": 2.5}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_identical_requests_share_one_run(make_oracle: MakeOracle, is_streamed: bool) -> None:
    with running_server(make_oracle(5000), coalesce_window=0.05) as server:

        def ask(_: int) -> str:
            if is_streamed:
                return stream(server)[0]
            return str(server.post(COMPLETIONS, **BODY)[1]["choices"][0]["text"])

        with ThreadPoolExecutor(8) as pool:
            texts = set(pool.map(ask, range(8)))
        assert len(texts) == 1
        assert num_generated(server) < 8 * 30
        shared = server.activity.coalescer.num_coalesced
        assert shared >= 4
        assert num_generated(server) == (8 - shared) * 30
        server.wait_until_idle()
        assert "llmserve:requests_coalesced_total" in server.request("GET", "/metrics")[1]


def test_what_differs_or_is_left_to_chance_is_not_shared(make_oracle: MakeOracle) -> None:
    with running_server(make_oracle(2000), coalesce_window=0.02) as server:
        bodies = [
            *({**BODY, "seed": seed} for seed in (1, 2)),
            *({**BODY, "cache_salt": salt} for salt in "ab"),
            *({**BODY, "prompt": [i]} for i in (1, 2)),
            *({**BODY, "seed": None, "temperature": 1.0} for _ in range(3)),
        ]
        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = list(pool.map(lambda body: server.post(COMPLETIONS, **body), bodies))
        assert {status for status, _ in answers} == {200}
        assert server.activity.coalescer.num_coalesced == 0
        assert num_generated(server) == len(bodies) * 30


def test_keys_do_not_share(make_oracle: MakeOracle) -> None:
    with running_server(make_oracle(3000), coalesce_window=0.05, api_key="one,two") as server:

        def ask(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            return server.request("POST", COMPLETIONS, BODY, headers)[0]

        with ThreadPoolExecutor(2) as pool:
            assert set(pool.map(ask, ["one", "two"])) == {200}
        assert server.activity.coalescer.num_coalesced == 0


def test_one_that_leaves_takes_nobody_along(make_oracle: MakeOracle) -> None:
    long = {**BODY, "max_tokens": 400, "timeout": 100}
    with running_server(make_oracle(3000), coalesce_window=0.02) as server:
        _, alone = server.post(COMPLETIONS, **long)
        text = alone["choices"][0]["text"]
        first = server.open_stream(COMPLETIONS, stream=True, **long)
        server.wait_until(lambda: num_generated(server) > 405, "it has tokens")
        hasty = server.open_stream(COMPLETIONS, stream=True, **{**long, "timeout": 0.3})
        with ThreadPoolExecutor(2) as pool:
            stays = pool.submit(stream, server, **long)
            server.wait_until(lambda: len(server.activity.runs) == 3, "they share it")
            first.close()
            lines = list(events(hasty))
            (last,) = json.loads(lines[-2][6:])["choices"]
            assert (last["finish_reason"], last["stop_reason"]) == ("length", "timeout")
            assert lines[-1] == "data: [DONE]"
            assert text.startswith(text_of(lines))
            assert 0 < len(text_of(lines)) < len(text)
            assert stays.result()[0] == text
        assert server.activity.coalescer.num_coalesced == 2
        server.wait_until_idle()
        assert num_generated(server) == 800
        assert server.activity.ended == {"client_left": 1, "timeout": 1}


def test_when_all_have_left_the_run_ends(make_oracle: MakeOracle) -> None:
    long = {**BODY, "max_tokens": 1000, "timeout": 100}
    with running_server(make_oracle(5000), coalesce_window=0.01) as server:
        socks = [server.open_stream(COMPLETIONS, stream=True, **long) for _ in range(3)]
        server.wait_until(lambda: len(server.activity.runs) == 3, "all run")
        for sock in socks:
            sock.close()
        server.wait_until_idle()
        assert num_generated(server) < 1000
        assert server.post(COMPLETIONS, **BODY)[0] == 200


def test_both_are_off_by_default(make_oracle: MakeOracle) -> None:
    with running_server(make_oracle(1000)) as server:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: stream(server), range(4)))
        assert num_generated(server) == 4 * 30
        assert server.activity.coalescer.num_coalesced == 0
