"""The OpenAPI document, fuzzed: what it allows and what it forbids, and never a 5xx."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from llmserve.server.openapi import document
from serving import DEADLINE_S, RunningServer

schemathesis = pytest.importorskip("schemathesis", reason="it needs Python 3.11")

NUM_EXAMPLES, NUM_OF_LONG = 20, 500
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
            case.body.update({name: 3 for name in ("max_tokens",) if name in case.body})
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


@pytest.mark.long
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
@pytest.mark.parametrize("path", [path for path, method in OPERATIONS if method == "post"])
def test_nor_do_hundreds(server: RunningServer, path: str, mode: str) -> None:
    fuzz(server, path, "post", schemathesis.GenerationMode[mode], NUM_OF_LONG)
    server.wait_until_idle()
