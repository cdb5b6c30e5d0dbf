"""A rank gets exactly its share of a weight, however the file has it, and a plan says its size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
from checkpoints import checkpoint, copy_checkpoint
from llmserve import _core_testing
from llmserve.errors import NotSupported
from safetensors.numpy import load_file, save_file

testing: Any = _core_testing
GATE = "model.layers.0.mlp.gate_proj.weight"
N, K = 10, 12
# Of three blocks a row, and as many heads as fit.
WIDE = {"hidden_size": 96, "intermediate_size": 160}


def part(name: str, size: int, **fields: int) -> Any:
    return testing.WeightPart(name=name, size=size, **fields)


def saved(folder: Path, **tensors: np.ndarray) -> Path:
    """A checkpoint with these tensors alone."""
    if not folder.exists():
        copy_checkpoint(checkpoint("llama"), folder)
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(arrays, folder / "model.safetensors")
    return folder


def load(path: Path, parts: list[Any], in_features: int, **fields: Any) -> list[Any]:
    request = testing.WeightRequest(path=str(path), parts=parts, in_features=in_features, **fields)
    return testing.load_linear(request)


def shares(count: int, num_ranks: int) -> list[slice]:
    """Consecutive, as even as can be, the first ones larger."""
    sizes = [len(part) for part in np.array_split(np.arange(count), num_ranks)]
    ends = np.cumsum(sizes)
    return [slice(int(end - size), int(end)) for end, size in zip(ends, sizes, strict=True)]


@pytest.fixture
def matrix() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((N, K)).astype(np.float32)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 10])
@pytest.mark.parametrize("axis", ["output", "input"])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("quantization", ["", "int8"])
def test_ranks_have_the_rows_or_columns_of_a_matrix(
    tmp_path: Path,
    matrix: np.ndarray,
    num_ranks: int,
    axis: str,
    is_transposed: bool,
    quantization: str,
) -> None:
    whole = saved(tmp_path / "whole", w=matrix.T if is_transposed else matrix)
    count = N if axis == "output" else K
    for rank, share in enumerate(shares(count, num_ranks)):
        mine = matrix[share] if axis == "output" else matrix[:, share]
        alone = saved(tmp_path / "alone", w=mine)
        loaded = load(
            whole,
            [part("w", N)],
            K,
            is_transposed=is_transposed,
            quantization=quantization,
            axis=axis,
            rank=rank,
            num_ranks=num_ranks,
        )
        assert loaded == load(
            alone, [part("w", len(mine))], mine.shape[1], quantization=quantization
        )


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_stacked_parts_are_cut_by_the_same_heads(
    tmp_path: Path, matrix: np.ndarray, num_ranks: int
) -> None:
    queries = np.random.default_rng(1).standard_normal((6 * 4, K)).astype(np.float32)
    keys = np.random.default_rng(2).standard_normal((3 * 4, K)).astype(np.float32)
    whole = saved(tmp_path / "whole", q=queries, k=keys)
    for rank, share in enumerate(shares(3, num_ranks)):
        q = queries.reshape(3, 8, K)[share].reshape(-1, K)
        k = keys.reshape(3, 4, K)[share].reshape(-1, K)
        alone = saved(tmp_path / "alone", qk=np.concatenate([q, k]))
        loaded = load(
            whole, [part("q", 24), part("k", 12)], K, rank=rank, num_ranks=num_ranks, num_units=3
        )
        assert loaded == load(alone, [part("qk", len(q) + len(k))], K)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_runs_of_a_fused_tensor_are_cut_between_runs(tmp_path: Path, num_ranks: int) -> None:
    # Three groups of two queries, a key and a value, each of four rows.
    fused = np.random.default_rng(3).standard_normal((3, 16, K)).astype(np.float32)
    whole = saved(tmp_path / "whole", qkv=fused.reshape(-1, K))
    runs = [(0, 8), (8, 4), (12, 4)]
    parts = [part("qkv", size, begin=begin, of=48, num_runs=3, stride=16) for begin, size in runs]
    for rank, share in enumerate(shares(3, num_ranks)):
        rows = [fused[share, begin : begin + size].reshape(-1, K) for begin, size in runs]
        alone = saved(tmp_path / "alone", w=np.concatenate(rows))
        loaded = load(whole, parts, K, rank=rank, num_ranks=num_ranks, num_units=3)
        assert loaded == load(alone, [part("w", sum(map(len, rows)))], K)


def test_vectors_go_with_the_output_columns_alone(tmp_path: Path) -> None:
    bias = np.arange(10, dtype=np.float32)
    path = saved(tmp_path / "model", b=bias)
    for axis, want in (("output", bias[4:7]), ("input", bias)):
        request = testing.WeightRequest(
            path=str(path), parts=[part("b", 10)], axis=axis, rank=1, num_ranks=3
        )
        assert testing.load_vector(request) == list(want)


class Model:
    """A model whose rows of K are three blocks, and a file of it of which one tensor is cut."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._kind = folder, kind

    def write(self, name: str, share: tuple[slice, slice] | None = None) -> Path:
        quantize = gguf_files.in_format(self._kind) if self._kind != "F32" else gguf_files.as_f32

        def cut(name: str, array: np.ndarray) -> Any:
            return quantize(name, array[share] if share and name == GATE else array)

        source = checkpoint("llama", **WIDE)
        return gguf_files.write_gguf(self._folder / name, source, cut)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("axis", ["output", "input"])
def test_ranks_have_whole_blocks(tmp_path: Path, kind: str, num_ranks: int, axis: str) -> None:
    model = Model(tmp_path, kind)
    whole = model.write("whole.gguf")
    num_units = 0 if axis == "output" else 3
    for rank in range(num_ranks):
        if axis == "output":
            share = (shares(160, num_ranks)[rank], slice(None))
        else:
            blocks = shares(3, num_ranks)[rank]
            share = (slice(None), slice(32 * blocks.start, 32 * blocks.stop))
        alone = model.write("alone.gguf", share)
        rows, columns = np.empty((160, 96))[share].shape
        fields: dict[str, Any] = dict(axis=axis, rank=rank, num_ranks=num_ranks)
        loaded = load(whole, [part(GATE, 160)], 96, num_units=num_units, **fields)
        assert loaded[0][2], "kept in blocks"
        assert loaded == load(alone, [part(GATE, rows)], columns)


def test_a_share_that_cuts_a_block_is_refused_by_name(tmp_path: Path) -> None:
    whole = Model(tmp_path, "Q8_0").write("whole.gguf")
    with pytest.raises(NotSupported) as error:
        load(whole, [part(GATE, 160)], 96, axis="input", rank=1, num_ranks=2)
    assert f'tensor "{GATE}": elements 48 to 96 of a row' in str(error.value)
    assert "no whole blocks of Q8_0, of 32 elements" in str(error.value)


def test_heads_that_a_file_has_as_rotary_pairs_are_cut_in_the_models_order(
    tmp_path: Path,
) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    source = checkpoint("llama", **WIDE)
    whole = Model(tmp_path, "F32").write("whole.gguf")
    values = load_file(source / "model.safetensors")[name]
    for rank in range(2):
        alone = saved(tmp_path / "alone", w=values[48 * rank : 48 * rank + 48])
        loaded = load(whole, [part(name, 96)], 96, rank=rank, num_ranks=2, num_units=2)
        assert loaded == load(alone, [part("w", 48)], 96)
