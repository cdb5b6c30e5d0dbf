"""Bodies that are JSON and mean harm: every field of every route gets values of every kind."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from llmserve.server.routes import bodies
from llmserve.server.routes.anthropic.bodies import CountTokensBody, MessagesBody
from llmserve.server.routes.ollama.bodies import OllamaChatBody, OllamaGenerateBody
from llmserve.server.routes.responses.bodies import ResponsesBody
from serving import RunningServer

MESSAGES = [{"role": "user", "content": "hello"}]
# The fields of a route, and a body that it takes.
ROUTES: Mapping[str, tuple[Any, dict[str, Any]]] = {
    "/v1/completions": (bodies.CompletionBody, {"prompt": "Once", "max_tokens": 2}),
    "/v1/chat/completions": (bodies.ChatBody, {"messages": MESSAGES, "max_tokens": 2}),
    "/v1/responses": (ResponsesBody, {"input": "Once", "max_output_tokens": 2}),
    "/v1/responses/input_tokens": (ResponsesBody, {"input": "Once"}),
    "/v1/messages": (MessagesBody, {"model": "demo", "messages": MESSAGES, "max_tokens": 2}),
    "/v1/messages/count_tokens": (CountTokensBody, {"model": "demo", "messages": MESSAGES}),
    "/api/chat": (OllamaChatBody, {"messages": MESSAGES, "options": {"num_predict": 2}}),
    "/api/generate": (OllamaGenerateBody, {"prompt": "Once", "options": {"num_predict": 2}}),
    "/v1/embeddings": (bodies.EmbeddingBody, {"input": "Once"}),
    "/tokenize": (bodies.TokenizeBody, {"prompt": "Once"}),
    "/detokenize": (bodies.DetokenizeBody, {"tokens": [5]}),
    "/invocations": (bodies.CompletionBody, {"prompt": "Once", "max_tokens": 2}),
}
# As they stand in a body. Each was a way into some server.
_VALUES = (
    *("null", "true", "-1", "0", "1", "1.5", "2147483648", "-2147483649", "9223372036854775808"),
    *(
        "1e400",
        "-0.0",
        "NaN",
        '""',
        '"x"',
        '"\\u0000"',
        '"\\ud800"',
        '"\\ud83d\\ude00"',
        '"{{ 1 }}"',
    ),
    *("[]", "{}", "[[]]", "[null]", "[{}]", '{"": null}', '{"type": null}', '{"type": "function"}'),
    *(
        '[{"role": null}]',
        '[{"role": "user"}]',
        '[{"role": "tool", "content": {}}]',
        "[-1]",
        "[1e99]",
    ),
    *('{"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}', '["\\u0000"]'),
    *('[{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}]', '"auto"'),
    *('{"regex": "(a+)+b"}', '{"json": "{"}', '[{"type": "text", "text": []}]', '{"a": {"b": []}}'),
    "[" * 30 + "]" * 30,
    json.dumps("a" * 5000),
    json.dumps(["a"] * 200),
)


def hostile(draws: random.Random, kind: Any, valid: Mapping[str, Any]) -> bytes:
    """A valid body of which some fields have another value, are gone, or have come."""
    fields = {name: json.dumps(value) for name, value in valid.items()}
    names = list(kind.__struct_fields__)
    for _ in range(draws.randint(1, 3)):
        name = draws.choice(names)
        if draws.random() < 0.1:
            fields.pop(name, None)
        else:
            fields[name] = draws.choice(_VALUES)
    items = [f"{json.dumps(name)}: {value}" for name, value in fields.items()]
    if items and draws.random() < 0.1:
        items.append(draws.choice(items))  # the same field twice
    return ("{" + ", ".join(items) + "}").encode()


def check_hostile_bodies(server: RunningServer, num_a_route: int) -> None:
    def text() -> str:
        answer = server.post("/v1/completions", prompt="Once", seed=1, max_tokens=8)[1]
        return str(answer["choices"][0]["text"])

    before = text()
    draws = random.Random(5)
    answers = Counter[int]()
    for path, (kind, valid) in ROUTES.items():
        for _ in range(num_a_route):
            body = hostile(draws, kind, valid)
            status, answer, _ = server.request("POST", path, body)
            assert status in (200, 400, 404, 413, 422), (path, body, status, answer)
            answers[status] += 1
            assert "Traceback" not in str(answer)
    assert min(answers[200], answers[400]) > num_a_route / 2, answers  # not one check for all
    assert text() == before
    server.wait_until_idle()


def test_hostile_bodies_are_answered_or_refused(server: RunningServer) -> None:
    check_hostile_bodies(server, 40)


@pytest.mark.long
def test_many_hostile_bodies_are_answered_or_refused(server: RunningServer) -> None:
    check_hostile_bodies(server, 4000)
