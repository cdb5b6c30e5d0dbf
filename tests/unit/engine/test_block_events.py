"""What an engine tells of its prefix cache: batches without gaps, or a snapshot."""

from __future__ import annotations

import random
import time

import pytest
from engine_requests import add_request
from llmserve import _core, _core_testing

VOCAB = 16
BLOCK = 8
NUM_BLOCKS = 64
DEADLINE_S = 30.0


@pytest.fixture(params=[1, 2], ids=["in turn", "a step ahead"])
def engine(request: pytest.FixtureRequest) -> _core.Engine:
    config = _core.EngineConfig(
        cache=_core.CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK),
        scheduler=_core.SchedulerConfig(
            max_model_len=256, max_num_batched_tokens=64, max_num_seqs=4
        ),
    )
    options = _core_testing.OracleOptions(vocab_size=VOCAB, max_in_flight=request.param)
    return _core_testing.oracle_engine(config, options)


def run(engine: _core.Engine, rng: random.Random, count: int) -> None:
    """Some requests to their ends, of which many share a beginning."""
    open_ids = set()
    for _ in range(count):
        prompt = [rng.randrange(2)] * (BLOCK * rng.randint(1, 6))
        prompt += [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))]
        params = _core.SamplingParams(detokenize=False, max_tokens=rng.randint(1, 30))
        open_ids.add(add_request(engine, prompt, params))
    deadline = time.monotonic() + DEADLINE_S
    while open_ids:
        assert time.monotonic() < deadline
        open_ids -= {e.request_id for e in engine.wait_events(0.1) if e.is_request_finished}


class Listener:
    """A router of one replica, and the blocks that it should think the replica has."""

    def __init__(self, engine: _core.Engine) -> None:
        self.engine = engine
        self.router = _core.Router(_core.RouterConfig(block_size=BLOCK))
        self.router.add_replica("a")
        self.sequence = 0
        self.blocks: set[bytes] = set()
        self.num_snapshots = self.num_batches = 0

    def catch_up(self) -> None:
        batches = self.engine.block_events(self.sequence)
        if batches is None:
            self.sequence, hashes = self.engine.block_snapshot()
            self.router.restore(0, self.sequence, hashes)
            self.blocks = split(hashes)
            self.num_snapshots += 1
            return
        for sequence, events in batches:
            assert sequence == self.sequence + 1
            assert self.router.apply(0, sequence, events)
            self.sequence = sequence
            self.num_batches += 1
            for kind, hashes in events:
                if kind == "cleared":
                    self.blocks.clear()
                elif kind == "stored":
                    assert not self.blocks & split(hashes)
                    self.blocks |= split(hashes)
                else:
                    assert split(hashes) <= self.blocks
                    self.blocks -= split(hashes)

    def check(self) -> None:
        assert self.blocks == split(self.engine.block_snapshot()[1])
        assert self.router.loads()[0].num_blocks == len(self.blocks)


def split(hashes: bytes) -> set[bytes]:
    return {hashes[i : i + 32] for i in range(0, len(hashes), 32)}


def test_a_listener_knows_what_the_engine_holds_after_random_work(engine: _core.Engine) -> None:
    rng = random.Random(1)
    often, seldom = Listener(engine), Listener(engine)
    for turn in range(120):
        run(engine, rng, rng.randint(1, 6))
        if turn % 10 == 9:
            engine.reset_prefix_cache()
            run(engine, rng, 1)
        often.catch_up()
        often.check()
        if turn % 23 == 0:  # more has happened than is kept
            seldom.catch_up()
            seldom.check()
    assert often.num_snapshots == 1
    assert often.num_batches > 300
    assert seldom.num_snapshots >= 4
    assert engine.metrics().prefix_cache_evictions > NUM_BLOCKS
    engine.close()


def test_a_block_that_was_told_is_found(engine: _core.Engine) -> None:
    listener = Listener(engine)
    listener.catch_up()
    prompt = list(range(VOCAB)) * 4
    add_request(engine, prompt, _core.SamplingParams(detokenize=False, max_tokens=1))
    while not any(event.is_request_finished for event in engine.wait_events(0.1)):
        pass
    listener.catch_up()  # the last event comes after what it says of the cache
    assert listener.blocks == split(_core.hash_blocks(prompt, BLOCK))
    route = listener.router.choose(_core.hash_blocks(prompt, BLOCK), len(prompt))
    assert route is not None
    assert route.num_cached_tokens == len(prompt) - 1  # the last one runs
    engine.close()


def test_nothing_is_noted_without_a_listener(engine: _core.Engine) -> None:
    rng = random.Random(2)
    run(engine, rng, 8)
    assert engine.block_events(0) is None
    sequence, hashes = engine.block_snapshot()
    assert len(hashes) > 0
    assert engine.block_events(0) is None
    assert engine.block_events(sequence) == []
    while engine.metrics().prefix_cache_evictions < 12 * NUM_BLOCKS:  # and nobody asks
        run(engine, rng, 8)
    assert engine.block_events(sequence) is None
    assert engine.block_events(10**9) is None
    later, _ = engine.block_snapshot()
    assert later > sequence
    assert engine.block_events(later - 1) is None  # what came between was not noted
    assert engine.block_events(later) == []
    engine.close()


def test_a_sleeping_engine_holds_nothing(engine: _core.Engine) -> None:
    run(engine, random.Random(3), 4)
    listener = Listener(engine)
    listener.catch_up()
    assert listener.blocks
    engine.sleep(1)
    listener.catch_up()
    assert not listener.blocks
    assert listener.num_snapshots == 1
    engine.close()
