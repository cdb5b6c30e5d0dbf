"""KeyboardInterrupt at each line that a call runs: what it leaves, and that nothing hangs."""

from __future__ import annotations

import gc
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import llmserve
import pytest
from llmserve import LLM, RequestOutput, SamplingParams
from offline import DEADLINE_S, generate, tokens

PACKAGE = str(Path(llmserve.__file__).parent)
PROMPTS = [[5, 6], [7, 8, 9], [10]]
PARAMS = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
HANG_S = 20
# Of a call, spread over its lines; the long form has all, several times.
NUM_PLACES = 500
NUM_STARTS = 8


class InterruptAt:
    """Raises KeyboardInterrupt before the n-th line of llmserve's that runs, and counts lines."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.num_lines = 0

    def __enter__(self) -> InterruptAt:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self.place:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fails what hangs, also in a lock."""

    def fail(*_: object) -> None:
        raise TimeoutError(f"it hangs: more than {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def count_lines(call: Callable[[], object]) -> int:
    with InterruptAt(0) as tracer:
        call()
    return tracer.num_lines


def places(num_lines: int, count: int) -> range:
    return range(1, num_lines + 1, max(1, num_lines // count))


def interrupted(call: Callable[[], object], place: int) -> bool:
    """Whether it came to that line."""
    try:
        with InterruptAt(place):
            call()
    except KeyboardInterrupt:
        return True
    return False


def wait_until_idle(llm: LLM) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        metrics = llm.get_metrics()
        if metrics.num_requests_running + metrics.num_requests_waiting == 0:
            break
        assert time.monotonic() < deadline, "a request of an interrupted call runs on"
        time.sleep(0.001)
    assert metrics.num_blocks_used == 0


def check_generate(llm: LLM, count: int) -> int:
    expected = tokens(generate(llm, PROMPTS, PARAMS))
    num_lines = count_lines(lambda: generate(llm, PROMPTS, PARAMS))
    for place in places(num_lines, count):
        with within(HANG_S):
            interrupted(lambda: generate(llm, PROMPTS, PARAMS), place)
            wait_until_idle(llm)
            assert tokens(generate(llm, PROMPTS, PARAMS)) == expected
    return num_lines


def check_enqueue(llm: LLM, count: int) -> int:
    expected = tokens(generate(llm, PROMPTS, PARAMS))
    num_lines = count_lines(lambda: llm.enqueue(PROMPTS, PARAMS))
    llm.wait_for_completion(use_tqdm=False)
    for place in places(num_lines, count):
        with within(HANG_S):
            was_interrupted = interrupted(lambda: llm.enqueue(PROMPTS, PARAMS), place)
            outputs = llm.wait_for_completion(use_tqdm=False)
            assert tokens(outputs) == ([] if was_interrupted else expected)
            wait_until_idle(llm)
    return num_lines


def check_wait(llm: LLM, count: int) -> int:
    expected = tokens(generate(llm, PROMPTS, PARAMS))
    llm.enqueue(PROMPTS, PARAMS)
    num_lines = count_lines(lambda: llm.wait_for_completion(use_tqdm=False))
    for place in places(num_lines, count):
        with within(HANG_S):
            ids = llm.enqueue(PROMPTS, PARAMS)
            outputs: list[RequestOutput] = []
            interrupted(
                lambda outputs=outputs: outputs.extend(llm.wait_for_completion(use_tqdm=False)),
                place,
            )
            more = llm.enqueue(PROMPTS[:1], PARAMS)
            outputs += llm.wait_for_completion(use_tqdm=False)
            assert [output.request_id for output in outputs] == ids + more
            assert tokens(outputs) == expected + expected[:1]
            wait_until_idle(llm)
    return num_lines


CHECKS = [check_generate, check_enqueue, check_wait]


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("check", CHECKS)
def test_an_interrupted_call_leaves_the_llm_as_it_was(
    checkpoint: Path, check: Callable[[LLM, int], int]
) -> None:
    with LLM(checkpoint, num_threads=1) as llm:
        check(llm, NUM_PLACES)


@pytest.mark.long
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("check", CHECKS)
def test_interrupted_calls_at_every_line(
    checkpoint: Path, check: Callable[[LLM, int], int]
) -> None:
    with LLM(checkpoint, num_threads=1) as llm:
        num_places = sum(check(llm, 10**6) for _ in range(5))
    print(f"{check.__name__}: {num_places} places")


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def wait_for_threads(expected: int) -> None:
    """A thread that was joined may be listed a moment longer."""
    deadline = time.monotonic() + DEADLINE_S
    while num_threads() > expected:
        assert time.monotonic() < deadline, "a thread of an LLM that has gone is left"
        gc.collect()
        time.sleep(0.01)


def check_constructor(checkpoint: Path, count: int) -> int:
    num_lines = count_lines(lambda: LLM(checkpoint, num_threads=2).close())
    gc.collect()
    before = num_threads()
    for place in places(num_lines, count):
        with within(2 * HANG_S):
            made: list[LLM] = []
            interrupted(lambda made=made: made.append(LLM(checkpoint, num_threads=2)), place)
            for llm in made:
                llm.close()
            made.clear()
            wait_for_threads(before)
    return num_lines


def check_close(checkpoint: Path, count: int) -> int:
    num_lines = count_lines(LLM(checkpoint, num_threads=2).close)
    gc.collect()
    before = num_threads()
    for place in places(num_lines, count):
        with within(2 * HANG_S):
            llm = LLM(checkpoint, num_threads=2)
            interrupted(llm.close, place)
            llm.close()
            assert repr(llm) == "LLM(closed)"
            wait_for_threads(before)
    return num_lines


@pytest.mark.usefixtures("interruptible")
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("check", [check_constructor, check_close])
def test_an_interrupted_start_or_end_leaves_no_thread(
    checkpoint: Path, check: Callable[[Path, int], int]
) -> None:
    check(checkpoint, NUM_STARTS)


@pytest.mark.long
@pytest.mark.usefixtures("interruptible")
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("check", [check_constructor, check_close])
def test_interrupted_starts_and_ends_at_every_line(
    checkpoint: Path, check: Callable[[Path, int], int]
) -> None:
    print(f"{check.__name__}: {check(checkpoint, 10**6)} places")
