"""What a router knows of its replicas: blocks by events with gaps, the living and the dead."""

from __future__ import annotations

import asyncio
import base64
from itertools import product
from typing import Any

import pytest
from llmserve import _core, demo_model_path
from llmserve.route.fleet import Fleet
from llmserve.route.prompts import PromptBlocks, PromptReader
from llmserve.route.protocols import POSTED
from llmserve.route.replay import StreamRecord
from llmserve.route.settings import RouteSettings

BLOCK = 16


def text(tokens: list[int]) -> str:
    return base64.b64encode(_core.hash_blocks(tokens, BLOCK)).decode()


def make(num: int = 2) -> Fleet:
    urls = [f"http://127.0.0.1:{9 + i}" for i in range(num)]
    fleet = Fleet(urls, RouteSettings(), BLOCK, has_tokens=True)
    for replica in fleet.replicas:
        replica.number = fleet.router.add_replica(replica.url)
        replica.is_ready = True
        replica.models = [{"names": ["m"], "numerics_class": "one"}]
    return fleet


def place(fleet: Fleet, tokens: list[int], **more: Any) -> str | None:
    hashes = _core.hash_blocks(tokens, BLOCK)
    with fleet.placed(
        PromptBlocks(hashes, len(tokens), 1), "", **{"excluded": [], **more}
    ) as found:
        return None if found is None else found.name


def test_a_gap_in_events_asks_for_a_snapshot() -> None:
    fleet = make()
    first, second = fleet.replicas
    old, new = [*range(0, 320)], [*range(1000, 1320)]
    snapshot = {"epoch": "e", "snapshot": {"sequence": 4, "hashes": text(old)}}
    assert fleet._take(second, snapshot, -1) == 4
    assert second.epoch == "e"
    assert place(fleet, old) == second.url
    stored = {"sequence": 5, "events": [["stored", text(new)], ["removed", text(old)]]}
    assert fleet._take(second, {"epoch": "e", "batches": [stored]}, 4) == 5
    assert place(fleet, new) == second.url
    late = {"sequence": 7, "events": [["cleared", ""]]}
    assert fleet._take(second, {"epoch": "e", "batches": [late]}, 5) == -1
    assert second.epoch == ""  # so that the next answer is a snapshot
    assert place(fleet, new) == second.url  # and meanwhile what is known holds
    empty = {"epoch": "f", "snapshot": {"sequence": 1, "hashes": ""}}
    assert fleet._take(second, empty, -1) == 1
    loads = {load.name: load.num_blocks for load in fleet.router.loads()}
    assert loads == {first.url: 0, second.url: 0}


def test_who_is_lost_gets_nothing_and_its_readers_are_told() -> None:
    fleet = make()
    first, second = fleet.replicas
    cut = []

    class Reply:
        def close(self) -> None:
            cut.append(self)

    reply: Any = Reply()
    first.replies.add(reply)
    fleet.lose(first, "killed")
    fleet.lose(first, "again")
    assert cut == [reply]
    assert {place(fleet, [*range(32)]) for _ in range(4)} == {second.url}
    assert place(fleet, [1], excluded=[second.url]) is None
    assert fleet.num_ready == 1


def test_what_goes_on_needs_its_numerics_class() -> None:
    fleet = make(3)
    fleet.replicas[0].models = [{"names": ["m", "n"], "numerics_class": "other"}]
    names = {place(fleet, [1], needed_class="one", model="m") for _ in range(6)}
    assert fleet.replicas[0].url not in names
    assert place(fleet, [1], needed_class="third") is None


def test_places_are_given_back() -> None:
    fleet = make(1)
    with fleet.placed(PromptBlocks(b"", 100, 50), "t", []) as found:
        assert found is not None
        found.grew(0)
        found.grew(3)
        (load,) = fleet.router.loads()
        assert (load.num_requests, load.num_tokens, load.prefill_work) == (1, 150, 0)
    (load,) = fleet.router.loads()
    assert (load.num_requests, load.num_tokens) == (0, 0)


CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAID = "Tell me a story. " * 9
BRIEF = "Be brief."
SYSTEM = {"role": "system", "content": BRIEF}
USER = {"role": "user", "content": SAID}


@pytest.mark.parametrize(
    ("path", "body", "same"),
    [
        ("/v1/messages", {"system": BRIEF, "messages": [USER]}, {"messages": [SYSTEM, USER]}),
        (
            "/v1/responses",
            {"instructions": "Be brief.", "input": SAID},
            {"messages": [SYSTEM, USER]},
        ),
        ("/api/chat", {"model": "m", "messages": [USER]}, {"messages": [USER]}),
        ("/api/generate", {"model": "m", "prompt": SAID}, {"messages": [USER]}),
        ("/api/generate", {"model": "m", "prompt": SAID, "raw": True}, {"prompt": SAID}),
        ("/completion", {"prompt": [5, SAID]}, None),
        ("/completion", {"prompt": SAID}, {"prompt": SAID}),
    ],
)
def test_a_prompt_has_its_blocks_in_whatever_words(path: str, body: Any, same: Any) -> None:
    reader = PromptReader(str(demo_model_path()))
    more = {"max_tokens": 9} if path == "/v1/messages" else {}
    found = reader.read(path, {**body, **more})
    assert len(found.hashes) >= 32
    if same is not None:
        chat = reader.read(CHATS if "messages" in same else COMPLETIONS, same)
        # Whether it thinks is the template's to say; what comes before that is the same.
        assert found.hashes[: len(chat.hashes) - 32] == chat.hashes[:-32] != b""
    assert found.hashes != PromptReader("").read(path, body).hashes


def test_prompts_are_split_as_a_server_does_it() -> None:
    reader = PromptReader(str(demo_model_path()))
    by_text = PromptReader("")
    chat = {"messages": [{"role": "user", "content": "Tell me a story. " * 9}], "max_tokens": 7}
    found = reader.read(CHATS, chat)
    assert len(found.hashes) == 32 * (found.num_tokens // BLOCK)
    assert found.max_new_tokens == 7
    assert reader.read(COMPLETIONS, {"prompt": [*range(40)]}).hashes == _core.hash_blocks(
        [*range(40)], BLOCK
    )
    salted = reader.read(COMPLETIONS, {"prompt": [*range(40)], "cache_salt": "x", "n": 3})
    assert salted.hashes == _core.hash_blocks([*range(40)], BLOCK, "x")
    assert salted.max_new_tokens == 3 * 256
    longer = {**chat, "messages": [*chat["messages"], {"role": "user", "content": "x" * 99}]}  # type: ignore[misc]
    begin = by_text.read(CHATS, chat).hashes
    assert by_text.read(CHATS, longer).hashes[: len(begin) - 32] == begin[:-32]


@pytest.mark.parametrize(
    "body",
    [
        *({}, {"prompt": None}, {"prompt": ["a", 5]}, {"prompt": [-5]}, {"prompt": [2**70]}),
        *({"messages": 7}, {"messages": [{"role": 5}]}, {"n": -1, "max_tokens": "x"}),
        {"n": 10**12, "max_tokens": 2**70, "prompt": "y", "cache_salt": 5, "seed": 2**80},
    ],
)
def test_bodies_that_a_server_refuses_are_routed_all_the_same(body: dict[str, Any]) -> None:
    for tokenizer, path in product(("", str(demo_model_path())), POSTED):
        assert 0 <= PromptReader(tokenizer).read(path, body).max_new_tokens < 2**42
    StreamRecord(body).request()  # before a server has bounded anything


def test_nobody_is_asked_twice_at_once() -> None:
    """Requests that come together are spread: choosing reserves."""
    fleet = make(4)

    async def run() -> list[str]:
        names = []

        async def one() -> None:
            with fleet.placed(PromptBlocks(b"", 64, 64), "", []) as found:
                assert found is not None
                names.append(found.name)
                await asyncio.sleep(0.01)

        await asyncio.gather(*(one() for _ in range(8)))
        return names

    names = asyncio.run(run())
    assert all(names.count(replica.url) == 2 for replica in fleet.replicas)
