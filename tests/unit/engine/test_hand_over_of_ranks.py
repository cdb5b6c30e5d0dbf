"""Hand-over between engines of several ranks, stages and replicas: blocks know nothing of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hand_over import (
    DEADLINE_S,
    ONE,
    PROMPT,
    SAMPLED,
    check_idle,
    failures,
    hand_over,
    make_llm,
    open_both,
    run,
    wait_until,
    words,
)


@pytest.fixture
def made() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(("ranks", "others"), [(1, 3), (2, 1), (3, 2), (2, 3)])
def test_engines_of_other_numbers_of_ranks_are_of_one_class(
    made: ExitStack, ranks: int, others: int
) -> None:
    one = made.enter_context(make_llm())
    sender = made.enter_context(make_llm(tensor_parallel_size=ranks))
    receiver = made.enter_context(make_llm(tensor_parallel_size=others))
    open_both(sender, receiver)
    expected = words(run(one, PROMPT, SAMPLED))
    assert words(hand_over(sender, receiver, PROMPT, SAMPLED)) == expected
    assert receiver.get_metrics().num_prefill_tokens == 1


# Of stages and ranks that cut layers and heads in other places than the other side's.
@pytest.mark.parametrize(
    ("family", "senders", "receivers"),
    [
        ("llama", {"pipeline_parallel_size": 2}, {}),
        ("llama", {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}),
        ("gemma3_text", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, {}),
        ("gemma3_text", {"tensor_parallel_size": 3}, {"pipeline_parallel_size": 2}),
        ("deepseek_v2", {}, {"pipeline_parallel_size": 2}),
    ],
)
def test_stages_exchange_blocks_of_all_their_layers(
    made: ExitStack, family: str, senders: dict[str, int], receivers: dict[str, int]
) -> None:
    one = made.enter_context(make_llm(family))
    sender = made.enter_context(make_llm(family, **senders))
    receiver = made.enter_context(make_llm(family, **receivers))
    open_both(sender, receiver)
    expected = words(run(one, PROMPT, SAMPLED))
    assert words(hand_over(sender, receiver, PROMPT, SAMPLED)) == expected
    assert receiver.get_metrics().num_prefill_tokens == 1
    assert failures(receiver) == {}
    check_idle(sender, receiver)


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
def test_of_several_replicas_any_computes_and_any_answers(made: ExitStack, transport: str) -> None:
    one = made.enter_context(make_llm())
    # Room and time enough for one of them to compute all before anything is fetched.
    sender = made.enter_context(make_llm(data_parallel_size=2, num_gpu_blocks_override=160))
    receiver = made.enter_context(make_llm(data_parallel_size=3))
    open_both(sender, receiver, transport, lease=600, timeout=60)
    prompts = [[3 + (i * 11 + j * 5) % 60 for j in range(40 + 5 * i)] for i in range(12)]
    expected = [words(run(one, prompt, SAMPLED)) for prompt in prompts]
    assert sender.hand_over is not None
    tickets = [sender.hand_over.ticket() for _ in prompts]
    got: dict[int, object] = {}

    def go(i: int) -> None:
        run(sender, prompts[i], ONE, tickets[i])
        got[i] = words(run(receiver, prompts[i], SAMPLED, tickets[i]))

    threads = [threading.Thread(target=go, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert [got[i] for i in range(len(prompts))] == expected
    assert failures(receiver) == {}
    wait_until(lambda: sender.get_metrics().num_hand_overs_sent == len(prompts))
    senders = [state.metrics.num_hand_overs_sent for state in sender.replicas()]
    receivers = [state.metrics.num_hand_overs_received for state in receiver.replicas()]
    assert all(count > 0 for count in senders + receivers)
    metrics = receiver.get_metrics()
    assert metrics.num_hand_overs_received == sum(receivers) == len(prompts)
    assert metrics.num_prefill_tokens == len(prompts)
    check_idle(sender, receiver)
    # All replicas sleep and wake together, and hand over as before.
    sender.sleep(level=1)
    sender.wake_up()
    assert words(hand_over(sender, receiver, [9, *PROMPT], SAMPLED))
    check_idle(sender, receiver)
