"""Rows that fill a recorded batch up see whatever lies in the first block: here NaN."""

import numpy as np
import pytest
from checkpoints import checkpoint, copy_checkpoint
from llmserve import _core_testing

REASON = _core_testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]

BLOCK = 8
NAN_TOKEN = 7
CONTEXTS = [5, 21, 9]  # of the real rows, in blocks 1 and later


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A token whose embedding overflows in the layer norm, so that its keys and values are NaN."""
    from safetensors.numpy import load_file, save_file

    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 1}
    folder = copy_checkpoint(checkpoint("gpt2", **sizes), tmp_path_factory.mktemp("nan"))
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.wte.weight"][NAN_TOKEN] = 3e38
    save_file(tensors, folder / "model.safetensors")
    return folder


def tables_of(contexts):
    """Block tables of sequences one after another, from block 1 on."""
    counts = [-(-n // BLOCK) for n in contexts]
    tables = np.zeros((len(contexts), max(counts)), np.int32)
    begin = 1
    for row, count in zip(tables, counts, strict=True):
        row[:count] = range(begin, begin + count)
        begin += count
    return tables


def poison(model):
    """Fills the first block's first slot with NaN."""
    _, logits = model.forward([NAN_TOKEN], [0], [0], [0, 1], [1], np.zeros((1, 1), "i4"), [0])
    assert np.isnan(logits).all()


def decode(model, num_rows):
    """Logits of the last token of each context, and of as many rows beside them as there are."""
    tables = tables_of(CONTEXTS)
    for context, table in zip(CONTEXTS, tables, strict=True):
        n = context - 1
        slots = [int(table[i // BLOCK]) * BLOCK + i % BLOCK for i in range(n)]
        tokens = [20 + (3 * i + context) % 90 for i in range(n)]
        model.forward(tokens, list(range(n)), slots, [0, n], [n], table[None], [n - 1])
    num_pads = num_rows - len(CONTEXTS)
    last = [n - 1 for n in CONTEXTS]
    slots = [int(t[i // BLOCK]) * BLOCK + i % BLOCK for i, t in zip(last, tables, strict=True)]
    _, logits = model.forward(
        [11, 12, 13] + [0] * num_pads,
        last + [0] * num_pads,
        slots + [-1] * num_pads,
        list(range(num_rows + 1)),
        CONTEXTS + [1] * num_pads,
        np.concatenate([tables, np.zeros((num_pads, tables.shape[1]), np.int32)]),
        list(range(num_rows)),
    )
    return logits


@pytest.mark.parametrize("num_rows", [4, 16])
@pytest.mark.parametrize("gemm", ["auto", "cublaslt", "invariant", "plain"])
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32", "kv_dtype": "float32"},
        {"dtype": "bfloat16", "kv_dtype": "bfloat16"},
        {"dtype": "bfloat16", "kv_dtype": "fp8"},
    ],
    ids=["float32", "bfloat16", "fp8"],
)
def test_rows_beside_rows_of_nan_keep_their_bits(path, options, gemm, num_rows, monkeypatch):
    monkeypatch.setenv("LLMSERVE_CUDA_GEMM", gemm)
    sizes = {"block_size": BLOCK, "num_blocks": 16}
    try:
        model = _core_testing.Model(str(path), device="cuda", **sizes, **options)
    except NotImplementedError as error:
        pytest.skip(str(error))
    # One model, since another one may choose other algorithms of cuBLASLt.
    clean = decode(model, num_rows)
    poison(model)
    beside_nan = decode(model, num_rows)
    real = slice(len(CONTEXTS))
    assert np.isfinite(clean).all()
    assert np.isnan(beside_nan[len(CONTEXTS) :]).all()  # they did see it
    np.testing.assert_array_equal(beside_nan[real], clean[real])
