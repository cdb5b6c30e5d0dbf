"""Ranks with a GPU each, over NCCL: the tokens of one rank, whatever fails on the way."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from checkpoints import checkpoint
from gpu_ranks import (
    FIELDS,
    Faults,
    expected,
    make_llm,
    need_gpus,
    plainly,
    run,
    told_faults,
    words,
)
from llmserve import LLM, _core
from llmserve import _core_testing as testing
from llmserve.errors import NotSupported

REASON = testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]

NOTICED_WITHIN_S = 5


@pytest.fixture(scope="module", autouse=True)
def plain_products() -> Iterator[None]:
    yield from plainly()


@pytest.fixture
def faults() -> Iterator[Faults]:
    yield from told_faults()


@pytest.fixture(scope="module")
def alone() -> list[object]:
    return expected()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_tokens_are_those_of_one_rank(alone: list[object], num_ranks: int) -> None:
    need_gpus(num_ranks)
    with make_llm(num_ranks) as llm:
        assert words(run(llm)) == alone
        metrics = llm.get_metrics()
        assert f"rank 0 of {num_ranks}" in llm.description
    assert (metrics.num_rank_failures, metrics.num_nccl_errors) == (0, 0)
    assert metrics.num_graph_captures > 0


def test_one_step_at_a_time_has_the_same_tokens(alone: list[object]) -> None:
    need_gpus(2)
    with make_llm(2, async_scheduling=False) as llm:
        assert words(run(llm)) == alone


# Experts that are shared, and queries of one latent row for all heads.
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_other_layers_are_cut_likewise(family: str) -> None:
    need_gpus(2)
    tokens = expected(family)
    with make_llm(2, family) as llm:
        assert words(run(llm)) == tokens


def test_bf16_weights_in_one_order_have_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    need_gpus(2)
    monkeypatch.setenv("LLMSERVE_CUDA_GEMM", "invariant")
    tokens = expected(dtype="bfloat16")
    with make_llm(2, dtype="bfloat16") as llm:
        assert words(run(llm)) == tokens


# The sixth call is in the first step, the fortieth in a later one.
@pytest.mark.parametrize("call", [6, 40])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_that_nccl_reports_is_computed_again(
    faults: Faults, alone: list[object], rank: int, call: int
) -> None:
    with make_llm(2) as llm:
        faults.tell(rank=rank, call=call, fault=1)
        num_worlds = faults["num_worlds"]
        assert words(run(llm)) == alone
        metrics = llm.get_metrics()
        assert words(run(llm)) == alone
    assert metrics.num_rank_failures == 1
    assert metrics.num_nccl_errors >= 1
    assert metrics.num_requests_running == 0
    assert faults["num_aborts"] >= 2
    assert faults["num_worlds"] == num_worlds + 2  # before the first step, and after the failure


def test_a_rank_that_hangs_is_noticed(faults: Faults, alone: list[object]) -> None:
    with make_llm(2) as llm:
        assert words(run(llm)) == alone  # kernels are loaded, and the ranks have met
        begin = time.monotonic()
        assert words(run(llm)) == alone
        usual_s = time.monotonic() - begin
        faults.tell(rank=1, call=20, fault=2)
        begin = time.monotonic()
        assert words(run(llm)) == alone
        assert time.monotonic() - begin < NOTICED_WITHIN_S + 10 * usual_s
        assert llm.get_metrics().num_rank_failures == 1


def test_ranks_that_fail_again_and_again_end_the_engine(faults: Faults) -> None:
    with make_llm(2) as llm:
        faults.tell(rank=1, call=1, fault=1, times=1000)
        outputs = run(llm)
        assert {sample.finish_reason for o in outputs for sample in o.outputs} == {"error"}
        assert "remote process exited" in str(outputs[0].outputs[0].error)


def test_a_rank_that_fails_by_itself_is_computed_again(
    monkeypatch: pytest.MonkeyPatch, alone: list[object]
) -> None:
    need_gpus(2)

    def engine(
        loading: _core.LoadingModel, vocabulary: _core.Vocabulary | None = None
    ) -> _core.Engine:
        faults = testing.RankFaultOptions(rank=1, fault="throw", fail_at_exchange=13)
        return testing.faulty_engine(loading.config, vocabulary=vocabulary, rank_faults=faults)

    monkeypatch.setattr(_core, "Engine", engine)
    with make_llm(2) as llm:
        assert words(run(llm)) == alone
        assert llm.get_metrics().num_rank_failures == 1


def test_the_memory_of_ranks_is_planned() -> None:
    need_gpus(3)
    options = {"num_gpu_blocks_override": None, "gpu_memory_utilization": 0.01}
    for num_ranks in (2, 3):
        with make_llm(num_ranks, **options) as llm:
            use, config = llm._engine.memory_use, llm._config
        plan = LLM.plan(
            checkpoint("qwen3"), **{**FIELDS, **options}, tensor_parallel_size=num_ranks
        )
        assert plan.num_blocks == config.cache.num_blocks
        assert len(plan.ranks) == num_ranks
        assert use.weight_bytes == sum(rank.weight_bytes for rank in plan.ranks)
        assert use.workspace_bytes == sum(rank.workspace_bytes for rank in plan.ranks)
        assert use.kv_cache_bytes == sum(rank.kv_cache_bytes for rank in plan.ranks)


def test_sleep_gives_the_memory_of_all_ranks_back(alone: list[object]) -> None:
    need_gpus(2)
    with make_llm(2) as llm:
        llm.sleep()
        assert llm._engine.memory_use.kv_cache_bytes == 0
        llm.wake_up()
        assert words(run(llm)) == alone


def test_more_ranks_than_gpus_are_refused() -> None:
    need_gpus(1)
    count = testing.num_gpus() + 1
    with pytest.raises(NotSupported, match=f"tensor_parallel_size={count} on device 'cuda': "):
        make_llm(count)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size=2 on device 'cuda'"),
    ],
    ids=str,
)
def test_what_gpus_cannot_do_among_them_is_refused_by_name(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(NotSupported, match=message):
        make_llm(2, **options)


def test_two_ranks_may_share_a_gpu(monkeypatch: pytest.MonkeyPatch, alone: list[object]) -> None:
    need_gpus(1)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setenv("LLMSERVE_EMULATOR_DEVICES", "1")
    if testing.num_gpus() > 1:
        pytest.skip("several GPUs are visible: ranks do not share one")
    with make_llm(2) as llm:
        assert words(run(llm)) == alone


def test_two_engines_on_a_gpu_do_not_disturb_each_other(alone: list[object]) -> None:
    results: list[list[object]] = [[], []]
    with make_llm(1) as first, make_llm(1) as second:

        def work(i: int, llm: LLM) -> None:
            results[i] = words(run(llm))

        threads = [threading.Thread(target=work, args=pair) for pair in enumerate((first, second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [alone, alone]


def put(backend: Any, x: np.ndarray) -> Any:
    if x.size > 0:
        return backend.to_device(np.ascontiguousarray(x))
    return backend.empty_device(list(x.shape), "float32")


def on_ranks(world_size: int, work: Callable[[Any, Any, int], None]) -> None:
    """work(communicator, backend, rank) on each rank's thread; the first error is raised."""
    group = testing.communicator_group("nccl", world_size, timeout_s=60)
    errors: list[BaseException] = []

    def enter(rank: int) -> None:
        try:
            backend = testing.make_backend("cuda", gpu=rank)
            work(group.join(rank, backend), backend, rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=enter, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("counts", [(3, 3), (5, 1, 2), (4, 0, 3)])
@pytest.mark.parametrize("rows", [1, 7])
def test_gathered_columns_stand_side_by_side(counts: tuple[int, ...], rows: int) -> None:
    need_gpus(len(counts))
    whole = np.arange(rows * sum(counts), dtype=np.float32).reshape(rows, -1)

    def gather(ranks: Any, backend: Any, rank: int) -> None:
        begin = sum(counts[:rank])
        own = put(backend, whole[:, begin : begin + counts[rank]])
        out = backend.to_device(np.zeros_like(whole))
        ranks.gather_columns(own, out, list(counts))
        ranks.wait()  # without the GIL, which the other ranks need
        np.testing.assert_array_equal(backend.to_numpy(out), whole)
        root = len(counts) - 1
        at_root = backend.to_device(np.zeros_like(whole))
        ranks.gather_columns(own, at_root if rank == root else None, list(counts), root)
        ranks.wait()
        if rank == root:
            np.testing.assert_array_equal(backend.to_numpy(at_root), whole)
        ranks.barrier()

    on_ranks(len(counts), gather)


def test_every_verb_among_gpus() -> None:
    need_gpus(3)
    counts = [3, 0, 5]
    parts = [np.full((8,), rank + 1, np.float32) for rank in range(3)]

    def exchange(ranks: Any, backend: Any, rank: int) -> None:
        kept: list[Any] = []  # to let one go waits for the device, with the GIL

        def dev(x: np.ndarray) -> Any:
            kept.append(put(backend, x))
            return kept[-1]

        def check(device: Any, expected: np.ndarray) -> None:
            ranks.wait()  # without the GIL, which the other ranks need
            np.testing.assert_array_equal(backend.to_numpy(device), expected)

        data = dev(parts[rank])
        ranks.all_reduce(data)
        check(data, np.full((8,), 6, np.float32))
        ranks.all_reduce(data, "max")
        check(data, np.full((8,), 6, np.float32))
        told = dev(parts[rank])
        ranks.broadcast(told, 2)
        check(told, parts[2])
        whole = dev(np.zeros((8,), np.float32))
        ranks.all_gather(dev(parts[rank][: counts[rank]]), whole, counts)
        check(whole, np.array([1, 1, 1, 3, 3, 3, 3, 3], np.float32))
        part = dev(np.zeros((counts[rank],), np.float32))
        ranks.reduce_scatter(dev(parts[rank]), part, "sum", counts)
        ranks.wait()
        if counts[rank] > 0:
            check(part, np.full((counts[rank],), 6, np.float32))
        swapped = dev(np.zeros((6,), np.float32))
        ranks.all_to_all(dev(parts[rank][:6]), swapped)
        check(swapped, np.repeat(np.arange(1, 4, dtype=np.float32), 2))
        if rank == 0:
            ranks.send(dev(parts[0]), 2)
            ranks.wait()
        if rank == 2:
            message = dev(np.zeros((8,), np.float32))
            ranks.recv(message, 0)
            check(message, parts[0])
        ranks.barrier()

    on_ranks(3, exchange)


def test_environment_names_the_gpus() -> None:
    """The emulator has as many as this says, so that none of the tests is skipped there."""
    if "LLMSERVE_EMULATOR_DEVICES" in os.environ:
        assert testing.num_gpus() == int(os.environ["LLMSERVE_EMULATOR_DEVICES"])
