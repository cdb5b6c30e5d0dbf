"""Replicas with GPUs of their own: the tokens of one engine, whatever becomes of one of them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import checkpoint
from gpu_ranks import FIELDS, expected, make_llm, need_gpus, plainly, run, words
from llmserve import LLM, _core
from llmserve import _core_testing as testing
from llmserve.errors import NotSupported

REASON = testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]


@pytest.fixture(scope="module", autouse=True)
def plain_products() -> Iterator[None]:
    yield from plainly()


@pytest.fixture(scope="module")
def alone() -> list[object]:
    return expected()


@pytest.mark.parametrize(("num_replicas", "num_ranks"), [(3, 1), (2, 2)])
def test_tokens_are_those_of_one_engine(
    alone: list[object], num_replicas: int, num_ranks: int
) -> None:
    need_gpus(num_replicas * num_ranks)
    with make_llm(num_ranks, data_parallel_size=num_replicas) as llm:
        assert words(run(llm)) == alone
        assert words(run(llm)) == alone
        states = llm.replicas()
        assert all(state.num_routed > 0 for state in states)
        assert len(states) == num_replicas
        llm.sleep(level=2)
        assert llm.get_memory_use().weight_bytes == 0
        llm.wake_up()
        assert words(run(llm)) == alone


@pytest.mark.parametrize("num_failures", [1, 1000])
def test_requests_of_a_replica_that_fails_go_on_at_another_one(
    monkeypatch: pytest.MonkeyPatch, alone: list[object], num_failures: int
) -> None:
    need_gpus(2)

    def engine(
        loading: _core.LoadingModel, vocabulary: _core.Vocabulary | None = None
    ) -> _core.Engine:
        faults = testing.FaultOptions(fault="device", fail_at_step=3, num_failures=num_failures)
        return testing.faulty_engine(loading.config, faults, vocabulary)

    monkeypatch.setattr(_core, "Engine", engine)
    with make_llm(1, data_parallel_size=2) as llm:
        assert words(run(llm)) == alone
        assert llm.replicas()[1].num_taken_over > 0
        assert words(run(llm)) == alone


@pytest.fixture
def lost_device() -> Iterator[ctypes.c_int]:
    """The emulated GPU whose calls fail; -1: none."""
    library = Path(_core.__file__).parent / "lib" / "libllmserve_cuda.so"
    try:
        lost = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "llmserve_emulator_lost_device")
    except (OSError, ValueError):
        pytest.skip("the emulator's GPUs fail on request, and no other ones do")
    yield lost
    lost.value = -1


def test_a_gpu_that_fails_takes_no_request_with_it(
    lost_device: ctypes.c_int, alone: list[object]
) -> None:
    need_gpus(2)
    with make_llm(1, data_parallel_size=2) as llm:
        assert words(run(llm)) == alone
        lost_device.value = 1
        for _ in range(4):
            assert words(run(llm)) == alone
        states = llm.replicas()
    assert [state.failure is None for state in states] == [True, False]
    assert "failed with" in str(states[1].failure)
    assert states[0].num_taken_over > 0


def test_the_memory_of_replicas_is_planned() -> None:
    need_gpus(4)
    options = {**FIELDS, "num_gpu_blocks_override": None, "gpu_memory_utilization": 0.01}
    one = LLM.plan(checkpoint("qwen3"), **options)
    for num_ranks in (1, 2):
        fields = {**options, "data_parallel_size": 2, "tensor_parallel_size": num_ranks}
        plan = LLM.plan(checkpoint("qwen3"), **fields)
        assert plan.num_replicas == 2
        assert plan.total_memory_bytes == 2 * num_ranks * one.total_memory_bytes
        with LLM(checkpoint("qwen3"), **fields) as llm:
            use, config = llm.get_memory_use(), llm._config
        assert plan.num_blocks == config.cache.num_blocks
        assert use.weight_bytes == plan.weight_bytes >= 2 * one.weight_bytes
        assert use.workspace_bytes == plan.workspace_bytes
        assert use.kv_cache_bytes == plan.kv_cache_bytes


def test_more_replicas_than_gpus_are_refused() -> None:
    need_gpus(1)
    count = testing.num_gpus() + 1
    message = f"tensor_parallel_size=1, data_parallel_size={count} on device 'cuda': "
    with pytest.raises(NotSupported, match=message):
        make_llm(1, data_parallel_size=count)
