"""Prompts that are computed on one GPU and answered on another: blocks cross while steps run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from checkpoints import checkpoint
from gpu_ranks import need_gpus, plainly
from hand_over import (
    DEADLINE_S,
    ONE,
    PROMPT,
    SAMPLED,
    Paced,
    check_idle,
    failures,
    hand_over,
    hand_over_at_once,
    make_llm,
    open_both,
    run,
    wait_until,
    words,
)
from llmserve import LLM, SamplingParams
from llmserve import _core_testing as testing
from llmserve.errors import InvalidArgument
from nodes import nodes

REASON = testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]

GREEDY = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
OTHERS = [[3 + (i * 11 + j * 5) % 60 for j in range(40 + 5 * i)] for i in range(4)]


@pytest.fixture(scope="module", autouse=True)
def plain_products() -> Iterator[None]:
    yield from plainly()


@pytest.fixture
def made() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def make(made: ExitStack, family: str = "llama", **options: Any) -> LLM:
    return made.enter_context(make_llm(family, **{"device": "cuda", **options}))


# Rows of floats; codes with scales, a step at a time; values that are part of the keys.
@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"kv_cache_dtype": "bfloat16"}),
        ("llama", {"kv_cache_dtype": "fp8", "async_scheduling": False}),
        ("deepseek_v2", {}),
    ],
)
def test_tokens_are_those_of_one_engine(
    made: ExitStack, transport: str, family: str, options: dict[str, Any]
) -> None:
    sender, receiver = (make(made, family, **options) for _ in range(2))
    expected = words(run(sender, PROMPT, GREEDY))
    sender.reset_prefix_cache()
    open_both(sender, receiver, transport)
    assert words(hand_over(sender, receiver, PROMPT, GREEDY)) == expected
    assert receiver.get_metrics().num_prefill_tokens == 1
    assert receiver.get_metrics().hand_over_received_bytes > 0
    assert failures(receiver) == {}
    check_idle(sender, receiver)


@pytest.mark.parametrize(
    ("which", "ranks"),
    [("sender", {"tensor_parallel_size": 2}), ("receiver", {"pipeline_parallel_size": 2})],
)
def test_nodes_with_gpus_hand_over_what_each_of_them_has(
    monkeypatch: pytest.MonkeyPatch, made: ExitStack, which: str, ranks: dict[str, int]
) -> None:
    need_gpus(2)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    given = {
        "device": "cuda",
        "dtype": "float32",
        "max_model_len": 128,
        "num_gpu_blocks_override": 64,
        "max_num_batched_tokens": 50,
        "cluster_key": "a key of these tests",
        "distributed_timeout_seconds": 60,
        **ranks,
    }
    shared = made.enter_context(nodes(checkpoint("llama"), 2, **given))
    apart, whole = make(made, **shared), make(made)
    sender, receiver = (apart, whole) if which == "sender" else (whole, apart)
    open_both(sender, receiver, "tcp")
    for turn in range(2):
        prompt = [token + turn for token in PROMPT]
        expected = words(run(whole, prompt, GREEDY))
        whole.reset_prefix_cache()
        assert words(hand_over(sender, receiver, prompt, GREEDY)) == expected
        assert receiver.get_metrics().hand_over_received_bytes > 0
    assert failures(receiver) == {}
    check_idle(sender, receiver)


def test_steps_of_others_go_on_meanwhile(made: ExitStack) -> None:
    """Two in flight on both sides, while blocks come and go."""
    sender, receiver = (make(made) for _ in range(2))
    expected = [words(run(sender, prompt, SAMPLED)) for prompt in (PROMPT, *OTHERS)]
    sender.reset_prefix_cache()
    open_both(sender, receiver)
    got: dict[int, object] = {}

    def answer(i: int, llm: LLM) -> None:
        got[i] = words(run(llm, OTHERS[i], SAMPLED))

    threads = [
        threading.Thread(target=answer, args=(i, sender if i % 2 else receiver))
        for i in range(len(OTHERS))
    ]
    for thread in threads:
        thread.start()
    assert words(hand_over(sender, receiver, PROMPT, SAMPLED)) == expected[0]
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(len(OTHERS))] == expected[1:]
    assert failures(receiver) == {}
    check_idle(sender, receiver)


@pytest.mark.parametrize("ending", ["whole", "aborted"])
def test_blocks_come_while_the_prompt_is_computed(made: ExitStack, ending: str) -> None:
    sender, receiver = (make(made, max_num_batched_tokens=20) for _ in range(2))
    expected = words(run(receiver, PROMPT, GREEDY))
    receiver.reset_prefix_cache()
    before = receiver.get_metrics()
    open_both(sender, receiver)
    assert sender.hand_over is not None
    ticket = sender.hand_over.ticket()
    paced = Paced(sender, max_tokens=20)  # request 0

    def compute() -> None:
        with suppress(Exception):
            run(sender, PROMPT, ONE, ticket)

    computing = threading.Thread(target=compute, daemon=True)
    computing.start()
    while not sender.hand_over.has_begun(ticket):  # its second and third chunk are in flight
        paced.step()
    got: list[Any] = []
    receiving = threading.Thread(target=lambda: got.append(run(receiver, PROMPT, GREEDY, ticket)))
    receiving.start()
    wait_until(lambda: receiver.get_metrics().hand_over_received_bytes > 0)
    assert sender.get_metrics().num_prefill_tokens < len(PROMPT)
    if ending == "aborted":
        sender._open_engine().abort(1)
    paced.end()
    receiving.join(DEADLINE_S)
    assert words(got[0]) == expected
    num_computed = receiver.get_metrics().num_prefill_tokens - before.num_prefill_tokens
    assert num_computed == (1 if ending == "whole" else len(PROMPT))
    assert failures(receiver) == ({} if ending == "whole" else {"gone": 1})
    check_idle(sender, receiver)


def test_several_at_once_with_little_room(made: ExitStack) -> None:
    """More threads fetch than there are buffers, into blocks that steps have just left."""
    sender, receiver = (make(made, num_gpu_blocks_override=20) for _ in range(2))
    prompts = [[3 + (i * 11 + j * 5) % 60 for j in range(20 + 9 * i)] for i in range(6)]
    expected = [words(run(sender, prompt, GREEDY)) for prompt in prompts]
    sender.reset_prefix_cache()
    open_both(sender, receiver, timeout=1)
    assert hand_over_at_once(sender, receiver, prompts, GREEDY) == expected
    metrics = receiver.get_metrics()
    assert metrics.num_hand_overs_received + sum(failures(receiver).values()) == len(prompts)
    check_idle(receiver)


@pytest.mark.parametrize(
    ("senders", "receivers"),
    [
        ({}, {"tensor_parallel_size": 2}),
        ({"tensor_parallel_size": 2}, {}),
        ({"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}),
    ],
)
def test_engines_of_other_numbers_of_gpus_are_of_one_class(
    made: ExitStack, senders: dict[str, int], receivers: dict[str, int]
) -> None:
    need_gpus(2)
    sender, receiver = make(made, **senders), make(made, **receivers)
    expected = words(run(receiver, PROMPT, SAMPLED))
    receiver.reset_prefix_cache()
    open_both(sender, receiver)
    assert words(hand_over(sender, receiver, PROMPT, SAMPLED)) == expected
    assert failures(receiver) == {}
    check_idle(sender, receiver)


def test_a_cpu_and_a_gpu_are_of_two_classes(made: ExitStack) -> None:
    sender, receiver = make(made, device="cpu"), make(made)
    open_both(sender, receiver)
    with pytest.raises(InvalidArgument, match="it is of numerics class"):
        hand_over(sender, receiver, PROMPT, GREEDY)


def test_a_sender_that_sleeps_or_ends_is_done_without(made: ExitStack) -> None:
    receiver = make(made)
    expected = words(run(receiver, PROMPT, GREEDY))
    receiver.reset_prefix_cache()
    with make_llm(device="cuda") as sender:
        open_both(sender, receiver)
        assert sender.hand_over is not None
        ticket = sender.hand_over.ticket()
        run(sender, PROMPT, ONE, ticket)
        sender.sleep()
        assert words(run(receiver, PROMPT, GREEDY, ticket)) == expected
        assert failures(receiver) == {"gone": 1}
        sender.wake_up()
        receiver.reset_prefix_cache()
        assert words(hand_over(sender, receiver, PROMPT, GREEDY)) == expected
        assert failures(receiver) == {"gone": 1}
        receiver.reset_prefix_cache()
        ticket = sender.hand_over.ticket()
        run(sender, PROMPT, ONE, ticket)
    assert words(run(receiver, PROMPT, GREEDY, ticket)) == expected
    assert failures(receiver) == {"gone": 1, "unreachable": 1}
    check_idle(receiver)
