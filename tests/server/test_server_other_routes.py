"""Beside completions and chat: token ids, embeddings, the description, and operational routes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from llmserve import LLM, AsyncLLM
from llmserve.server.app import ROUTES
from serving import RunningServer, running_server

MakeOracle = Callable[..., AsyncLLM]
CHAT = "/v1/chat/completions"
PROMPT = "Once upon a time"
MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story."}]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return server.openai()


def test_tokenize_and_detokenize_are_each_others_inverse(server: RunningServer) -> None:
    status, answer = server.post("/tokenize", prompt=PROMPT, return_token_strs=True)
    assert status == 200
    assert (answer["count"], "".join(answer["token_strs"])) == (4, PROMPT)
    assert server.post("/tokenize", prompt=PROMPT)[1]["token_strs"] is None
    assert server.post("/detokenize", tokens=answer["tokens"]) == (
        200,
        {"prompt": PROMPT, "content": PROMPT},
    )
    status, chat = server.post("/tokenize", messages=MESSAGES)
    assert status == 200
    text = server.post("/detokenize", tokens=chat["tokens"])[1]["prompt"]
    assert text.startswith("<|im_start|>user\nTell me a story.")


TEMPLATE = (
    "{% for m in messages %}{{ m.content }}\n{% endfor %}{{ tools | tojson if tools }}"
    "{{ effort }}{{ reasoning_effort }}{{ 'answer:' if add_generation_prompt }}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_tokenize_gives_the_tokens_of_a_chat(make_oracle: MakeOracle) -> None:
    prompts = set()
    with running_server(make_oracle(0, chat_template=TEMPLATE)) as server:
        for fields in (
            {},
            {"reasoning_effort": "high"},
            {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}},
            {"chat_template_kwargs": {"effort": "some"}},
            {"tools": [TOOL]},
            {"tools": [TOOL], "tool_choice": "none", "add_generation_prompt": False},
            {"continue_final_message": True},
        ):
            body = {"messages": MESSAGES, **fields}
            status, answer = server.post("/tokenize", **body)
            assert status == 200, answer
            chat = server.post(CHAT, **body, max_tokens=1, return_token_ids=True)[1]
            assert answer["tokens"] == chat["prompt_token_ids"], fields
            prompts.add(tuple(answer["tokens"]))
        assert len(prompts) == 7, "each field changes the prompt"
        for name, value in (("documents", [{}]), ("chat_template", "{{ x }}")):
            for route in ("/tokenize", CHAT):
                status, answer = server.post(route, messages=MESSAGES, **{name: value})
                assert (status, answer["error"]["param"]) == (400, name)


def test_a_truncated_prompt_is_its_last_tokens_on_every_route(server: RunningServer) -> None:
    whole = server.post("/tokenize", prompt=PROMPT * 1000)[1]["tokens"]
    asked = {"max_tokens": 1, "return_token_ids": True, "truncate_prompt_tokens": 9}
    answer = server.post("/v1/completions", prompt=PROMPT * 1000, echo=True, **asked)[1]
    (choice,) = answer["choices"]
    assert choice["prompt_token_ids"] == whole[-9:]
    text = server.post("/detokenize", tokens=whole[-9:])[1]["prompt"]
    assert choice["text"].startswith(text)
    assert answer["usage"]["prompt_tokens"] == 9
    chat = server.post(CHAT, messages=MESSAGES, **asked)[1]
    assert chat["prompt_token_ids"] == server.post("/tokenize", messages=MESSAGES)[1]["tokens"][-9:]
    vectors = [
        server.post("/v1/embeddings", input=given, truncate_prompt_tokens=keep)[1]
        for given, keep in ((PROMPT * 1000, 9), (whole[-9:], None))
    ]
    assert vectors[0] == vectors[1]
    for route, field in (("/v1/completions", {"prompt": "x"}), (CHAT, {"messages": MESSAGES})):
        status, answer = server.post(route, **field, truncate_prompt_tokens=0)
        assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_embeddings_are_those_of_the_offline_engine(
    client: openai.OpenAI, offline: LLM, encoding_format: Any
) -> None:
    texts = [PROMPT, "The fox"]
    answer = client.embeddings.create(model="demo", input=texts, encoding_format=encoding_format)
    wanted = [output.outputs.embedding for output in offline.embed(texts, use_tqdm=False)]
    if encoding_format == "base64":
        assert [len(item.embedding) for item in answer.data] == [  # the client leaves it as it is
            4 * ((len(vector) * 4 + 2) // 3) for vector in wanted
        ]
        default = client.embeddings.create(model="demo", input=texts)  # base64 on the wire
        assert [item.embedding for item in default.data] == wanted
    else:
        assert [item.embedding for item in answer.data] == wanted
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 4
    ids = client.embeddings.create(model="demo", input=[5, 6, 7], dimensions=8)
    assert len(ids.data[0].embedding) == 8


def test_the_description_names_every_field_and_route(server: RunningServer) -> None:
    document = server.request("GET", "/openapi.json")[1]
    routes = {route.path.replace(":path", "") for route in ROUTES}
    described = set(document["paths"])
    others = {path for path in routes if path.startswith("/api/v0")}  # are the same
    others |= {"/v1/tokenize", "/v1/detokenize", "/v1/health", "/health_generate"}
    others |= {f"/api/{name}" for name in ("create", "copy", "push", "delete")}  # are refused
    bare = {path for path in routes if "/v1" + path in described}  # are the same
    assert described == routes - {"/docs", "/openapi.json"} - bare - others
    assert len(bare) == sum(path.startswith("/v1/") for path in described)
    assert "temperature" in document["components"]["schemas"]["ChatBody"]["properties"]
    page = server.request("GET", "/docs")[1]
    assert "/v1/chat/completions" in page
    assert "<script" not in page
    assert json.dumps(document)


def test_a_template_is_applied_and_told(server: RunningServer) -> None:
    status, answer = server.post("/apply-template", messages=MESSAGES)
    assert status == 200
    assert answer["prompt"].startswith("<|im_start|>user\nTell me a story.")
    tokens = server.post("/tokenize", messages=MESSAGES)[1]["tokens"]
    assert server.post("/detokenize", tokens=tokens)[1]["prompt"] == answer["prompt"]
    info = server.request("GET", "/tokenizer_info")[1]
    props = server.request("GET", "/props?model=alias")[1]
    assert info["chat_template"] == props["chat_template"]
    assert "<|im_start|>" in info["chat_template"]
    assert info["eos_token"] == props["eos_token"] == "<|im_end|>"
    names = [token["content"] for token in info["added_tokens_decoder"].values()]
    assert {"<|im_start|>", "<|im_end|>"} <= set(names)
    assert props["default_generation_settings"]["n_ctx"] == info["max_model_len"] == 2048
    assert props["default_generation_settings"]["params"]["temperature"] == 0.7
    assert props["model_path"] == "demo"
    assert server.request("GET", "/props?model=no")[0] == 404


def test_routes_are_there_without_their_prefix_too(server: RunningServer) -> None:
    asked = {"max_tokens": 5, "temperature": 0}
    for path, body in (
        ("/completions", {"prompt": PROMPT, **asked}),
        ("/chat/completions", {"messages": MESSAGES, **asked}),
        ("/embeddings", {"input": PROMPT}),
        ("/messages", {"messages": MESSAGES, "max_tokens": 5}),
        ("/messages/count_tokens", {"messages": MESSAGES}),
        ("/responses", {"input": PROMPT, "max_output_tokens": 5}),
    ):
        status, answer = server.post(path, **body)
        assert status == 200, answer
        assert answer.keys() == server.post("/v1" + path, **body)[1].keys()
    assert server.request("GET", "/models")[1] == server.request("GET", "/v1/models")[1]
    assert server.request("GET", "/models/alias")[0] == 200


def test_an_invocation_is_what_its_body_is_for(server: RunningServer) -> None:
    asked = {"max_tokens": 5, "temperature": 0}
    for path, body in (
        ("/v1/completions", {"prompt": PROMPT, **asked}),
        ("/v1/chat/completions", {"messages": MESSAGES, **asked}),
        ("/v1/embeddings", {"input": PROMPT}),
    ):
        status, answer = server.post("/invocations", **body)
        assert status == 200, answer
        wanted = server.post(path, **body)[1]
        for name in ("choices", "data"):
            assert answer.get(name) == wanted.get(name)
    for data in (b"{}", b"[]", b"\xff"):
        status, answer, _ = server.request("POST", "/invocations", data)
        assert status == 400, answer
    assert server.request("GET", "/ping")[0] == server.request("POST", "/ping", {})[0] == 200


def test_operational_routes_answer(server: RunningServer) -> None:
    assert server.request("GET", "/health")[:2] == (200, {"status": "ok"})
    assert server.request("GET", "/ready")[0] == 200
    assert "version" in server.request("GET", "/version")[1]
    assert server.request("GET", "/load")[1]["models"]["demo"]["num_running"] == 0
