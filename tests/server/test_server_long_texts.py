"""Long texts and large answers: nobody waits behind them, and they have their time."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from llmserve import LLM, AsyncLLM, SamplingParams, _core, _core_testing
from llmserve.outputs import Logprob
from llmserve.requests.state import RequestState
from llmserve.server.http.errors import JsonResponse, LargeJsonResponse
from llmserve.server.running import generation
from llmserve.tokenization.tokenizer import Tokenizer
from serving import (
    DEADLINE_S,
    RunningServer,
    data_of,
    events,
    running_server,
)

MakeOracle = Callable[..., AsyncLLM]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


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
    gate = _core_testing.StepGate(1)
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
