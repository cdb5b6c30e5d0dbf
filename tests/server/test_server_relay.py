"""Streams of every protocol that break off anywhere and go on, as a router has them go on."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncGenerator
from itertools import pairwise
from typing import Any

import pytest
from llmserve.route.frames import FramePlayer, FrameRecord, frames
from llmserve.route.outgoing import Outgoing
from llmserve.route.streams import CannotGoOn
from llmserve.route.upstream import ReplicaLost
from serving import DEADLINE_S, RunningServer

MESSAGES = [{"role": "user", "content": "Tell me a story."}]
PARAMETERS = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["place", "days"],
}
TOOL = {"name": "weather", "description": "Tells it.", "input_schema": PARAMETERS}
FUNCTION = {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}
COMMON = {"seed": 7, "temperature": 0.9}
OPTIONS = {"seed": 7, "temperature": 0.9, "num_predict": 40}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": (
        "/v1/messages",
        {"model": "demo", "messages": MESSAGES, "max_tokens": 40, "stream": True, **COMMON},
    ),
    "messages, a call": (
        "/v1/messages",
        {
            **{"model": "demo", "messages": MESSAGES, "max_tokens": 400, "stream": True, **COMMON},
            **{"tools": [TOOL], "tool_choice": {"type": "any"}},
        },
    ),
    "responses": (
        "/v1/responses",
        {"input": "Why?", "max_output_tokens": 40, "stream": True, "store": False, **COMMON},
    ),
    "responses, a call": (
        "/v1/responses",
        {
            **{"input": "Why?", "stream": True, "store": False, **COMMON},
            **{"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
        },
    ),
    "llama.cpp": (
        "/completion",
        {"prompt": "Once", "n_predict": 40, "stream": True, "n_probs": 1, **COMMON},
    ),
    "ollama": ("/api/chat", {"model": "demo", "messages": MESSAGES, "options": OPTIONS}),
    "ollama, raw": (
        "/api/generate",
        {"model": "demo:latest", "prompt": "Once", "raw": True, "options": OPTIONS},
    ),
}
# Where an event has its text, and what differs from run to run.
TEXTS = ("text", "thinking", "partial_json", "delta", "content", "response")
VOLATILE = ("duration", "timings", "created_at", "completed_at", "tokens_cached", "cache")
COUNTS = ("tokens_predicted", "tokens", "completion_probabilities", "logprobs", "obfuscation")


def post(server: RunningServer, outgoing: Outgoing) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
    try:
        path, data = outgoing.sent()
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise CannotGoOn(answer.decode())
        return answer
    finally:
        connection.close()


class Broken:
    """A replica's stream that breaks off after this share of its bytes."""

    def __init__(self, data: bytes, share: float) -> None:
        self.data = data
        self.end = min(int(share * len(data)), len(data) - 2) if share < 1 else len(data)

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        for begin in range(0, self.end, 997):
            yield self.data[begin : min(begin + 997, self.end)]
        if self.end < len(self.data):
            raise ReplicaLost("dead")

    def note(self, num_tokens: int) -> None:
        pass

    def close(self) -> None:
        pass


def record_of(name: str, **more: Any) -> FrameRecord:
    path, body = BODIES[name]
    outgoing = Outgoing("POST", path, json.dumps({**body, **more}).encode())
    record = FrameRecord(outgoing)
    record._outgoing = record._outgoing.relayed(request_id="same", created=1)
    return record


def play(
    server: RunningServer, record: FrameRecord, breaks: list[float]
) -> tuple[bytes, FramePlayer]:
    left = list(breaks)

    async def reopen(outgoing: Outgoing) -> Broken:
        return Broken(post(server, outgoing), left.pop(0) if left else 1)

    player = FramePlayer(record, reopen)

    async def run() -> bytes:
        first = await reopen(record.request())
        return b"".join([line async for line in player.lines(first)])

    return asyncio.run(run()), player


def plain(value: Any) -> Any:
    """Without what differs from run to run."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {k: v for k, v in value.items() if not any(word in k for word in VOLATILE)}
    if value.get("type") == "tool_use":
        kept.pop("id")
    if "cache_read_input_tokens" in value:  # what is cached is told apart there
        kept["input_tokens"] += value["cache_read_input_tokens"]
    return {k: plain(v) for k, v in kept.items()}


def events_of(data: bytes) -> list[Any]:
    lines = [line.strip().removeprefix(b"data: ") for line in data.split(b"\n")]
    return [plain(json.loads(line)) for line in lines if line.startswith(b"{")]


def folded(data: bytes) -> list[tuple[Any, str]]:
    """The events, of which those that differ in their texts alone are one."""
    found: list[tuple[Any, str]] = []
    for event in events_of(data):
        event.pop("sequence_number", None)
        holder = event.get("message") if isinstance(event.get("message"), dict) else event
        holder = event["delta"] if isinstance(event.get("delta"), dict) else holder
        name = next((key for key in TEXTS if isinstance(holder.get(key), str)), None)
        text = "" if name is None else holder.pop(name)
        if not event.get("stop"):
            event = {k: v for k, v in event.items() if k not in COUNTS}
        if found and found[-1][0] == event:
            text = found.pop()[1] + text
        found.append((event, text))
    return found


@pytest.mark.parametrize("name", BODIES)
def test_a_stream_that_breaks_anywhere_says_the_same(server: RunningServer, name: str) -> None:
    path, body = BODIES[name]
    record = record_of(name)
    whole, player = play(server, record, [1])
    assert player.num_replays == 0
    expected = folded(whole)
    assert len(expected) > 1
    by_itself = post(server, Outgoing("POST", path, json.dumps(body).encode()))
    assert [text for _, text in folded(by_itself)] == [text for _, text in expected]
    num_resumed = 0
    for share in (0, 0.2, 0.5, 0.8, 0.97, 0.999):
        record = record_of(name)
        broken, player = play(server, record, [share, 0.1, 0.3])
        assert folded(broken) == expected, share
        assert player.num_replays >= 1
        num_resumed += record.num_resumed
        numbers = [e["sequence_number"] for e in events_of(broken) if "sequence_number" in e]
        assert all(after == before + 1 for before, after in pairwise(numbers))
        assert (path == "/v1/responses") == bool(numbers)
    assert num_resumed > 0


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("responses", {"include": ["message.output_text.logprobs"]}),
        ("llama.cpp", {"prompt": ["Once", "Twice"]}),
    ],
)
def test_what_cannot_go_on_says_so(server: RunningServer, name: str, more: dict[str, Any]) -> None:
    record = record_of(name, **more)
    whole, _ = play(server, record, [1])
    assert events_of(whole)
    with pytest.raises(CannotGoOn, match="resume_token_ids"):
        play(server, record_of(name, **more), [0.5])
    # Before the first token nothing is lost.
    assert play(server, record_of(name, **more), [0])[1].num_replays == 1


def test_a_relay_is_refused_in_the_words_of_its_route(server: RunningServer) -> None:
    def run(**fields: Any) -> tuple[int, Any]:
        return server.request("POST", "/replica/run", fields)[:2]

    status, answer = run(path="/v1/messages", body={"model": "demo", "messages": []})
    assert (status, answer["type"]) == (400, "error")
    status, answer = run(path="/api/chat", body={"model": "nobody", "messages": MESSAGES})
    assert status == 404
    assert isinstance(answer["error"], str)
    status, answer = run(path="/metrics", body={})
    assert (status, answer["error"]["param"]) == (400, "path")
    status, answer = run(path="/v1/responses", body={"input": "Hi"}, request_id="chosen")
    assert (status, answer["error"]["param"]) == (400, "store")
    status, answer = run(path="/v1/messages", body=7)
    assert status == 400
    body = {"prompt": "Once", "max_tokens": 50, "stream": True, "stop": "x"}
    status, answer = run(path="/v1/completions", body=body, is_prompt_only=True, seed=1)
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 1


def test_frames_are_read_however_they_are_cut() -> None:
    data = b'{"token_ids":[1,2],"events":["a\\n"]}\n{"is_held":true}\n{"is_end":true}\n{"to'

    async def read(size: int) -> list[Any]:
        async def pieces() -> AsyncGenerator[bytes, None]:
            for begin in range(0, len(data), size):
                yield data[begin : begin + size]

        return [frame async for frame in frames(pieces())]

    for size in (1, 7, 1000):
        found = asyncio.run(read(size))
        assert [frame.token_ids for frame in found] == [[1, 2], [], []]
        assert [frame.is_end for frame in found] == [False, False, True]
