"""Every verb of the communicators among threads, against a plain reference; and ranks that fail."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llmserve import _core_testing as testing
from llmserve.errors import DeviceError, InvalidArgument, NotSupported

SIZES = [1, 2, 3, 4, 5]
FLOATS = ["float32", "float16", "bfloat16"]
DTYPES = [*FLOATS, "int32", "int64", "uint8"]
# Ten times what a rank may take on a busy machine; an exchange itself takes microseconds.
PATIENCE_S = 60


KIND = "shm"  # of the test at hand


@pytest.fixture(autouse=True, params=["shm", "tcp"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Ranks meet in memory, or through sockets."""
    monkeypatch.setattr(sys.modules[__name__], "KIND", request.param)
    return str(request.param)


def run_ranks(
    world_size: int, work: Callable[[Any, int], object], *, timeout_s: float = PATIENCE_S
) -> list[Any]:
    """What work(communicator, rank) gives, or raises, for each rank on a thread of its own."""
    kind = "single" if world_size == 1 else KIND
    group = testing.communicator_group(kind, world_size, timeout_s=timeout_s)
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        ranks = group.join(rank, testing.make_backend("ref"))
        try:
            results[rank] = work(ranks, rank)
        except Exception as error:
            results[rank] = error.with_traceback(None)  # which would keep the communicator alive

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
        assert not thread.is_alive(), "a rank hangs"
    return results


def check_all(results: list[Any]) -> None:
    for result in results:
        if isinstance(result, Exception):
            raise result


def to_f32(x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


def from_f32(x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype != "bfloat16":
        return x.astype(dtype)
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def make(dtype: str, count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype in FLOATS:
        # Of many magnitudes, so that another order of the sum has other bits.
        x = rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count)
        return from_f32(x.astype(np.float32), dtype)
    return rng.integers(0, 200, count).astype(dtype)


def reduced(parts: list[np.ndarray], dtype: str, reduction: str) -> np.ndarray:
    """In float32, in the order of the ranks, rounded once."""
    total = to_f32(parts[0], dtype)
    for part in parts[1:]:
        x = to_f32(part, dtype)
        total = total + x if reduction == "sum" else np.maximum(total, x)
    return from_f32(total, dtype)


def uneven(world_size: int, seed: int) -> list[int]:
    counts = [int(n) for n in np.random.default_rng(seed).integers(0, 700, world_size)]
    counts[seed % world_size] = 0
    return counts


def test_the_registry_has_each_kind_once_and_refuses_others() -> None:
    assert [name for name, _ in testing.communicators()] == ["single", "shm", "tcp", "nccl"]
    with pytest.raises(NotSupported, match="'gloo' is not supported; use one of: single"):
        testing.communicator_group("gloo")
    with pytest.raises(InvalidArgument, match="'single': expected a world size of 1, got 2"):
        testing.communicator_group("single", 2)
    with pytest.raises(InvalidArgument, match="expected a world size of 1 or more, got 0"):
        testing.communicator_group(KIND, 0)
    with pytest.raises(InvalidArgument, match=r"expected a rank in \[0, 2\), got 2"):
        testing.communicator_group(KIND, 2).join(2, testing.make_backend("ref"))


@pytest.mark.parametrize("reduction", ["sum", "max"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("world_size", SIZES)
def test_a_reduction_has_the_bits_of_the_sum_in_rank_order_on_all_ranks(
    world_size: int, dtype: str, reduction: str
) -> None:
    for count in [0, 1, 5, 256, 1000, 4099]:
        parts = [make(dtype, count, seed) for seed in range(world_size)]
        data = [part.copy() for part in parts]
        check_all(run_ranks(world_size, lambda ranks, i, d=data: ranks.all_reduce(d[i], reduction)))
        expected = reduced(parts, dtype, reduction)
        for got in data:
            np.testing.assert_array_equal(got, expected)


def test_a_sum_of_integers_wraps_around() -> None:
    rng = np.random.default_rng(3)
    parts = [rng.integers(-(2**31), 2**31, 777).astype(np.int32) for _ in range(3)]
    data = [part.copy() for part in parts]
    check_all(run_ranks(3, lambda ranks, i: ranks.all_reduce(data[i])))
    for got in data:
        np.testing.assert_array_equal(
            got, sum(part.astype(np.int64) for part in parts).astype("<i4")
        )


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_a_sum_of_much_has_the_same_bits(world_size: int) -> None:
    """Sockets then have each rank add up a part."""
    for dtype, count in (("float32", 16_384), ("float32", 50_001), ("bfloat16", 40_000)):
        parts = [make(dtype, count, seed) for seed in range(world_size)]
        data = [part.copy() for part in parts]
        check_all(run_ranks(world_size, lambda ranks, i, d=data: ranks.all_reduce(d[i], "sum")))
        for got in data:
            np.testing.assert_array_equal(got, reduced(parts, dtype, "sum"))


def test_a_maximum_with_a_nan_is_nan_whoever_has_it() -> None:
    for owner in range(3):
        data = [np.array([1.0, 2.0], np.float32) for _ in range(3)]
        data[owner][1] = np.nan
        check_all(run_ranks(3, lambda ranks, i, d=data: ranks.all_reduce(d[i], "max")))
        for got in data:
            np.testing.assert_array_equal(got, np.array([1.0, np.nan], np.float32))


@pytest.mark.parametrize("is_even", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", SIZES)
def test_gathered_parts_are_in_the_order_of_the_ranks(
    world_size: int, dtype: str, is_even: bool
) -> None:
    counts = [300] * world_size if is_even else uneven(world_size, 3)
    parts = [make(dtype, count, seed) for seed, count in enumerate(counts)]

    def gather(ranks: Any, rank: int) -> None:
        out = np.zeros(sum(counts), parts[0].dtype)
        ranks.all_gather(parts[rank], out, [] if is_even else counts)
        np.testing.assert_array_equal(out, np.concatenate(parts))
        # In place: the part is the rank's own of the whole.
        begin = sum(counts[:rank])
        out[:] = 0
        out[begin : begin + counts[rank]] = parts[rank]
        ranks.all_gather(out[begin : begin + counts[rank]], out, counts)
        np.testing.assert_array_equal(out, np.concatenate(parts))

    check_all(run_ranks(world_size, gather))


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
@pytest.mark.parametrize("world_size", SIZES)
def test_gathered_columns_stand_side_by_side(world_size: int, dtype: str) -> None:
    """Of rows that may be strided, in place or not, and on one rank alone."""
    counts = [count % 40 for count in uneven(world_size, 3)]
    width = sum(counts)
    for rows in (0, 1, 7):
        whole = make(dtype, rows * width, 5).reshape(rows, width)

        def gather(ranks: Any, rank: int, whole: np.ndarray = whole) -> None:
            begin = sum(counts[:rank])
            own = slice(begin, begin + counts[rank])
            out = np.zeros_like(whole)
            ranks.gather_columns(whole[:, own].copy(), out, counts)
            np.testing.assert_array_equal(out, whole)
            out = np.zeros((len(whole), width + 3), whole.dtype)[:, :width]
            out[:, own] = whole[:, own]
            ranks.gather_columns(out[:, own], out, counts)  # in place
            np.testing.assert_array_equal(out, whole)
            root = ranks.world_size - 1
            out = np.zeros_like(whole)
            ranks.gather_columns(whole[:, own], out if rank == root else None, counts, root)
            np.testing.assert_array_equal(out, whole if rank == root else np.zeros_like(whole))

        check_all(run_ranks(world_size, gather))


def test_columns_that_do_not_fit_are_refused() -> None:
    x, out = np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32)

    def gather(ranks: Any, rank: int) -> None:
        with pytest.raises(InvalidArgument, match="expected rows of 4 columns, got"):
            ranks.gather_columns(x, out, [4])
        with pytest.raises(InvalidArgument, match="2 rows of 3 columns to gather in, got"):
            ranks.gather_columns(x, out, [3])
        with pytest.raises(InvalidArgument, match="expected 1 counts of 0 or more"):
            ranks.gather_columns(x, out, [2, 1])

    check_all(run_ranks(1, gather))


@pytest.mark.parametrize("is_even", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("world_size", SIZES)
def test_each_rank_gets_its_part_of_a_reduction(world_size: int, dtype: str, is_even: bool) -> None:
    counts = [300] * world_size if is_even else uneven(world_size, 5)
    wholes = [make(dtype, sum(counts), seed) for seed in range(world_size)]
    expected = reduced(wholes, dtype, "sum")

    def scatter(ranks: Any, rank: int) -> None:
        begin = sum(counts[:rank])
        own = slice(begin, begin + counts[rank])
        out = np.zeros(counts[rank], wholes[0].dtype)
        ranks.reduce_scatter(wholes[rank], out, "sum", [] if is_even else counts)
        np.testing.assert_array_equal(out, expected[own])
        x = wholes[rank].copy()
        ranks.reduce_scatter(x, x[own], "sum", counts)  # in place
        np.testing.assert_array_equal(x[own], expected[own])

    check_all(run_ranks(world_size, scatter))


@pytest.mark.parametrize("is_even", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", SIZES)
def test_every_rank_gets_its_part_of_every_other(
    world_size: int, dtype: str, is_even: bool
) -> None:
    rng = np.random.default_rng(11)
    counts = [[20] * world_size] * world_size  # [from][to]
    if not is_even:
        counts = [[int(n) for n in rng.integers(0, 300, world_size)] for _ in range(world_size)]
        counts[0][-1] = 0
    wholes = [make(dtype, sum(sent), seed) for seed, sent in enumerate(counts)]

    def exchange(ranks: Any, rank: int) -> None:
        received = [sent[rank] for sent in counts]
        out = np.zeros(sum(received), wholes[0].dtype)
        ranks.all_to_all(wholes[rank], out, *([] if is_even else [counts[rank], received]))
        begins = [sum(sent[:rank]) for sent in counts]
        expected = [
            whole[begin : begin + count]
            for whole, begin, count in zip(wholes, begins, received, strict=True)
        ]
        np.testing.assert_array_equal(out, np.concatenate(expected))

    check_all(run_ranks(world_size, exchange))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", SIZES)
def test_every_rank_has_what_the_root_had(world_size: int, dtype: str) -> None:
    def broadcast(ranks: Any, rank: int) -> None:
        for root in range(world_size):
            data = make(dtype, 1000, 10 * root + rank)
            ranks.broadcast(data, root)
            np.testing.assert_array_equal(data, make(dtype, 1000, 11 * root))

    check_all(run_ranks(world_size, broadcast))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", SIZES[1:])
def test_messages_between_two_ranks_arrive_in_their_order(world_size: int, dtype: str) -> None:
    """Round the ranks, rank 0 first; the last one has what the first one sent."""

    def pass_on(ranks: Any, rank: int) -> None:
        for number in range(20):
            data = make(dtype, 10 + number, number)
            if rank > 0:
                data[:] = 0
                ranks.recv(data, rank - 1)
            np.testing.assert_array_equal(data, make(dtype, 10 + number, number))
            if rank + 1 < world_size:
                ranks.send(data, rank + 1)

    check_all(run_ranks(world_size, pass_on))


def test_no_rank_leaves_a_barrier_before_the_last_has_come() -> None:
    arrived: list[int] = []

    def meet(ranks: Any, rank: int) -> int:
        time.sleep(0.01 * rank)
        arrived.append(rank)
        ranks.barrier()
        return len(arrived)

    assert run_ranks(4, meet) == [4, 4, 4, 4]


def test_arguments_are_refused_by_name_and_the_ranks_go_on() -> None:
    def call(ranks: Any, rank: int) -> None:
        x = np.zeros(4, np.float32)
        with pytest.raises(InvalidArgument, match="expected 2 counts, one a rank, got 3"):
            ranks.all_gather(x, x, [1, 2, 3])
        with pytest.raises(InvalidArgument, match="expected counts of 0 or more, got -1"):
            ranks.all_gather(x, x, [5, -1])
        with pytest.raises(InvalidArgument, match="expected 5 elements of this rank by the counts"):
            ranks.all_gather(x, np.zeros(10, np.float32), [5, 5])
        with pytest.raises(InvalidArgument, match="all_reduce: expected a contiguous tensor in"):
            ranks.all_reduce(np.zeros(4, np.int64))
        with pytest.raises(InvalidArgument, match=r"a multiple of 2, or counts"):
            ranks.all_to_all(np.zeros(3, np.float32), np.zeros(3, np.float32))
        three = np.zeros(3, np.float32)
        sent, received = ([1, 2], [2, 1]) if rank == 0 else ([2, 1], [1, 2])
        with pytest.raises(InvalidArgument, match="sends itself 1 elements and receives 2"):
            ranks.all_to_all(three, three.copy(), sent, received)
        with pytest.raises(InvalidArgument, match=rf"send: expected another rank than {rank}"):
            ranks.send(x, rank)
        with pytest.raises(InvalidArgument, match=r"broadcast: expected root in \[0, 2\), got 2"):
            ranks.broadcast(x, 2)
        ranks.barrier()

    check_all(run_ranks(2, call))


@pytest.mark.parametrize("fault", ["op", "dtype", "size", "counts", "root"])
def test_ranks_whose_calls_do_not_agree_fail_together(fault: str, kind: str) -> None:
    if (fault, kind) == ("root", "tcp"):
        pytest.skip("who broadcasts hears nobody; the next call of others finds it out")

    def call(ranks: Any, rank: int) -> None:
        is_odd = rank == 1
        x = np.zeros(4, np.float16 if fault == "dtype" and is_odd else np.float32)
        if fault == "op" and is_odd:
            ranks.barrier()
        elif fault == "size" and is_odd:
            ranks.all_reduce(np.zeros(5, np.float32))
        elif fault == "counts":
            counts = [4, 3, 3] if is_odd else [4, 4, 4]
            mine = np.zeros(counts[rank], np.float32)
            ranks.all_gather(mine, np.zeros(sum(counts), np.float32), counts)
        elif fault == "root":
            ranks.broadcast(x, rank)
        else:
            ranks.all_reduce(x)

    for error in run_ranks(3, call):
        assert isinstance(error, DeviceError)
        assert "exchange among ranks failed on rank" in str(error)


def test_a_message_of_another_size_fails_both_ranks() -> None:
    def call(ranks: Any, rank: int) -> None:
        if rank == 0:
            ranks.send(np.zeros(3, np.float32), 1)
        else:
            ranks.recv(np.zeros(4, np.float32), 0)

    errors = run_ranks(2, call)
    if KIND == "tcp":  # what was sent is on its way
        assert errors[0] is None
        assert "send of 16 bytes in float32 is expected, and send of 12 in" in str(errors[1])
        return
    for error in errors:
        assert isinstance(error, DeviceError)
        assert "rank 0 sends float32 [3], and rank 1 receives float32 [4]" in str(error)


@pytest.mark.parametrize("call", ["all_reduce", "recv"])
def test_a_rank_that_has_gone_fails_the_others_at_once(call: str) -> None:
    """Its communicator has ended with its thread; nobody waits for the limit."""

    def work(ranks: Any, rank: int) -> None:
        if rank == 2:
            raise RuntimeError("this rank dies")
        x = np.zeros(4, np.float32)
        if call == "all_reduce":
            ranks.all_reduce(x)
        elif rank == 0:
            ranks.recv(x, 2)
        else:
            ranks.recv(x, 0)

    began = time.monotonic()
    errors = run_ranks(3, work, timeout_s=3600)
    assert time.monotonic() - began < PATIENCE_S
    assert [type(e) for e in errors] == [DeviceError, DeviceError, RuntimeError]
    assert all(re.search(r"rank [02](: it)? has gone", str(e)) for e in errors[:2])


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_limit() -> None:
    group = testing.communicator_group(KIND, 3, timeout_s=0.1)
    ends = [group.join(rank, testing.make_backend("ref")) for rank in range(3)]
    errors: list[str] = []

    def wait(rank: int) -> None:
        with pytest.raises(DeviceError) as error:
            ends[rank].barrier()
        errors.append(str(error.value))
        with pytest.raises(DeviceError, match="rank 1 has not come within 100 ms"):
            ends[rank].check()

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(errors) == 2
    late = "it has gone" if KIND == "tcp" else "rank 1 has not come within 100 ms"
    with pytest.raises(DeviceError, match=rf"rank 1 of 3.*: {late}"):
        ends[1].all_reduce(np.zeros(4, np.float32))


def test_an_abort_ends_the_wait_of_every_rank() -> None:
    group = testing.communicator_group(KIND, 3, timeout_s=3600)
    ends = [group.join(rank, testing.make_backend("ref")) for rank in range(3)]
    errors: list[str] = []

    def wait(rank: int) -> None:
        with pytest.raises(DeviceError) as error:
            ends[rank].all_reduce(np.zeros(4, np.float32))
        errors.append(str(error.value))

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    ends[2].abort()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(errors) == 2
    told = "rank [012]: it has gone" if KIND == "tcp" else "rank 2 of 3 was aborted"
    assert all(re.search(told, error) for error in errors)


def test_a_communicator_may_outlive_its_group() -> None:
    ranks = testing.communicator_group("shm", 1).join(0, testing.make_backend("ref"))
    data = np.arange(4, dtype=np.float32)
    ranks.all_reduce(data)
    assert ranks.description == "threads of one process, rank 0 of 1"
    np.testing.assert_array_equal(data, np.arange(4))
