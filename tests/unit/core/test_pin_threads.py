"""LLMSERVE_PIN_THREADS: the CPUs that the threads of an engine may run on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("llguidance", reason="masks are what makes the engine start threads of its own")

SCRIPT = """
import os
import time
from llmserve import LLM, SamplingParams, StructuredOutputsParams, demo_model_path
before = {*os.listdir("/proc/self/task")}
num_ranks = int(os.environ["NUM_RANKS"])
llm = LLM(demo_model_path(), max_model_len=64, num_threads=2, tensor_parallel_size=num_ranks)
wanted = StructuredOutputsParams(choice=["yes", "no"])
llm.generate("a", SamplingParams(max_tokens=2, structured_outputs=wanted))
for _ in range(100):  # a thread begins with the affinity of the one that started it
    tasks = {*os.listdir("/proc/self/task")} - before
    cpus = [" ".join(map(str, sorted(os.sched_getaffinity(int(task))))) for task in tasks]
    alone = [one for one in cpus if one.isdecimal()]
    if len(alone) == len({*alone}):
        break
    time.sleep(0.1)
for one in cpus:
    print(one)
"""


def affinities(pin: str, num_ranks: int) -> list[str]:
    """The CPUs of every thread that an engine of two threads has started."""
    env = {**os.environ, "LLMSERVE_PIN_THREADS": pin, "NUM_RANKS": str(num_ranks)}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def physical_cores() -> set[str]:
    """By the CPUs that share each of them."""
    siblings = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return {Path(siblings.format(cpu)).read_text() for cpu in os.sched_getaffinity(0)}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_threads_are_pinned_to_cores_of_their_own_on_request_only(num_ranks: int) -> None:
    if len(physical_cores()) < 2:
        pytest.skip("one core: there is none for a second thread")
    everywhere = " ".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0)))
    free = affinities("", num_ranks)
    assert {*free} == {everywhere}
    pinned = affinities("1", num_ranks)
    assert len(pinned) == len(free)
    alone = [cpus for cpus in pinned if cpus != everywhere]
    assert len(alone) == len({*alone}) == 2  # the engine's own and its pool's, or the second rank's
    assert all(cpus.isdecimal() for cpus in alone)
