"""Streams that go on at another replica, played from scripts: whatever breaks off, the client's
lines say the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from llmserve import _core
from llmserve.route.replay import StreamRecord
from llmserve.route.streams import CannotGoOn, Player
from llmserve.route.upstream import ReplicaLost

TOKENS = 9


def token(seed: int, position: int) -> int:
    return (seed * 31 + position * 7) % 97


class Scripted:
    """A replica's stream of a body, which breaks off after so many bytes."""

    def __init__(self, body: dict[str, Any], breaks_at: int | None, piece: int = 5) -> None:
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        n = body.get("n", 1)
        given = body.get("resume_token_ids", [])
        events = []
        for position in range(len(given), TOKENS):
            for k in range(len(prompts)):
                for i in range(n):
                    seed = _core.sample_seed(body["seed"], i) % 10**6 + len(prompts[k])
                    told = {
                        "index": k * n + i,
                        "text": chr(97 + token(seed, position) % 26),
                        "token_ids": [token(seed, position)],
                        "finish_reason": "length" if position == TOKENS - 1 else None,
                    }
                    if position == len(given):
                        told["prompt_token_ids"] = [1] * len(prompts[k])
                    events.append({"id": f"x{id(self)}", "created": 1, "choices": [told]})
        if body.get("stream_options", {}).get("include_usage"):
            counts = {
                "completion_tokens": len(events) + len(given),
                "prompt_tokens": len(prompts[0]),
            }
            events.append({"id": f"x{id(self)}", "created": 1, "choices": [], "usage": counts})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self.data = "".join([": hello\n\n", *lines, "data: [DONE]\n\n"]).encode()
        self.breaks_at = breaks_at
        self.piece = piece
        self.num_noted = 0

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        end = len(self.data) if self.breaks_at is None else self.breaks_at
        for begin in range(0, min(end, len(self.data)), self.piece):
            yield self.data[begin : min(begin + self.piece, end)]
        if end < len(self.data):
            raise ReplicaLost("dead")

    def note(self, num_tokens: int) -> None:
        self.num_noted += num_tokens

    def close(self) -> None:
        pass


def play(body: dict[str, Any], breaks: list[int | None]) -> tuple[list[Any], Player]:
    """The client's events, and the player."""
    record = StreamRecord(body)
    left = list(breaks)
    opened: list[Scripted] = []

    async def reopen(rest: dict[str, Any]) -> Scripted:
        opened.append(Scripted(rest, left.pop(0) if left else None, piece=len(opened) + 3))
        return opened[-1]

    player = Player(record, reopen)

    async def run() -> bytes:
        first = await reopen(record.request())
        return b"".join([line async for line in player.lines(first)])

    data = asyncio.run(run()).decode()
    lines = [line for line in data.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]], player


def words(events: list[Any]) -> dict[int, str]:
    found: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


BODIES = [
    {"prompt": "ab", "seed": 4},
    {"prompt": "ab", "seed": 4, "n": 3},
    {"prompt": ["ab", "c", "defg"], "seed": 2**63 + 1, "n": 2},
]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_that_breaks_anywhere_says_the_same(body: dict[str, Any], usage: bool) -> None:
    body = {**body, "stream": True, "stream_options": {"include_usage": usage}}
    whole, player = play(body, [None])
    assert player.num_replays == 0
    size = len(Scripted(player.record.request(), None).data)
    for breaks_at in {*range(0, size, 211), size - 3, size - 16}:
        broken, player = play(body, [breaks_at, 150, None, 90, 0])
        assert words(broken) == words(whole)
        assert player.num_replays > 0 or breaks_at > size // 2
        assert len({event["id"] for event in broken}) == 1
        ends = [c["index"] for e in broken for c in e["choices"] if c["finish_reason"]]
        assert sorted(ends) == sorted(words(whole))
        assert ("usage" in broken[-1]) == usage
        if usage:
            assert broken[-1]["usage"]["completion_tokens"] == TOKENS * len(words(whole))
        assert not any("token_ids" in c for e in broken for c in e["choices"])


def test_a_seed_is_drawn_and_kept() -> None:
    record = StreamRecord({"prompt": "x"})
    assert 0 <= record.request()["seed"] < 2**63
    assert StreamRecord({"prompt": "x"}).request()["seed"] != record.request()["seed"]
    record.choices[0].token_ids = [5]
    rest = record.rest(0)
    assert rest["seed"] == record.request()["seed"]
    assert rest["resume_token_ids"] == [5]
    assert StreamRecord({"prompt": "x", "seed": -1}).request()["seed"] != -1


def test_what_cannot_go_on_says_so() -> None:
    body = {"prompt": "ab", "seed": 1, "echo": True, "logprobs": 1}
    with pytest.raises(CannotGoOn):
        play(body, [300])
    with pytest.raises(CannotGoOn, match="too often"):
        play({"prompt": "ab", "seed": 1}, [0] * 100)
