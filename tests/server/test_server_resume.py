"""Answers that broke off go on elsewhere: resume_token_ids, and what a router has to know."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from llmserve import AsyncLLM, _core
from serving import RunningServer, data_of, events, running_server

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
BODIES: dict[str, dict[str, Any]] = {
    "plain": {"prompt": "Once upon a time"},
    "penalties": {"prompt": [5, 6, 7], "presence_penalty": 1.0, "repetition_penalty": 1.3},
    "stop": {"prompt": "The fox", "stop": ["zzz", "the moon and the"]},
    "grammar": {"prompt": "Say it: ", "structured_outputs": {"json": SCHEMA}},
    "logprobs": {"prompt": "The moon", "logprobs": 2, "top_p": 0.9},
    "min tokens": {"prompt": "The end", "min_tokens": 30, "logit_bias": {"7": 5}},
    "thinking": {"messages": [{"role": "user", "content": "Tell me a story."}], "n": 1},
    "greedy chat": {"messages": [{"role": "user", "content": "Why?"}], "temperature": 0},
}


def stream(server: RunningServer, body: dict[str, Any]) -> list[Any]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    more = {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    sock = server.open_stream(path, **{**body, **more})
    try:
        return data_of(events(sock))
    finally:
        sock.close()


def tokens_of(chunks: list[Any]) -> list[int]:
    return [t for c in chunks for choice in c["choices"] for t in choice.get("token_ids") or ()]


def words_of(chunks: list[Any]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)


def end_of(chunks: list[Any]) -> tuple[object, object]:
    (last,) = [c for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    return last["finish_reason"], last["stop_reason"]


@pytest.mark.parametrize("name", BODIES)
def test_an_answer_goes_on_where_it_broke_off(server: RunningServer, name: str) -> None:
    body = {"seed": 2**63 + 11, "max_tokens": 40, "temperature": 0.9, **BODIES[name]}
    whole = stream(server, body)
    token_ids = tokens_of(whole)
    assert token_ids
    counts = whole[-1]["usage"]
    for num_given in {1, len(token_ids) // 2, len(token_ids) - 1} - {0, len(token_ids)}:
        # What was read of the first answer: whole lines, with so many tokens at least.
        read = []
        while len(tokens_of(read)) < num_given:
            read.append(whole[len(read)])
        given = tokens_of(read)
        if len(given) == len(token_ids):
            continue
        rest = stream(server, {**body, "resume_token_ids": given})
        assert given + tokens_of(rest) == token_ids
        assert words_of(read) + words_of(rest) == words_of(whole)
        assert end_of(rest) == end_of(whole)
        assert not any("role" in c.get("delta", ()) for d in rest for c in d["choices"])
        for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert rest[-1]["usage"][key] == counts[key]
        if name == "logprobs":
            rows = [c["logprobs"] for d in (*read, *rest) for c in d["choices"]]
            expected = [c["logprobs"] for d in whole for c in d["choices"]]
            for field in ("tokens", "token_logprobs", "text_offset"):
                joined, whole_row = (
                    [x for r in some for x in r[field]] for some in (rows, expected)
                )
                assert joined == whole_row


def test_a_whole_answer_that_goes_on_has_what_was_given(server: RunningServer) -> None:
    body = {"prompt": "Once", "seed": 3, "max_tokens": 24, "return_token_ids": True}
    _, whole = server.post("/v1/completions", **body)
    given = whole["choices"][0]["token_ids"][:10]
    status, again = server.post("/v1/completions", **body, resume_token_ids=given)
    assert status == 200
    for key in ("text", "token_ids", "finish_reason"):
        assert again["choices"][0][key] == whole["choices"][0][key]
    assert again["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"seed": None}, "seed"),
        ({"n": 2}, "n"),
        ({"prompt": ["a", "b"]}, "one prompt"),
        ({"resume_token_ids": [10**6]}, "outside the vocabulary"),
        ({"max_tokens": 2}, "nothing to go on with"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_what_cannot_go_on_is_refused(
    server: RunningServer, more: dict[str, Any], what: str
) -> None:
    body = {"prompt": "Once", "seed": 1, "max_tokens": 8, "resume_token_ids": [5, 6], **more}
    status, answer = server.post("/v1/completions", **body)
    assert status == 400
    assert what in answer["error"]["message"]


def test_a_router_learns_what_a_replica_is_and_holds(demo: AsyncLLM) -> None:
    with running_server(demo, admin_key="boss", api_key="key") as server:
        key = {"Authorization": "Bearer key"}
        assert server.request("GET", "/replica")[0] == 401
        _, told, _ = server.request("GET", "/replica", headers=key)
        (model,) = told["models"]
        assert model["numerics_class"] == demo.numerics_class
        assert model["block_size"] == demo.block_size
        path = "/debug/block_events?"
        assert server.request("GET", path, headers=key)[0] == 401
        boss = {"Authorization": "Bearer boss"}
        _, first, _ = server.request("GET", path, headers=boss)
        after = first["snapshot"]["sequence"]
        prompt = [*range(5, 5 + 3 * demo.block_size)]
        body = {"prompt": prompt, "max_tokens": 1, "cache_salt": "new"}
        server.request("POST", "/v1/completions", body, key)
        path += f"epoch={first['epoch']}&after={after}&wait=5"
        _, news, _ = server.request("GET", path, headers=boss)
        stored = b"".join(
            base64.b64decode(hashes)
            for batch in news["batches"]
            for kind, hashes in batch["events"]
            if kind == "stored"
        )
        assert _core.hash_blocks(prompt, demo.block_size, "new") in stored
        _, anew, _ = server.request("GET", path.replace("epoch=", "epoch=x"), headers=boss)
        assert "snapshot" in anew
        assert server.request("GET", "/debug/block_events?after=x", headers=boss)[0] == 400
