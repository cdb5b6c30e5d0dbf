"""`LLM.enqueue` and `wait_for_completion`, and calls that are larger than the engine's queue."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from llmserve import LLM, InvalidArgument, QueueFull, SamplingParams
from llmserve.requests.enqueued import EnqueuedRequests
from offline import DEADLINE_S, GREEDY, LONG, generate, tokens


def wait(llm: LLM) -> list[list[int]]:
    return tokens(llm.wait_for_completion(use_tqdm=False))


def test_enqueued_requests_come_back_in_their_order(llm: LLM) -> None:
    prompts = [[5, 6 + i] for i in range(20)]
    params = [
        SamplingParams(max_tokens=20 - i, temperature=0.0, ignore_eos=True) for i in range(20)
    ]
    ids = llm.enqueue(prompts[:12], params[:12]) + llm.enqueue(prompts[12:], params[12:])
    assert len(set(ids)) == 20
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert tokens(outputs) == tokens(generate(llm, prompts, params))


def test_waiting_for_nothing_gives_nothing(llm: LLM) -> None:
    assert wait(llm) == []
    llm.enqueue("hello", GREEDY)
    assert len(wait(llm)) == 1
    assert wait(llm) == []


def test_other_calls_do_not_disturb_enqueued_requests(llm: LLM) -> None:
    expected = tokens(generate(llm, [[5, 6 + i] for i in range(10)], LONG))
    llm.enqueue([[5, 6 + i] for i in range(10)], LONG)
    assert len(tokens(generate(llm, "hello"))) == 1
    stream = llm.stream("hello", LONG)
    next(stream)
    stream.close()
    assert wait(llm) == expected


def test_samples_of_an_enqueued_request_come_together(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True)
    llm.enqueue("hello", params)
    (output,) = llm.wait_for_completion(use_tqdm=False)
    expected = generate(llm, "hello", params)[0]
    assert [c.token_ids for c in output.outputs] == [c.token_ids for c in expected.outputs]


def test_an_aborted_request_comes_back_with_what_it_had(checkpoint: Path) -> None:
    with LLM(checkpoint, num_threads=1, max_num_seqs=1) as llm:
        expected = tokens(generate(llm, "hello"))
        ids = llm.enqueue([[5, 6 + i] for i in range(50)], LONG)
        llm.abort(ids[1:])
        llm.abort("12345")
        llm.abort("no number")
        (*_, last) = outputs = llm.wait_for_completion(use_tqdm=False)
        assert outputs[0].outputs[0].finish_reason == "length"
        assert last.outputs[0].finish_reason == "abort"
        assert llm.get_metrics().num_blocks_used == 0
        assert tokens(generate(llm, "hello")) == expected


def is_waiting(thread_id: int) -> bool:
    """Whether a thread is in EnqueuedRequests.wait."""
    frame = sys._current_frames().get(thread_id)
    while frame is not None:
        if frame.f_code is EnqueuedRequests.wait.__code__:
            return True
        frame = frame.f_back
    return False


def interrupt_soon() -> threading.Thread:
    main = threading.main_thread().ident or 0

    def interrupt() -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_waiting(main) and time.monotonic() < deadline:
            time.sleep(0.0005)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_the_wait_and_loses_nothing(checkpoint: Path) -> None:
    prompts = [[5, 6 + i] for i in range(60)]
    with LLM(checkpoint, num_threads=1, max_num_seqs=2) as llm:
        expected = tokens(generate(llm, prompts, LONG))
        for _ in range(2):
            llm.enqueue(prompts, LONG)
            for _ in range(3):
                thread = interrupt_soon()
                with pytest.raises(KeyboardInterrupt):
                    wait(llm)
                thread.join()
            assert wait(llm) == expected
        assert llm.get_metrics().num_blocks_used == 0


def test_enqueue_queues_all_or_nothing(checkpoint: Path) -> None:
    with LLM(checkpoint, num_threads=1, max_num_seqs=1, max_num_queued_reqs=5) as llm:
        with pytest.raises(QueueFull, match="max_num_queued_reqs is 5"):
            llm.enqueue([[5, 6]] * 50, LONG)
        metrics = llm.get_metrics()
        assert metrics.num_requests_running + metrics.num_requests_waiting == 0
        assert wait(llm) == []
        llm.enqueue([[5, 6]] * 3, GREEDY)
        assert len(wait(llm)) == 3


def test_a_batch_larger_than_the_queue_goes_in_as_room_appears(checkpoint: Path) -> None:
    prompts = [[5, 6 + i] for i in range(60)]
    with LLM(checkpoint, num_threads=1) as llm:
        expected = tokens(generate(llm, prompts))
    with LLM(checkpoint, num_threads=1, max_num_seqs=4, max_num_queued_reqs=2) as llm:
        results: list[list[list[int]]] = []
        threads = [
            threading.Thread(target=lambda: results.append(tokens(generate(llm, prompts))))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert results == [expected] * 3


def test_closing_ends_a_wait_in_another_thread(checkpoint: Path) -> None:
    llm = LLM(checkpoint, num_threads=1, max_num_seqs=1)
    llm.enqueue([[5, 6]] * 300, LONG)
    errors: list[Exception] = []

    def work() -> None:
        try:
            wait(llm)
        except InvalidArgument as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while not is_waiting(thread.ident or 0):
        time.sleep(0.001)
    llm.close()
    thread.join(DEADLINE_S)
    assert "this LLM is closed" in str(errors[0])
