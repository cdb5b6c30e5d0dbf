"""A layer that ends a branch, among ranks that cut it by columns, along K, or as a tree."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import checkpoint, copy_checkpoint
from llmserve import _core_testing
from safetensors.numpy import save_file

testing: Any = _core_testing
M, N, K = 3, 20, 8 * 32
PATIENCE_S = 60
BACKENDS = ["ref", "cpu"]
# Elements of K that stay together: as many as leave no rank more than a sixteenth above the others.
UNIT = {2: 64, 3: 4, 5: 2}


@pytest.fixture
def layer(tmp_path: Path) -> dict[str, Any]:
    """A checkpoint with one layer and its bias."""
    rng = np.random.default_rng(0)
    copy_checkpoint(checkpoint("llama"), tmp_path / "model")
    tensors = {
        "w.weight": rng.standard_normal((N, K)).astype(np.float32),
        "w.bias": rng.standard_normal(N).astype(np.float32),
    }
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    return {"path": str(tmp_path / "model"), "tensors": tensors}


def run(
    layer: dict[str, Any], num_ranks: int, x: np.ndarray, *, backend: str = "cpu", **fields: Any
) -> list[np.ndarray]:
    """What each rank has, added to a matrix of ones."""
    fields = {"name": "w", "out_features": N, "in_features": K, "has_bias": True, **fields}
    asked = testing.OutputLayer(path=layer["path"], **fields)
    kind = "single" if num_ranks == 1 else "shm"
    group = testing.communicator_group(kind, num_ranks, timeout_s=PATIENCE_S)
    outs = [np.ones((len(x), N), np.float32) for _ in range(num_ranks)]
    failures: list[Exception] = []

    def work(rank: int) -> None:
        runs_on = testing.make_backend(backend)
        ranks = group.join(rank, runs_on)
        try:
            testing.run_output_layer(asked, ranks, runs_on, x, outs[rank], accumulate=True)
        except Exception as error:
            failures.append(error.with_traceback(None))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
        assert not thread.is_alive(), "a rank hangs"
    if failures:
        raise failures[0]
    return outs


def product(layer: dict[str, Any], x: np.ndarray, columns: slice, backend: str) -> np.ndarray:
    """Of some of K by themselves, with the bias where they are the first."""
    runs_on = testing.make_backend(backend)
    weight = np.ascontiguousarray(layer["tensors"]["w.weight"][:, columns])
    packed = runs_on.pack_linear([weight], "float32")
    bias = layer["tensors"]["w.bias"] if columns.start == 0 else None
    return np.array(runs_on.linear(np.ascontiguousarray(x[:, columns]), packed, bias=bias))


def tree_sum(parts: list[np.ndarray]) -> np.ndarray:
    """As csrc/layers/segment_sum.h has it."""
    if len(parts) == 1:
        return parts[0]
    left = 1 << ((len(parts) - 1).bit_length() - 1)
    return np.add(tree_sum(parts[:left]), tree_sum(parts[left:]), dtype=np.float32)


def inputs(rows: int = M, width: int = K) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((rows, width)).astype(np.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 7, 8])
def test_a_tree_adds_eight_products_whoever_has_them(
    layer: dict[str, Any], num_ranks: int, backend: str
) -> None:
    x = inputs()
    parts = [
        product(layer, x, slice(begin, begin + K // 8), backend) for begin in range(0, K, K // 8)
    ]
    for out in run(layer, num_ranks, x, backend=backend, cut="tree"):
        np.testing.assert_array_equal(out, np.ones((M, N), np.float32) + tree_sum(parts))


def test_more_ranks_than_segments_share_the_columns(layer: dict[str, Any]) -> None:
    x = inputs()
    one = run(layer, 1, x, cut="tree")[0]
    for out in run(layer, 10, x, cut="tree"):
        np.testing.assert_array_equal(out, one)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_rows_are_added_in_the_order_of_the_ranks(
    layer: dict[str, Any], num_ranks: int, backend: str
) -> None:
    x = inputs()
    runs = np.array_split(np.arange(K // UNIT[num_ranks]), num_ranks)
    parts = []
    for units in runs:
        begin = int(units[0]) * UNIT[num_ranks]
        parts.append(product(layer, x, slice(begin, begin + len(units) * UNIT[num_ranks]), backend))
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    outs = run(layer, num_ranks, x, backend=backend, cut="rows")
    for out in outs:
        np.testing.assert_array_equal(out, np.ones((M, N), np.float32) + expected)


def test_one_rank_that_cuts_rows_has_the_bits_of_columns(layer: dict[str, Any]) -> None:
    x = inputs()
    for cut in ("columns", "rows"):
        whole = np.ones((M, N), np.float32) + product(layer, x, slice(0, K), "cpu")
        np.testing.assert_array_equal(run(layer, 1, x, cut=cut)[0], whole)


@pytest.mark.parametrize("quantization", ["int8", "int4", "int4-g32", "int4-g32-asym"])
def test_a_tree_of_integers_has_the_same_bits_at_any_number_of_ranks(
    layer: dict[str, Any], quantization: str
) -> None:
    x = inputs()
    one = run(layer, 1, x, cut="tree", quantization=quantization)[0]
    for num_ranks in (2, 3, 4):
        for out in run(layer, num_ranks, x, cut="tree", quantization=quantization):
            np.testing.assert_array_equal(out, one)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"),
    [(32, 8), (32, 32), (14, 2), (12, 12), (8, 1), (3, 1), (15, 5), (48, 16), (6, 3), (1, 1)],
)
def test_a_trees_heads_are_the_same_whoever_has_them(num_heads: int, num_kv_heads: int) -> None:
    one = testing.head_cut(0, 1, num_heads, num_kv_heads, "tree")
    whole = one["segments"]
    assert sum(size for _, size in whole) == num_heads
    assert one["num_segments"] == len(whole) <= 8
    for num_ranks in range(2, 12):
        ranks = [
            testing.head_cut(r, num_ranks, num_heads, num_kv_heads, "tree")
            for r in range(num_ranks)
        ]
        assert {rank["num_segments"] for rank in ranks} == {len(whole)}
        if ranks[0]["shares_products"]:
            assert [segment for rank in ranks for segment in rank["segments"]] == whole
            for rank in ranks:
                first, count = rank["heads"]
                assert rank["segments"][0][0] == first
                assert sum(size for _, size in rank["segments"]) == count
        else:
            assert all(rank["segments"] == whole for rank in ranks)
        for rank in ranks:
            first, count = rank["heads"]
            group = num_heads // num_kv_heads
            kv_first, kv_count = rank["kv_heads"]
            assert kv_first * group <= first
            assert first + count <= (kv_first + kv_count) * group
            assert kv_count == 1 or count == kv_count * group, "groups are whole"


def test_two_ranks_share_the_products_of_usual_models() -> None:
    for num_heads, num_kv_heads in ((32, 8), (14, 2), (12, 12), (40, 8), (8, 1)):
        for num_ranks in (2, 4, 8):
            for cut in ("rows", "tree"):
                ranks = [
                    testing.head_cut(r, num_ranks, num_heads, num_kv_heads, cut)
                    for r in range(num_ranks)
                ]
                assert all(rank["shares_products"] for rank in ranks), (num_heads, num_ranks, cut)
