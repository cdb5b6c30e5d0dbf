"""benchmarks/locustfile.py against a server, by what it uses of Locust: that has twenty packages of
its own, which no test needs."""

from __future__ import annotations

import http.client
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from llmserve import AsyncLLM
from serving import DEADLINE_S, RunningServer, running_server

LOCUSTFILE = Path(__file__).parents[2] / "benchmarks" / "locustfile.py"


class Answer:
    """What `client.post` gives; a context with `catch_response`, as in Locust."""

    def __init__(self, response: http.client.HTTPResponse, failures: list[str]) -> None:
        self.status_code = response.status
        self._response = response
        self.failure = failures.append

    def iter_lines(self) -> Iterator[bytes]:
        yield from (line.rstrip(b"\r\n") for line in self._response)

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()


class HttpUser:
    """A user with a client and the events of its environment."""

    def __init__(self, port: int) -> None:
        self.answers: dict[str, Answer] = {}
        self.failures: list[str] = []
        self.fired: list[dict[str, Any]] = []
        self.client = SimpleNamespace(post=self._post)
        request = SimpleNamespace(fire=lambda **fields: self.fired.append(fields))
        self.environment = SimpleNamespace(events=SimpleNamespace(request=request))
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)

    def _post(
        self, path: str, json: object, name: str, stream: bool = False, catch_response: bool = False
    ) -> Answer:
        assert stream == catch_response
        body = _encode(json)
        self._connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        if not stream:
            response.read()
        self.answers[name] = Answer(response, self.failures)
        return self.answers[name]


def _encode(data: object) -> bytes:
    return json.dumps(data).encode()


def _marks(name: str, value: object) -> Callable[[Any], Any]:
    def mark(function: Any) -> Any:
        setattr(function, name, value)
        return function

    return mark


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The locustfile's user."""
    locust = ModuleType("locust")
    locust.HttpUser = HttpUser  # type: ignore[attr-defined]
    locust.constant = lambda wait_s: lambda _: wait_s  # type: ignore[attr-defined]
    locust.tag = lambda *tags: _marks("tags", tags)  # type: ignore[attr-defined]
    locust.task = _marks("is_task", True)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "locust", locust)
    spec = importlib.util.spec_from_file_location("locustfile", LOCUSTFILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Reader


def test_locust_s_user_reads_whole_answers_and_streams(reader: Any, server: RunningServer) -> None:
    user = reader(server.port)
    tasks = [task for task in vars(reader).values() if getattr(task, "is_task", False)]
    assert sorted(task.tags for task in tasks) == [("stream",), ("whole",)]
    for task in tasks:
        task(user)
        task(user)
    assert {name: a.status_code for name, a in user.answers.items()} == {
        "whole": 200,
        "stream": 200,
    }
    assert [(f["name"], f["response_time"] > 0) for f in user.fired] == 2 * [("first token", True)]
    assert user.failures == []
    server.wait_until_idle()


def test_locust_s_user_counts_a_stream_that_fails(
    reader: Any, make_oracle: Callable[..., AsyncLLM]
) -> None:
    with running_server(make_oracle(300, fail_at_step=5)) as server:
        user = reader(server.port)
        user.streamed()
        assert user.failures == ["error event"]
        server.wait_until_idle()
