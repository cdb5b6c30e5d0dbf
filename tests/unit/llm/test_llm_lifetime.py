"""`LLM` from its first breath to its last: interruption, threads, several at once, memory."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import checkpoints
import pytest
from llmserve import LLM, InvalidArgument, SamplingParams
from llmserve.requests.runner import RequestRunner
from offline import DEADLINE_S, GREEDY, LONG, generate, memory_bytes, tokens

INTERRUPT_DEADLINE_S = 3.0  # less than the wait for requests that never answer (5 s)


def is_running_requests(thread_id: int) -> bool:
    """Whether a thread is between the first request of a call and the call's end."""
    frame = sys._current_frames().get(thread_id)
    while frame is not None:
        if frame.f_code is RequestRunner.run.__code__:
            return True
        frame = frame.f_back
    return False


def interrupt_soon() -> threading.Thread:
    """Sends SIGINT to this process once its main thread runs requests, at any point of that."""

    def interrupt() -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_running_requests(threading.main_thread().ident or 0):
            if time.monotonic() > deadline:
                return
            time.sleep(0.0005)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_the_call_and_leaves_the_llm_usable(checkpoint: Path) -> None:
    params = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
    with LLM(checkpoint, num_threads=1, max_num_seqs=2) as llm:
        expected = tokens(generate(llm, "hello"))
        for _ in range(5):
            start = time.monotonic()
            thread = interrupt_soon()
            with pytest.raises(KeyboardInterrupt):
                generate(llm, [[5, 6 + i] for i in range(300)], params)
            thread.join()
            assert time.monotonic() - start < INTERRUPT_DEADLINE_S
            metrics = llm.get_metrics()
            assert metrics.num_requests_running + metrics.num_requests_waiting == 0
            assert metrics.num_blocks_used == 0
            assert tokens(generate(llm, "hello")) == expected


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_in_one_thread_loses_nothing_of_another(checkpoint: Path) -> None:
    params = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
    prompts = [[5, 6 + i] for i in range(60)]
    with LLM(checkpoint, num_threads=1, max_num_seqs=4) as llm:
        expected = tokens(generate(llm, prompts, LONG))
        results: list[list[list[int]]] = []
        worker = threading.Thread(
            target=lambda: results.append(tokens(generate(llm, prompts, LONG)))
        )
        worker.start()
        while worker.is_alive():
            thread = interrupt_soon()
            with pytest.raises(KeyboardInterrupt):
                generate(llm, [[9, 9]] * 100, params)
            thread.join()
        worker.join(DEADLINE_S)
    assert results == [expected]


def test_threads_share_one_llm(llm: LLM) -> None:
    prompts = [[[5 + worker, 6 + i] for i in range(6)] for worker in range(6)]
    expected = [tokens(generate(llm, batch)) for batch in prompts]
    results: list[list[list[int]] | None] = [None] * len(prompts)

    def work(worker: int) -> None:
        results[worker] = tokens(generate(llm, prompts[worker]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert results == expected


def test_a_stream_that_nobody_reads_holds_up_nobody(llm: LLM) -> None:
    stream = llm.stream("hello", LONG)
    outputs = [next(stream)]  # of all 200 tokens where this thread was late
    assert len(tokens(generate(llm, [[1, 2]]))[0]) == 8
    outputs += stream
    assert outputs[-1].finished


def test_several_llms_live_side_by_side(checkpoint: Path) -> None:
    other_checkpoint = checkpoints.checkpoint("qwen3", seed=1)
    with LLM(checkpoint, num_threads=1) as one, LLM(other_checkpoint, num_threads=1) as two:
        prompts = [[3, 4, 5], [6, 7]]
        first, second = tokens(generate(one, prompts)), tokens(generate(two, prompts))
        assert first != second
        assert (tokens(generate(one, prompts)), tokens(generate(two, prompts))) == (first, second)


def test_a_closed_llm_says_so(checkpoint: Path) -> None:
    llm = LLM(checkpoint, num_threads=1)
    assert str(checkpoint) in repr(llm)
    llm.close()
    llm.close()
    assert repr(llm) == "LLM(closed)"
    for call in (lambda: generate(llm, "hello"), llm.get_metrics, llm.__enter__):
        with pytest.raises(InvalidArgument, match="this LLM is closed"):
            call()


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_llm_is_not_copied_and_the_attempt_leaves_it_open(
    llm: LLM, take: Callable[[LLM], object]
) -> None:
    before = tokens(generate(llm, "hello"))
    with pytest.raises(TypeError, match="LLM cannot be copied or pickled"):
        take(llm)
    gc.collect()
    assert tokens(generate(llm, "hello")) == before


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_start_that_fails_late_leaves_nothing(checkpoint: Path) -> None:
    before = len(list(Path("/proc/self/task").iterdir()))
    with pytest.raises(InvalidArgument, match=r"logits_processors\[0\]: int has no method apply"):
        LLM(checkpoint, num_threads=2, logits_processors=[int])
    gc.collect()
    assert len(list(Path("/proc/self/task").iterdir())) <= before


def test_closing_ends_a_call_in_another_thread(checkpoint: Path) -> None:
    llm = LLM(checkpoint, num_threads=1)
    errors: list[Exception] = []

    def work() -> None:
        try:
            generate(llm, [[1, 2]] * 300, LONG)
        except InvalidArgument as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while llm.get_metrics().num_generation_tokens == 0:
        time.sleep(0.001)
    llm.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert "this LLM is closed" in str(errors[0])


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_close_gives_all_memory_back(checkpoint: Path) -> None:
    # The KV pool is touched lazily, so that one which stays shows in the address space; what a
    # cycle touches (weights, workspace, tables) shows in the resident pages.
    kv_bytes = 2**26
    max_address_growth_bytes = 2 * kv_bytes  # of 20 pools: one may be the allocator's to reuse
    max_resident_growth_bytes = 2**23  # 400 KiB a cycle, less than one workspace

    def cycle() -> None:
        with LLM(checkpoint, num_threads=2, kv_cache_memory_bytes=kv_bytes) as llm:
            generate(llm, [[5, 6 + i] for i in range(16)])

    for _ in range(3):
        cycle()
    gc.collect()
    start = memory_bytes()
    for _ in range(20):
        cycle()
    gc.collect()
    address_space, resident = memory_bytes()
    assert address_space - start[0] < max_address_growth_bytes
    assert resident - start[1] < max_resident_growth_bytes


def test_an_llm_that_is_dropped_ends_its_threads(checkpoint: Path) -> None:
    def num_threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before = num_threads()
    llm = LLM(checkpoint, num_threads=2)
    generate(llm, "hello")
    assert num_threads() > before
    del llm
    gc.collect()
    assert num_threads() <= before


def test_importing_loads_nothing_that_is_slow_to_load() -> None:
    code = (
        "import sys, llmserve; "
        "slow = ('torch', 'transformers', 'tokenizers', 'tqdm', 'numpy', 'jinja2'); "
        "print([module for module in slow if module in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_progress_bar_counts_requests_and_shows_the_rate(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate([[1], [2], [3]], GREEDY)
    shown = capsys.readouterr()
    assert "Processed prompts: 100%" in shown.err
    assert "3/3" in shown.err
    assert "tok/s" in shown.err
    assert shown.out == ""


# What is done with the parent's LLM in a child, which then exits as a program does.
_IN_CHILDREN = {
    "nothing": "pass",
    "close": "llm.close()",
    "drop": "del llm",
    "generate": """
try:
    llm.generate("a", use_tqdm=False)
except InvalidArgument as error:
    assert "forked" in str(error)
else:
    raise AssertionError
""",
    "a new one": """
with LLM(path) as own:
    own.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
""",
}


@pytest.mark.parametrize("what", _IN_CHILDREN)
def test_a_forked_child_leaves_the_engine_to_its_parent(what: str, checkpoint: Path) -> None:
    code = f"""
import os, signal, sys
from llmserve import LLM, InvalidArgument, SamplingParams
path = {str(checkpoint)!r}
llm = LLM(path)
params = SamplingParams(temperature=0, max_tokens=2)
expected = llm.generate([[5, 6]], params, use_tqdm=False)[0].outputs[0].token_ids
child = os.fork()
if child == 0:
    signal.alarm(20)
    {{in_child}}
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert llm.generate([[5, 6]], params, use_tqdm=False)[0].outputs[0].token_ids == expected
"""
    indented = _IN_CHILDREN[what].strip().replace("\n", "\n    ")
    done = subprocess.run(
        [sys.executable, "-c", code.format(in_child=indented)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_program_ends_while_a_daemon_thread_generates(checkpoint: Path) -> None:
    code = f"""
import threading, time
from llmserve import LLM, SamplingParams
llm = LLM({str(checkpoint)!r})
params = SamplingParams(max_tokens=None, ignore_eos=True)
run = lambda: llm.generate([[5, 6]] * 20, params, use_tqdm=False)
threading.Thread(target=run, daemon=True).start()
time.sleep(0.2)
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
