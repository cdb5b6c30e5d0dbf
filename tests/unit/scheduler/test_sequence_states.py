"""The table of a sequence's states: every row of it happens, and nothing that is not in it."""

from __future__ import annotations

import random
from collections import Counter

from llmserve import _core_testing as testing
from scripted import Runner

STATES = testing.sequence_states()
TRANSITIONS = testing.sequence_transitions()


def test_a_state_and_an_event_have_one_successor_and_every_state_is_reached() -> None:
    assert len({(state, event) for state, event, _ in TRANSITIONS}) == len(TRANSITIONS)
    reached = {"waiting"}
    for _ in STATES:
        reached |= {to for state, _, to in TRANSITIONS if state in reached}
    assert reached == set(STATES)


def test_nothing_happens_to_a_finished_sequence_and_everything_else_may_finish() -> None:
    assert all(state != "finished" for state, _, _ in TRANSITIONS)
    may_finish = {state for state, event, _ in TRANSITIONS if event == "finish"}
    assert may_finish == set(STATES) - {"finished"}


def beam_transitions(seed: int) -> Counter[str]:
    """Beam searches beside others in a pool that is too small for all, some of them aborted."""
    draw = random.Random(seed)
    runner = Runner(num_blocks=9, block_size=2, max_num_seqs=3, max_num_batched_tokens=5)
    for request_id in range(12):
        prompt = [draw.randrange(2) for _ in range(draw.randint(1, 6))]
        runner.add(request_id, prompt, max_tokens=draw.randint(2, 6), seed=0,
                   beam_width=draw.choice([0, 2, 3]))  # fmt: skip
        for _ in range(draw.randrange(4)):
            runner.step()
        if draw.random() < 0.3:
            runner.scheduler.abort(request_id)
            runner.take(runner.scheduler.take_events())
    runner.run()
    return Counter(testing.num_transitions(runner.scheduler))


def test_every_transition_of_the_table_happens() -> None:
    seen: Counter[str] = Counter()
    for seed in range(8):
        seen += beam_transitions(seed)
    for policy in ("fcfs", "priority"):
        counts = testing.soak_scheduler(
            10_000, policy=policy, seed=3, max_num_batched_tokens=5, num_lower_blocks=12
        )
        seen += Counter(counts["transitions"])
    assert {name for name, count in seen.items() if count > 0} == {
        f"{state} {event}" for state, event, _ in TRANSITIONS
    }
