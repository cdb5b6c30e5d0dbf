"""The router: prefixes against load, reservations, events with gaps, tenants, balanced prompts."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest
from llmserve import _core
from llmserve._core import RouterConfig, hash_blocks, hash_text_blocks
from llmserve.errors import InvalidArgument, ResourceExhausted

BLOCK = 16


def router(**config: object) -> _core.Router:
    return _core.Router(RouterConfig(block_size=BLOCK, **config))


def prompt(seed: int, num_tokens: int, shared: int = 0) -> list[int]:
    tokens = random.Random(seed)
    return list(range(shared)) + [tokens.randrange(1000) for _ in range(num_tokens - shared)]


def choose(
    to: _core.Router, tokens: list[int], max_new_tokens: int = 0, tenant: str = ""
) -> _core.Route | None:
    return to.choose(
        hash_blocks(tokens, BLOCK), len(tokens), max_new_tokens=max_new_tokens, tenant=tenant
    )


def test_hashes_of_blocks_are_chained_and_full_ones_only() -> None:
    tokens = prompt(1, 40)
    hashes = hash_blocks(tokens, BLOCK)
    assert len(hashes) == 2 * 32
    assert hash_blocks(tokens[:32], BLOCK) == hashes
    assert hash_blocks(tokens[16:32], BLOCK) != hashes[32:]  # another chain
    assert hash_blocks(tokens, BLOCK, "tenant") != hashes
    assert hash_text_blocks(b"abcdefgh", 4) == hash_blocks([*b"abcdefgh"], 4)


def test_a_prompt_goes_where_its_prefix_is_until_the_queue_costs_more_than_it_saves() -> None:
    to = router()
    for name in "ab":
        to.add_replica(name)
    tokens = prompt(1, 320)
    assert to.apply(1, 1, [("stored", hash_blocks(tokens, BLOCK))])
    replicas = []
    for seed in range(12):
        route = choose(to, tokens[:288] + prompt(seed, 32))
        assert route is not None
        assert route.num_cached_tokens == (288 if route.replica == 1 else 0)
        replicas.append(route.replica)
    # 32 tokens of work each at b, 320 at a: b is ahead until it has ten of them.
    assert replicas[:9] == [1] * 9
    assert 0 in replicas[9:]


def test_the_last_token_of_a_prompt_runs_though_all_of_it_is_cached() -> None:
    to = router()
    to.add_replica("a")
    tokens = prompt(1, 32)
    to.apply(0, 1, [("stored", hash_blocks(tokens, BLOCK))])
    route = choose(to, tokens)
    assert route is not None
    assert route.num_cached_tokens == 31


def test_requests_that_come_together_do_not_all_go_to_one_replica() -> None:
    to = router()
    for name in "abcd":
        to.add_replica(name)
    replicas = [choose(to, prompt(seed, 64)) for seed in range(40)]
    counts = Counter(route.replica for route in replicas if route is not None)
    assert counts == {0: 10, 1: 10, 2: 10, 3: 10}


def test_work_is_given_back_as_answers_come_and_end() -> None:
    to = router(decode_work=0.5)
    to.add_replica("a")
    first = choose(to, prompt(1, 100), max_new_tokens=20)
    assert first is not None
    (load,) = to.loads()
    assert (load.prefill_work, load.decode_work, load.num_tokens) == (100, 10, 120)
    to.started(first.id)
    to.grew(first.id, 6)
    (load,) = to.loads()
    assert (load.prefill_work, load.decode_work, load.num_requests) == (0, 7, 1)
    to.grew(first.id, 1000)  # more than was asked for
    assert to.loads()[0].decode_work == 0
    to.finish(first.id)
    to.finish(first.id)  # twice is once
    (load,) = to.loads()
    assert (load.num_requests, load.num_tokens, load.decode_work) == (0, 0, 0)
    assert load.num_routed == 1


def test_long_prompts_count_their_attention() -> None:
    to = router(attention_tokens=1000.0)
    to.add_replica("a")
    choose(to, prompt(1, 2000))
    assert to.loads()[0].prefill_work == pytest.approx(2000 + 2000 * 2001 / 2 / 1000)


def test_a_faster_replica_gets_more() -> None:
    to = router()
    to.add_replica("slow")
    to.add_replica("fast", speed=3.0)
    routes = [choose(to, prompt(seed, 64)) for seed in range(40)]
    counts = Counter(route.replica for route in routes if route is not None)
    assert counts[1] == 30


def test_a_missed_batch_of_events_asks_for_a_snapshot() -> None:
    to = router()
    to.add_replica("a")
    tokens = prompt(1, 64)
    hashes = hash_blocks(tokens, BLOCK)
    assert to.apply(0, 1, [("stored", hashes[:64])])
    assert not to.apply(0, 3, [("removed", hashes[32:64])])  # 2 is missing
    assert to.loads()[0].num_blocks == 2
    to.restore(0, 3, hashes[:32])
    assert to.loads()[0].num_blocks == 1
    assert to.apply(0, 3, [("stored", hashes)])  # that is in the snapshot already
    assert to.loads()[0].num_blocks == 1
    assert to.apply(0, 4, [("stored", hashes), ("cleared", b""), ("stored", hashes[:96])])
    assert to.loads()[0].num_blocks == 3


def test_a_replica_that_tells_nothing_is_assumed_to_keep_what_it_got_last() -> None:
    to = router()
    to.add_replica("a", assumed_blocks=6)
    to.add_replica("b", assumed_blocks=6)
    first, second, third = (prompt(seed, 64) for seed in range(3))  # 4 blocks each
    places = {}
    for name, tokens in (("first", first), ("second", second)):
        route = choose(to, tokens)
        assert route is not None
        places[name] = route.replica
        to.finish(route.id)
    again = choose(to, first)
    assert again is not None
    assert (again.replica, again.num_cached_tokens) == (places["first"], 63)
    to.finish(again.id)
    to.set_ready(1 - places["first"], False)
    other = choose(to, third)  # pushes two of the first prompt's blocks out, its last ones
    assert other is not None
    to.finish(other.id)
    again = choose(to, first)
    assert again is not None
    assert again.num_cached_tokens == 32


def test_who_is_not_ready_or_excluded_or_full_gets_nothing() -> None:
    to = router()
    a, b = (to.add_replica(name, max_tokens=100) for name in "ab")
    to.set_ready(a, False)
    first = choose(to, prompt(1, 60))
    assert first is not None
    assert first.replica == b
    assert choose(to, prompt(2, 60)) is None  # b has 40 left
    to.set_ready(a, True)
    second = choose(to, prompt(2, 60))
    assert second is not None
    assert second.replica == a
    assert to.choose(b"", 10, excluded=[a, b]) is None
    only = to.choose(b"", 10, excluded=[a])
    assert only is not None
    assert only.replica == b


def test_a_replica_that_dies_gives_its_requests_back_and_its_place() -> None:
    to = router()
    a = to.add_replica("a")
    to.apply(a, 1, [("stored", hash_blocks(prompt(1, 64), BLOCK))])
    routes = [choose(to, prompt(seed, 64)) for seed in range(3)]
    assert to.remove_replica(a) == [route.id for route in routes if route is not None]
    assert to.loads() == []
    assert choose(to, prompt(1, 64)) is None
    to.finish(routes[0].id)  # an answer that was on its way
    assert to.add_replica("a") == a
    again = choose(to, prompt(1, 64))
    assert again is not None
    assert again.num_cached_tokens == 0
    with pytest.raises(InvalidArgument, match="no replica 7"):
        to.remove_replica(7)


def test_a_tenant_has_its_share_only_while_others_are_there() -> None:
    to = router(max_tenant_share=0.5)
    to.add_replica("a", max_tokens=1000)
    mine = [choose(to, prompt(seed, 100), tenant="mine") for seed in range(8)]
    assert all(mine)  # nobody else
    other = choose(to, prompt(9, 100), tenant="other")
    assert other is not None
    assert choose(to, prompt(10, 100), tenant="mine") is None
    to.finish(other.id)
    assert choose(to, prompt(10, 100), tenant="mine") is not None


def test_policies_to_compare_with() -> None:
    assert [name for name, _ in _core.supported_router_policies()] == [
        "prefix",
        "power_of_two",
        "round_robin",
    ]
    turns = router(policy="round_robin")
    for name in "abc":
        turns.add_replica(name)
    routes = [choose(turns, prompt(seed, 10 + 500 * (seed % 3))) for seed in range(6)]
    assert [route.replica for route in routes if route is not None] == [0, 1, 2, 0, 1, 2]

    def drawn(seed: int) -> list[int]:
        to = router(policy="power_of_two", seed=seed)
        for name in "abcdefgh":
            to.add_replica(name)
        routes = [choose(to, prompt(i, 64)) for i in range(400)]
        return [route.replica for route in routes if route is not None]

    assert drawn(1) == drawn(1) != drawn(2)
    counts = Counter(drawn(1))
    assert max(counts.values()) - min(counts.values()) < 8  # at random it is about 25


def test_shared_prefixes_gather_and_no_replica_is_left_idle() -> None:
    """Forty conversations of eight turns on four replicas: nine of ten tokens that one cache would
    have had are found, and the busiest replica has at most a half more than its part."""
    to = router()
    for name in "abcd":
        to.add_replica(name, assumed_blocks=4000)
    source = random.Random(3)
    talks = [prompt(seed, 200) for seed in range(40)]
    possible = 0
    work: Counter[int] = Counter()
    for turn in range(8):
        under_way = []
        for tokens in source.sample(talks, len(talks)):
            if turn:
                possible += (len(tokens) - 50) // BLOCK * BLOCK
            route = choose(to, tokens, max_new_tokens=20)
            assert route is not None
            work[route.replica] += len(tokens) - route.num_cached_tokens
            under_way.append(route)
            if len(under_way) > 12:
                to.finish(under_way.pop(0).id)
        for route in under_way:
            to.finish(route.id)
        for i, tokens in enumerate(talks):
            tokens.extend(prompt(1000 * turn + i, 50))
    hits = sum(load.num_hit_tokens for load in to.loads())
    assert hits / possible > 0.9
    assert max(work.values()) < 1.5 * sum(work.values()) / 4


def test_prompts_are_balanced_by_their_attention() -> None:
    lengths = [6000, 2000, 6000, 2000, 2000, 2000]
    workers = _core.balance_prompts(lengths, 2)
    loads = [0, 0]
    for worker, length in zip(workers, lengths, strict=True):
        loads[worker] += _core.attention_dot_products(length)
    assert loads == [22_005_000, 22_005_000]
    in_turn = sum(_core.attention_dot_products(n) for n in lengths[::2])
    assert in_turn == 38_007_000
    assert _core.balance_prompts([], 3) == []
    for arguments, named in (([[1], 0], "num_workers"), ([[-1], 1], "0 to")):
        with pytest.raises(InvalidArgument, match=named):
            _core.balance_prompts(*arguments)


def test_choosing_from_many_threads_loses_no_reservation() -> None:
    to = router()
    for name in "abcd":
        to.add_replica(name)

    def run(seed: int) -> None:
        for i in range(300):
            route = choose(to, prompt(seed * 1000 + i, 40), max_new_tokens=8)
            assert route is not None
            to.started(route.id)
            to.grew(route.id, 8)
            to.finish(route.id)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loads = to.loads()
    assert sum(load.num_routed for load in loads) == 2400
    assert all((x.num_requests, x.num_tokens, x.prefill_work) == (0, 0, 0) for x in loads)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"policy": "best"}, "policy must be one of prefix"),
        ({"block_size": 0}, "block_size"),
        ({"attention_tokens": 0.0}, "attention_tokens"),
        ({"decode_work": float("nan")}, "decode_work"),
        ({"max_tenant_share": 0.0}, "max_tenant_share"),
    ],
)
def test_a_config_that_means_nothing_is_refused(config: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        _core.Router(RouterConfig(**config))


def test_replicas_that_mean_nothing_are_refused() -> None:
    to = router()
    to.add_replica("a")
    for arguments, named in (
        ({"name": "a"}, "already"),
        ({"name": ""}, "name"),
        ({"name": "b", "speed": 0.0}, "speed"),
        ({"name": "b", "max_tokens": -1}, "max_tokens"),
        ({"name": "b", "assumed_blocks": -1}, "assumed_blocks"),
    ):
        with pytest.raises(InvalidArgument, match=named):
            to.add_replica(**arguments)  # type: ignore[arg-type]
    for i in range(255):
        to.add_replica(f"r{i}")
    with pytest.raises(ResourceExhausted, match="256"):
        to.add_replica("one more")
    with pytest.raises(InvalidArgument, match="32 bytes"):
        to.choose(b"x", 1)
    with pytest.raises(InvalidArgument, match="stored"):
        to.apply(0, 1, [("gone", b"")])
