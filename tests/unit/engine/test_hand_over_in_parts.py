"""Blocks of a prompt go to another engine while it is being computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from hand_over import (
    DEADLINE_S,
    ONE,
    PROMPT,
    SAMPLED,
    Paced,
    check_idle,
    failures,
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


@pytest.mark.parametrize("ending", ["whole", "aborted", "closed"])
@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
def test_blocks_come_while_the_prompt_is_computed(
    made: ExitStack, transport: str, ending: str
) -> None:
    one, sender, receiver = (made.enter_context(make_llm()) for _ in range(3))
    open_both(sender, receiver, transport, timeout=0.4)
    assert sender.hand_over is not None
    ticket = sender.hand_over.ticket()
    assert not sender.hand_over.has_begun(ticket)
    paced = Paced(sender)  # request 0

    def compute() -> None:
        with suppress(Exception):
            run(sender, PROMPT, ONE, ticket)

    computing = threading.Thread(target=compute, daemon=True)
    computing.start()
    until = time.monotonic() + DEADLINE_S
    while not sender.hand_over.has_begun(ticket):  # its second chunk runs then
        assert time.monotonic() < until
        paced.step()
    got: list[Any] = []
    receiving = threading.Thread(target=lambda: got.append(run(receiver, PROMPT, SAMPLED, ticket)))
    receiving.start()
    wait_until(lambda: receiver.get_metrics().hand_over_received_bytes > 0)
    assert sender.get_metrics().num_prefill_tokens < len(PROMPT)
    if transport == "shm":  # memory without a name, which goes with who has it
        assert "/memfd:llmserve-kv (deleted)" in Path("/proc/self/maps").read_text()
        assert not list(Path("/dev/shm").glob("*llmserve-kv*"))
    if ending == "whole":
        time.sleep(0.9)  # more than twice the timeout: who computes is waited for
    assert failures(receiver) == {}
    assert receiver.get_metrics().num_hand_overs_received == 0
    if ending == "aborted":
        sender._open_engine().abort(1)
    elif ending == "closed":
        closing = threading.Thread(target=sender.close)
        closing.start()
        time.sleep(0.3)  # it ends after the step that runs
    paced.end()
    receiving.join(DEADLINE_S)
    assert words(got[0]) == words(run(one, PROMPT, SAMPLED))
    metrics = receiver.get_metrics()
    if ending == "whole":
        assert metrics.num_hand_overs_received == 1
        assert metrics.num_prefill_tokens == 1
        assert not sender.hand_over.has_begun(ticket)
    else:  # who closes may come too late to do harm; what was in vain is counted
        num_failed = sum(failures(receiver).values())
        assert num_failed == 1 or ending == "closed"
        assert metrics.num_prefill_tokens == (len(PROMPT) if num_failed else 1)
    if ending == "aborted":
        assert failures(receiver) == {"gone": 1}
        check_idle(sender)
    check_idle(receiver)
