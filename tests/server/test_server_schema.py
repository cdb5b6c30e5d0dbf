"""The OpenAPI document, fuzzed: what it allows and what it forbids, and never a 5xx."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from llmserve.server.answer_schemas import answer_components
from llmserve.server.openapi import document
from serving import DEADLINE_S, RunningServer

schemathesis = pytest.importorskip("schemathesis", reason="it needs Python 3.11")

NUM_EXAMPLES, NUM_OF_LONG = 12, 500
OPERATIONS = [(path, method) for path, ops in document()["paths"].items() for method in ops]


def is_worded(path: str, answer: Any) -> bool:
    """Whether an error has the form of its route's protocol."""
    error = answer["error"]
    if "/messages" in path:
        return answer["type"] == "error" and set(error) == {"type", "message"}
    if path.startswith("/api/"):
        return isinstance(error, str)
    return set(error) == {"message", "type", "param", "code"}


def fuzz(server: RunningServer, path: str, method: str, mode: Any, num_examples: int) -> None:
    schema = schemathesis.openapi.from_dict(document())
    schema.config.update(base_url=f"http://127.0.0.1:{server.port}")
    strategy = schema[path][method.upper()].as_strategy(generation_mode=mode)

    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=num_examples == NUM_EXAMPLES,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(case=strategy)
    def run(case: Any) -> None:
        if isinstance(case.body, dict):
            # Whatever it asks for, it shall not take long.
            case.body.update({name: 3 for name in ("max_tokens", "n_predict") if name in case.body})
            case.body.pop("timeout", None)
        response = case.call(timeout=DEADLINE_S)
        assert response.status_code < 500, (response.text, case.body)
        if response.status_code >= 400 and response.content:
            assert is_worded(path, response.json()), response.text
            assert "Traceback" not in response.text

    run()


@pytest.mark.parametrize(
    ("path", "method", "mode"),
    [
        (path, method, mode)
        for path, method in OPERATIONS
        for mode in ("POSITIVE", "NEGATIVE")
        if mode == "POSITIVE" or method == "post"  # a GET has nothing to get wrong
    ],
)
def test_no_request_that_the_description_tells_of_breaks_the_server(
    server: RunningServer, path: str, method: str, mode: str
) -> None:
    num_examples = NUM_EXAMPLES if method == "post" else 1
    fuzz(server, path, method, schemathesis.GenerationMode[mode], num_examples)
    server.wait_until_idle()
    assert server.post("/v1/completions", prompt="Once", max_tokens=2)[0] == 200


# A text, numbers as text, and what is for admins.
UNTESTED = ("/", "/metrics", "/debug/block_events")
SHORT: dict[str, Any] = {"max_tokens": 3}
HELLO = [{"role": "user", "content": "Hello"}]
CALLED = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": "required",
}
ASKED: list[tuple[str, str, dict[str, Any]]] = [
    ("post", "/v1/chat/completions", {"messages": HELLO, **SHORT}),
    ("post", "/v1/chat/completions", {"messages": HELLO, "max_tokens": 90, "n": 2, **CALLED}),
    (
        "post",
        "/v1/chat/completions",
        {"messages": HELLO, **SHORT, "logprobs": True, "top_logprobs": 1, "return_token_ids": True},
    ),
    ("post", "/v1/completions", {"prompt": "x", **SHORT, "prompt_logprobs": 1, "logprobs": 1}),
    ("post", "/v1/embeddings", {"input": "x"}),
    ("post", "/v1/embeddings", {"input": ["x", "y"], "encoding_format": "base64"}),
    ("post", "/v1/responses/input_tokens", {"input": "x"}),
    ("post", "/v1/chat/completions/input_tokens", {"messages": HELLO}),
    ("post", "/v1/messages", {"messages": HELLO, **SHORT}),
    ("post", "/v1/messages/count_tokens", {"messages": HELLO}),
    ("post", "/completion", {"prompt": "x", "n_predict": 3, "n_probs": 1}),
    ("post", "/api/chat", {"model": "demo", "messages": HELLO, "stream": False}),
    ("post", "/api/chat", {"model": "demo", "stream": False}),
    ("post", "/api/generate", {"model": "demo", "prompt": "x", "stream": False}),
    ("post", "/api/show", {"model": "demo"}),
    ("post", "/api/embed", {"model": "demo", "input": ["x", "y"]}),
    ("post", "/api/embed", {"model": "demo", "input": []}),
    ("post", "/api/embeddings", {"model": "demo", "prompt": "x"}),
    ("post", "/api/pull", {"model": "demo"}),
    ("post", "/tokenize", {"prompt": "x", "return_token_strs": True}),
    ("post", "/tokenize", {"prompt": "x"}),
    ("post", "/detokenize", {"tokens": [5]}),
    ("post", "/apply-template", {"messages": HELLO}),
    ("post", "/invocations", {"prompt": "x", **SHORT}),
    *(
        ("get", path, {})
        for path, operations in document()["paths"].items()
        if "get" in operations and "{" not in path and path not in UNTESTED
    ),
    ("get", "/v1/models/{model}", {"model": "demo"}),
]


def check_answer(method: str, path: str, answer: Any) -> None:
    """Fails for a field that is not as the description says, or that it does not tell of."""
    described = document()
    content = described["paths"][path][method]["responses"]["200"]["content"]
    schema = content["application/json"]["schema"]
    registry = {"components": described["components"], **schema}
    jsonschema.Draft202012Validator(registry).validate(answer)
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        known = described["components"]["schemas"][name]["properties"]
        unknown = set(answer) - set(known) - LEFT_OUT.get(name, set())
        assert not unknown


# What an answer repeats of its request, of which the description names the most telling.
LEFT_OUT = {
    "Response": {"background", "max_tool_calls", "prompt_cache_key", "safety_identifier", "user"}
    | {"service_tier", "top_logprobs"}
}


@pytest.mark.parametrize(("method", "path", "body"), ASKED)
def test_an_answer_is_what_the_description_says(
    server: RunningServer, method: str, path: str, body: dict[str, Any]
) -> None:
    target = path.format(**body) if method == "get" else path
    status, answer, _ = server.request(method.upper(), target, body if method == "post" else None)
    assert status == 200, answer
    check_answer(method, path, answer)


def test_so_is_one_that_is_stored(server: RunningServer) -> None:
    path = "/v1/responses"
    made = server.post(path, input="x", max_output_tokens=3)[1]
    check_answer("post", path, made)
    for method, more in (("get", ""), ("get", "/input_items"), ("delete", "")):
        answer = server.request(method.upper(), f"{path}/{made['id']}{more}")[1]
        check_answer(method, f"{path}/{{response_id}}{more}", answer)


def test_every_route_says_what_it_answers() -> None:
    for path, method in OPERATIONS:
        operation = document()["paths"][path][method]
        assert operation["responses"]["200"]["content"], path
    for schema in answer_components().values():
        assert all(field["description"] for field in schema["properties"].values())


@pytest.mark.long
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
@pytest.mark.parametrize("path", [path for path, method in OPERATIONS if method == "post"])
def test_nor_do_hundreds(server: RunningServer, path: str, mode: str) -> None:
    fuzz(server, path, "post", schemathesis.GenerationMode[mode], NUM_OF_LONG)
    server.wait_until_idle()
