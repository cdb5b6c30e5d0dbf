"""Random operations on the scheduler: no block is lost, and every token is known in advance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from beam_reference import search
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from llmserve import _core, errors
from llmserve import _core_testing as testing
from scripted import VOCAB_SIZE, Runner, expected_tokens

NUM_BLOCKS = 9
BLOCK_SIZE = 2
POLICIES = [name for name, _ in _core.supported_policies()]


@dataclass(frozen=True, slots=True)
class Asked:
    prompt: list[int]
    n: int
    max_tokens: int
    seed: int
    beam_width: int = 0  # 0: not a beam search
    is_pooled: bool = False
    has_drafter: bool = False


def longest_sequence(num_blocks: int, windows: list[int], chunk: int) -> int:
    manager = testing.KvCacheManager(num_blocks, BLOCK_SIZE, windows=windows, max_step_tokens=chunk)
    lengths = range(1, num_blocks * BLOCK_SIZE + 1)
    return max(length for length in lengths if manager.num_blocks_for(length) <= num_blocks)


class Workload:
    """Operations on the real scheduler, and what must come out of them."""

    def __init__(
        self,
        policy: str,
        *,
        chunk: int,
        caching: bool,
        windows: list[int],
        max_in_flight: int,
        max_stall_us: int = 0,
        min_spread_tokens: int = 0,
    ) -> None:
        num_blocks = NUM_BLOCKS * len(windows)
        self.capacity = longest_sequence(num_blocks, windows, chunk)
        self.runner = Runner(
            num_blocks=num_blocks,
            windows=windows,
            block_size=BLOCK_SIZE,
            policy=policy,
            max_num_seqs=3,
            max_num_batched_tokens=chunk,
            enable_prefix_caching=caching,
            max_batch_delay_us=50,
            max_in_flight=max_in_flight,
            max_stall_us=max_stall_us,
            min_spread_tokens=min_spread_tokens,
            us_per_token=7,
        )
        self.asked: dict[int, Asked] = {}
        self.next_id = 0
        self.cut_short: set[int] = set()

    def add(self, prompt: list[int], n: int, max_tokens: int, **params: Any) -> None:
        beam_width, is_pooled = params.get("beam_width", 0), params.get("is_pooled", False)
        has_drafter = params.get("has_drafter", False)
        asked = Asked(prompt, n, max_tokens, params["seed"], beam_width, is_pooled, has_drafter)
        try:
            self.runner.add(self.next_id, prompt, n=n, max_tokens=max_tokens, **params)
        except errors.ResourceExhausted:
            assert len(prompt) + (not is_pooled) > self.capacity
            return
        self.asked[self.next_id] = asked
        self.next_id += 1

    def step(self) -> None:
        self.runner.scheduler.advance_us(10)
        step = self.runner.step()
        assert all(count > 0 for *_, count in step.sequences)
        assert step.num_tokens == sum(count for *_, count in step.sequences)

    def draft(self, count: int, wrong_at: int, num_behind: int) -> None:
        """Guesses for all that have a drafter: right up to a place, or of another place."""
        for record in self.runner.scheduler.sequences():
            asked = self.asked[record.request_id]
            if not asked.has_drafter:
                continue
            num_generated = len(record.token_ids) - len(asked.prompt)
            known = expected_tokens(
                asked.prompt,
                num_generated + count,
                seed=asked.seed,
                sample_index=record.sample_index,
            )
            guess = [id + (i == wrong_at) for i, id in enumerate(known[num_generated:])]
            testing.draft_ready(
                self.runner.scheduler,
                record.request_id,
                record.sample_index,
                len(record.token_ids) - num_behind,
                guess,
            )

    def lose_rank(self) -> None:
        self.runner.flights.clear()
        self.runner.model.forget()
        testing.rank_lost(self.runner.scheduler, 0)
        self.runner.take(self.runner.scheduler.take_events())

    def abort(self, request_id: int) -> None:
        if request_id in self.asked:
            if request_id not in self.runner.finished_requests:
                self.cut_short.add(request_id)
            self.runner.scheduler.abort(request_id)
            self.runner.take(self.runner.scheduler.take_events())

    def abort_in_step(self, request_id: int) -> None:
        plan = self.runner.scheduler.schedule()
        if request_id in self.asked and request_id not in self.runner.finished_requests:
            self.cut_short.add(request_id)
        self.runner.scheduler.abort(request_id)
        self.runner.flights.append(self.runner.model.execute(plan))
        self.runner.finish_steps()

    def fail(self) -> None:
        self.cut_short |= self.asked.keys() - set(self.runner.finished_requests)
        self.runner.flights.clear()
        self.runner.scheduler.fail("asked to")
        self.runner.take(self.runner.scheduler.take_events())
        assert not self.runner.scheduler.has_unfinished()

    def fail_step(self) -> None:
        plan = self.runner.scheduler.schedule()
        self.runner.model.execute(plan)
        self.cut_short |= {sequence.request_id for sequence in plan.sequences}
        if self.runner.flights:  # the requests of the step before as well
            self.cut_short |= self.asked.keys() - set(self.runner.finished_requests)
        failed = {sequence.request_id for sequence in plan.sequences}
        self.runner.flights.clear()
        self.runner.scheduler.fail_step("asked to")
        self.runner.take(self.runner.scheduler.take_events())
        assert failed & self.asked.keys() <= set(self.runner.finished_requests)

    def finish(self) -> None:
        """Everything ends within bounded steps, with the tokens that are known in advance."""
        num_steps = 0
        while self.runner.scheduler.has_unfinished():
            num_steps += 1
            assert num_steps < 5_000, "no progress"
            self.step()
        self.runner.check()
        assert sorted(self.runner.finished_requests) == sorted(self.asked)
        for request_id, asked in self.asked.items():
            if asked.beam_width:
                self.check_beams(request_id, asked)
            elif asked.is_pooled:
                self.check_pooled(request_id)
            else:
                for i in range(asked.n):
                    self.check_output(request_id, i, asked)
        self.check_prompt_tokens()
        self.asked.clear()
        self.cut_short.clear()
        self.runner.outputs.clear()
        self.runner.finished_requests.clear()

    def check_prompt_tokens(self) -> None:
        """Each prompt token was found, or computed once, whatever was computed again."""
        metrics = self.runner.scheduler.metrics()
        first = metrics.num_prefill_tokens - metrics.num_recomputed_tokens
        if self.cut_short:  # some prompts have not run to their end
            assert metrics.prefix_cache_hits + first <= metrics.num_prompt_tokens
        else:
            assert metrics.prefix_cache_hits + first == metrics.num_prompt_tokens

    def check_pooled(self, request_id: int) -> None:
        output = self.runner.outputs[request_id, 0]
        assert output.token_ids == []
        assert (output.events[-1].pooled is not None) == (output.finish_reason == "stop")
        assert output.finish_reason == "stop" or request_id in self.cut_short

    def check_beams(self, request_id: int, asked: Asked) -> None:
        outputs = [o for (id_, _), o in sorted(self.runner.outputs.items()) if id_ == request_id]
        reasons = {output.finish_reason for output in outputs}
        if reasons == {"length"}:
            found = search(_next_tokens, asked.prompt, asked.beam_width, asked.max_tokens)
            assert [output.token_ids for output in outputs] == [beam.tokens for beam in found]
        elif request_id not in self.cut_short:
            assert reasons == {"error"}
            assert len(asked.prompt) + asked.max_tokens > self.capacity + 1
        assert len(reasons) == 1

    def check_output(self, request_id: int, sample_index: int, asked: Asked) -> None:
        output = self.runner.outputs[request_id, sample_index]
        known = expected_tokens(
            asked.prompt, asked.max_tokens, seed=asked.seed, sample_index=sample_index
        )
        assert output.token_ids == known[: len(output.token_ids)]
        if output.finish_reason == "length":
            assert len(output.token_ids) == asked.max_tokens
        elif output.finish_reason == "error" and request_id not in self.cut_short:
            num_tokens = len(asked.prompt) + len(output.token_ids)
            assert num_tokens == self.capacity + 1
        else:
            assert request_id in self.cut_short


def _next_tokens(context: list[int], count: int) -> list[tuple[int, float]]:
    found: list[tuple[int, float]] = testing.ShadowModel.top_logprobs(context, VOCAB_SIZE, count)
    return found


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=NUM_BLOCKS * BLOCK_SIZE + 1)
REQUEST_IDS = st.integers(0, 60)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(POLICIES),
        chunk=st.sampled_from([3, 5, 64]),
        caching=st.booleans(),
        windows=st.sampled_from([[0], [0, 3], [0, 4, 0, 1]]),
        max_in_flight=st.sampled_from([1, 2]),
        max_stall_us=st.sampled_from([0, 100]),
        min_spread_tokens=st.sampled_from([0, 2]),
    )
    def start(self, policy: str, **config: Any) -> None:
        self.load = Workload(policy, **config)

    @rule(
        prompt=PROMPTS,
        n=st.integers(1, 4),
        max_tokens=st.integers(1, 12),
        seed=st.integers(0, 3),
        priority=st.integers(0, 2),
        cache_salt=st.sampled_from(["", "x"]),
        is_streamed=st.booleans(),
        has_drafter=st.booleans(),
    )
    def add(self, prompt: list[int], n: int, max_tokens: int, **params: Any) -> None:
        self.load.add(prompt, n, max_tokens, **params)
        self.load.runner.check()

    @rule(prompt=PROMPTS, beam_width=st.integers(1, 4), max_tokens=st.integers(1, 6))
    def add_beam_search(self, prompt: list[int], beam_width: int, max_tokens: int) -> None:
        self.load.add(prompt, 1, max_tokens, seed=0, beam_width=beam_width)
        self.load.runner.check()

    @rule(prompt=PROMPTS)
    def add_pooled(self, prompt: list[int]) -> None:
        self.load.add(prompt, 1, 1, seed=0, is_pooled=True)
        self.load.runner.check()

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.load.step()
            self.load.runner.check()

    @rule(
        count=st.integers(1, 4),
        wrong_at=st.integers(0, 5),
        num_behind=st.sampled_from([0, 0, 0, 1, 2]),
        num_steps=st.integers(1, 3),
    )
    def draft_and_step(self, count: int, wrong_at: int, num_behind: int, num_steps: int) -> None:
        for _ in range(num_steps):
            self.load.draft(count, wrong_at, num_behind)
            self.load.step()
            self.load.runner.check()

    @rule()
    def lose_rank(self) -> None:
        self.load.lose_rank()
        self.load.runner.check()

    @rule(request_id=REQUEST_IDS)
    def abort(self, request_id: int) -> None:
        self.load.abort(request_id)
        self.load.runner.check()

    @rule(request_id=REQUEST_IDS)
    def abort_in_step(self, request_id: int) -> None:
        self.load.abort_in_step(request_id)
        self.load.runner.check()

    @rule(request_id=REQUEST_IDS)
    def preempt(self, request_id: int) -> None:
        self.load.runner.finish_steps()
        self.load.runner.scheduler.preempt(request_id)
        self.load.runner.check()

    @rule()
    def reset(self) -> None:
        self.load.runner.scheduler.reset_prefix_cache()
        self.load.runner.check()

    @rule()
    def fail(self) -> None:
        self.load.fail()
        self.load.runner.check()

    @rule()
    def fail_step(self) -> None:
        self.load.fail_step()
        self.load.runner.check()

    def teardown(self) -> None:
        if hasattr(self, "load"):
            self.load.finish()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=120, stateful_step_count=50, deadline=None, derandomize=True, database=None
)


CASES = [
    {"policy": policy, **config}
    for policy in POLICIES
    for config in (
        {"max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 64, "forge_collisions": True},
        {"max_num_batched_tokens": 5, "enable_prefix_caching": False},
        {"num_blocks": 40, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 16},
        {"num_blocks": 14, "max_num_batched_tokens": 5, "windows": [0, 4]},
        {"num_blocks": 27, "max_num_batched_tokens": 64, "windows": [0, 3, 0, 7]},
    )
]
CASES += [
    {"policy": policy, "max_num_batched_tokens": 5, **config}
    for policy in ("fcfs", "priority")
    for config in (
        {"percent_drafted": 60},
        {"percent_drafted": 60, "num_blocks": 14, "windows": [0, 4]},
        {"percent_drafted": 40, "num_lower_blocks": 12},
        {"num_blocks": 14, "windows": [0, 4], "num_lower_blocks": 30},
        {"num_blocks": 14, "windows": [0, 4], "num_lower_blocks": 30, "percent_drafted": 60},
        {"num_state_slots": 8},
        {"num_state_slots": 6, "num_lower_blocks": 20},
        {"num_state_slots": 6, "num_lower_blocks": 30, "num_blocks": 14, "windows": [0, 4]},
        {"percent_handed_over": 80},
        {"percent_handed_over": 80, "num_blocks": 14, "windows": [0, 4]},
        {"percent_handed_over": 60, "num_lower_blocks": 12, "percent_drafted": 30},
        {"percent_late_masks": 30, "percent_drafted": 60},
        {"percent_late_masks": 30, "percent_drafted": 60, "num_blocks": 14, "windows": [0, 4]},
        {"percent_late_masks": 10, "percent_drafted": 50, "num_lower_blocks": 12},
    )
]
ALONE = list(CASES)
CASES += [{**case, "max_in_flight": 2} for case in ALONE]
CASES += [
    {**case, "max_in_flight": 2 + i % 3, "runs_ahead": False} for i, case in enumerate(ALONE[::2])
]
# Far below the bound that the soak itself enforces, far above what is seen.
MAX_STALL_STEPS = 500


def soak(case: dict[str, Any], seed: int, num_operations: int) -> None:
    """Random operations in C++, checked after each; then that all that can happen did."""
    counts = testing.soak_scheduler(num_operations, seed=seed, **case)
    assert counts["num_operations"] == num_operations
    assert counts.pop("longest_stall") < MAX_STALL_STEPS
    counts.pop("transitions")
    idle = set()
    if not case.get("enable_prefix_caching", True):
        idle = {"num_hits", "num_evictions"}
    if case.get("max_in_flight", 1) == 1 or not case.get("runs_ahead", True):
        idle |= {"num_awaited", "num_dropped"}
    if "percent_drafted" not in case:
        idle |= {"num_drafted", "num_accepted"}
    if "percent_late_masks" not in case:
        idle |= {"num_late_masks"}
    if "num_lower_blocks" not in case:
        idle |= {"num_stores", "num_loads"}
    if "percent_handed_over" not in case:
        idle |= {"num_sends", "num_receives"}
    if "num_lower_blocks" not in case and "percent_handed_over" not in case:
        idle |= {"num_broken"}
    if case.get("forge_collisions"):
        idle |= {"num_adapted"}
    if "num_state_slots" not in case:
        idle |= {"num_snapshots"}
    assert {name for name, count in counts.items() if count == 0} == idle


@pytest.mark.parametrize("case", CASES, ids=str)
def test_random_operations_lose_no_block_and_no_token(case: dict[str, Any]) -> None:
    soak(case, seed=1, num_operations=10_000)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_million_operations_lose_no_block_and_no_token(case: dict[str, Any]) -> None:
    soak(case, seed=2, num_operations=1_000_000)
