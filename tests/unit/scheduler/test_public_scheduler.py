"""llmserve.Scheduler on its own: what a notebook or a simulator sees of it."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from llmserve import (
    InvalidArgument,
    SamplingParams,
    Scheduler,
    Tokenizer,
    demo_model_path,
    ops,
)


def run_step(scheduler: Scheduler, token_id: int = 1) -> list[int]:
    """One step in which every draw gives `token_id`; the ids of the requests that ran."""
    plan = scheduler.schedule()
    scheduler.commit([token_id] * len(plan.logit_rows))
    return [sequence.request_id for sequence in plan.sequences]


def test_a_request_runs_from_prompt_to_end() -> None:
    scheduler = Scheduler(num_blocks=4, block_size=4)
    scheduler.add(7, [1, 2, 3, 4, 5], SamplingParams(max_tokens=2, seed=3))
    plan = scheduler.schedule()
    (sequence,) = plan.sequences
    assert sequence.token_ids == [1, 2, 3, 4, 5]
    assert sequence.start_position == 0
    assert sequence.is_prefill
    (row,) = plan.logit_rows
    assert (row.sequence_idx, row.token_offset, row.seed, row.position) == (0, 4, 3, 5)
    assert [(d.request_id, d.kind, d.detail) for d in plan.decisions] == [
        (7, "admitted", 0),
        (7, "scheduled", 5),
    ]
    (running,) = scheduler.sequences()
    assert (running.state, running.num_computed, running.num_scheduled) == ("running", 0, 5)
    assert running.block_table == sequence.block_table
    assert scheduler.metrics().num_blocks_used == 2
    (event,) = scheduler.commit([9])
    assert (event.request_id, event.token_ids, event.finish_reason) == (7, [9], None)
    plan = scheduler.schedule()
    assert (plan.sequences[0].token_ids, plan.sequences[0].is_prefill) == ([9], False)
    (event,) = scheduler.commit([8])
    assert (event.token_ids, event.finish_reason) == ([8], "length")
    assert not scheduler.has_unfinished()
    scheduler.check_integrity()


def test_a_plan_and_its_parts_may_be_kept() -> None:
    scheduler = Scheduler(num_blocks=64)
    scheduler.add(0, list(range(100)), SamplingParams(max_tokens=200, ignore_eos=True))
    plan = scheduler.schedule()
    sequence, decision = plan.sequences[0], plan.decisions[0]
    table = sequence.block_table
    for _ in range(150):  # tokens and blocks are appended, and their vectors move
        scheduler.commit([1])
        last = scheduler.schedule()
    del plan
    gc.collect()
    assert sequence.token_ids == list(range(100))
    assert sequence.block_table == table
    assert decision.kind == "admitted"
    assert last.sequences[0].start_position == 249


def test_tokens_go_in_as_arrays_too() -> None:
    scheduler = Scheduler(num_blocks=4)
    scheduler.add(0, np.array([5, 6]), SamplingParams(n=2))
    scheduler.schedule()
    events = scheduler.commit(ops.sample(np.eye(2, dtype=np.float32), temperature=0.0))
    assert [event.token_ids for event in events] == [[0], [1]]
    scheduler.schedule()
    with pytest.raises(InvalidArgument, match=r"expected 2 token ids, .* got 1"):
        scheduler.commit([3])
    with pytest.raises(InvalidArgument, match="commit must be an integer, got 'a'"):
        scheduler.commit(["a", "b"])
    assert [event.token_ids for event in scheduler.commit((3, 4))] == [[3], [4]]


def test_policies_go_by_name_and_differ() -> None:
    steps = {}
    for policy in ("fcfs", "static"):
        scheduler = Scheduler(num_blocks=64, policy=policy, max_num_seqs=2)
        for request_id, max_tokens in enumerate((1, 6, 5, 1)):
            scheduler.add(request_id, [1, 2, 3], SamplingParams(max_tokens=max_tokens))
        steps[policy] = []
        while scheduler.has_unfinished():
            steps[policy].append(run_step(scheduler))
    assert steps["fcfs"] == [[0, 1], *[[1, 2]] * 5, [3]]
    assert steps["static"] == [[0, 1], *[[1]] * 5, [2, 3], *[[2]] * 4]
    with pytest.raises(InvalidArgument, match=r"one of fcfs, priority, .*, got 'best'"):
        Scheduler(num_blocks=4, policy="best")


def test_time_passes_only_when_told() -> None:
    scheduler = Scheduler(num_blocks=8, policy="dynamic", max_num_seqs=2, max_batch_delay_us=1000)
    scheduler.advance_us(50)
    scheduler.add(0, [1])
    assert run_step(scheduler) == []
    assert (scheduler.now_us, scheduler.wake_us()) == (50, 250)
    scheduler.advance_us(200)
    assert run_step(scheduler) == [0]
    with pytest.raises(InvalidArgument, match="time never goes back, got -1 us"):
        scheduler.advance_us(-1)


def test_priorities_preemption_and_abort_are_at_hand() -> None:
    scheduler = Scheduler(num_blocks=8, policy="priority", max_num_seqs=1)
    scheduler.add(0, [1, 2], SamplingParams(max_tokens=3), priority=5)
    scheduler.add(1, [1, 2], SamplingParams(max_tokens=3), priority=1)
    assert run_step(scheduler) == [1]
    scheduler.preempt(1)
    assert [s.state for s in scheduler.sequences()] == ["waiting", "waiting"]
    assert run_step(scheduler) == [1]
    assert scheduler.sequences()[0].num_preemptions == 1
    scheduler.abort(1)
    (event,) = scheduler.take_events()
    assert (event.request_id, event.finish_reason) == (1, "abort")
    assert run_step(scheduler) == [0]


def test_copy_on_write_shows_in_the_plan() -> None:
    scheduler = Scheduler(num_blocks=8, block_size=4)
    scheduler.add(0, [1, 2, 3, 4, 5, 6], SamplingParams(n=2, max_tokens=3, ignore_eos=True))
    plan = scheduler.schedule()
    shared = plan.sequences[0].block_table
    scheduler.commit([1, 2])
    assert [scheduler.ref_count(block) for block in shared] == [2, 2]
    plan = scheduler.schedule()
    ((source, destination),) = plan.copies
    assert source == shared[1]
    tables = [sequence.block_table for sequence in plan.sequences]
    assert sorted(table[1] for table in tables) == sorted([source, destination])
    assert tables[0][0] == tables[1][0] == shared[0]


def test_with_a_tokenizer_events_have_text() -> None:
    tokenizer = Tokenizer.from_directory(demo_model_path())
    assert tokenizer is not None
    scheduler = Scheduler(num_blocks=8, tokenizer=tokenizer)
    prompt, answer = tokenizer.encode("Once"), tokenizer.encode(" upon a time")
    scheduler.add(0, prompt, SamplingParams(max_tokens=len(answer), stop=["zzz"]))
    text = ""
    for token_id in answer:
        scheduler.schedule()
        (event,) = scheduler.commit([token_id])
        text += event.text
    assert text == tokenizer.decode(answer)
    with pytest.raises(InvalidArgument, match=r"prompt_token_ids: .* below \d+, got 1000000 at 0"):
        scheduler.add(1, [1_000_000])
    scheduler.add(1, prompt)
    scheduler.schedule()
    with pytest.raises(InvalidArgument, match=r"commit: expected token ids .* got 1000000"):
        scheduler.commit([1_000_000])
    assert scheduler.commit([answer[0]])[0].token_ids == answer[:1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.commit([]), "there is no plan to commit"),
        (lambda s: s.add(0, []), "prompt is empty"),
        (lambda s: s.add(0, [-1]), "prompt_token_ids must be between 0"),
        (lambda s: s.add(0, [1], {"n": 2}), "params must be SamplingParams"),
        (lambda s: s.ref_count(99), r"block must be in \[0, 4\), got 99"),
        (lambda s: Scheduler(num_blocks=0), "num_blocks must be between 1"),
        (lambda s: Scheduler(4, max_model_len=1), "max_model_len must be between 2"),
    ],
)
def test_misuse_is_refused_and_harmless(call, message: str) -> None:
    scheduler = Scheduler(num_blocks=4)
    with pytest.raises(InvalidArgument, match=message):
        call(scheduler)
    scheduler.check_integrity()
    assert not scheduler.has_unfinished()
