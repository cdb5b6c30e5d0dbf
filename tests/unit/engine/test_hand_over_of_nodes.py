"""Hand-over between engines whose ranks are on several nodes: each has a part of every block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from checkpoints import checkpoint
from hand_over import (
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
from llmserve import LLM
from nodes import Node, free_port, nodes

NODES = {
    "dtype": "float32",
    "max_model_len": 128,
    "num_gpu_blocks_override": 64,
    "max_num_batched_tokens": 50,
    "num_threads": 1,
    "cluster_key": "a key of these tests",
    "distributed_timeout_seconds": 60,
}


@pytest.fixture
def made() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def make(made: ExitStack, family: str, num_nodes: int, **options: Any) -> LLM:
    if num_nodes == 1:
        return made.enter_context(make_llm(family, **options))
    given = {**NODES, **options}
    shared = made.enter_context(nodes(checkpoint(family), num_nodes, **given))
    return made.enter_context(make_llm(family, **shared))


@pytest.mark.parametrize(
    ("family", "senders", "receivers"),
    [
        ("llama", (2, {"tensor_parallel_size": 2}), (1, {})),
        ("llama", (1, {"tensor_parallel_size": 3}), (2, {"tensor_parallel_size": 4})),
        ("gemma3_text", (3, {"tensor_parallel_size": 3}), (2, {"pipeline_parallel_size": 2})),
        ("gemma3_text", (2, {"pipeline_parallel_size": 2}), (1, {"tensor_parallel_size": 2})),
        ("deepseek_v2", (2, {"tensor_parallel_size": 2}), (2, {"pipeline_parallel_size": 2})),
    ],
)
@pytest.mark.parametrize("transport", ["tcp", "local"])
def test_nodes_hand_over_what_each_of_them_has(
    made: ExitStack,
    family: str,
    senders: tuple[int, dict[str, int]],
    receivers: tuple[int, dict[str, int]],
    transport: str,
) -> None:
    one = made.enter_context(make_llm(family))
    sender = make(made, family, senders[0], **senders[1])
    receiver = make(made, family, receivers[0], **receivers[1])
    open_both(sender, receiver, transport)
    for turn in range(2):
        prompt = [token + turn for token in PROMPT]
        expected = words(run(one, prompt, SAMPLED))
        assert words(hand_over(sender, receiver, prompt, SAMPLED)) == expected
        assert receiver.get_metrics().num_prefill_tokens == turn + 1
        if turn == 0:
            for llm in (sender, receiver):
                llm.sleep(1)
                llm.wake_up()
    assert failures(receiver) == {}
    check_idle(sender, receiver)


@pytest.mark.parametrize("which", ["sender", "receiver"])
def test_a_node_that_goes_before_its_blocks_are_asked_for_costs_no_token(
    made: ExitStack, which: str
) -> None:
    one = made.enter_context(make_llm())
    path = checkpoint("llama")
    given = {**NODES, "tensor_parallel_size": 2, "nnodes": 2, "master_port": free_port()}
    other = Node(path, {**given, "node_rank": 1})
    made.callback(lambda: other.stop())
    apart = made.enter_context(make_llm(**given))
    whole = made.enter_context(make_llm())
    sender, receiver = (apart, whole) if which == "sender" else (whole, apart)
    open_both(sender, receiver, timeout=2, lease=4)
    expected = words(run(one, PROMPT, SAMPLED))
    assert sender.hand_over is not None
    ticket = sender.hand_over.ticket()
    run(sender, PROMPT, ONE, ticket)
    other.stop()
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(words(run(receiver, PROMPT, SAMPLED, ticket)))
    )
    asking.start()
    wait_until(lambda: failures(receiver))
    other = Node(path, {**given, "node_rank": 1})
    asking.join(60)
    assert answers == [expected]
    # And again, as if nothing had been.
    later = [token + 1 for token in PROMPT]
    assert words(hand_over(sender, receiver, later, SAMPLED)) == words(run(one, later, SAMPLED))
    check_idle(sender, receiver)
