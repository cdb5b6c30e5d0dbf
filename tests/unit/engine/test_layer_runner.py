"""One layer at a time: the hidden states of the whole model, and what linear layers read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoints import checkpoint
from llmserve import InvalidArgument, _core, _core_testing
from safetensors.numpy import load_file

LENGTHS = [5, 17, 1]
NUM_TOKENS = sum(LENGTHS)
TOKENS = [(7 * i * i + 3 * i) % 90 + 3 for i in range(NUM_TOKENS)]
FAMILIES = ["llama", "gemma2", "gpt2", "phi3", "gpt_neox", "qwen3"]


def runner_of(path: Path, **options: object) -> _core.LayerRunner:
    return _core.LayerRunner(str(path), dtype="float32", **options)  # type: ignore[arg-type]


def states_of(path: Path) -> tuple[np.ndarray, int]:
    """[layers + 1, T, E] of the whole model, whose tokens lie in one batch."""
    model = _core_testing.Model(str(path), device="cpu", dtype="float32", num_blocks=64)
    positions = [i for length in LENGTHS for i in range(length)]
    starts = np.cumsum([0, *LENGTHS])
    slots = [64 * b + i for b, length in enumerate(LENGTHS) for i in range(length)]
    tables = [[4 * b + i for i in range(4)] for b in range(len(LENGTHS))]
    num_layers = _core.inspect_checkpoint(str(path))["config"]["num_layers"]
    wanted = list(range(num_layers + 1))
    model.forward(
        token_ids=TOKENS, positions=positions, slots=slots, query_starts=starts, kv_lens=LENGTHS,
        block_tables=tables, logit_rows=[0], wanted_layers=wanted,
        wanted_tokens=list(range(NUM_TOKENS)),
    )  # fmt: skip
    return model.layer_states(len(wanted), NUM_TOKENS), num_layers


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_one_by_one_are_the_model_bit_for_bit_observed_or_not(family: str) -> None:
    path = checkpoint(family)
    expected, num_layers = states_of(path)
    runner = runner_of(path)
    hidden = np.zeros_like(expected[0])
    runner.embed(TOKENS, LENGTHS, hidden)
    assert np.array_equal(hidden, expected[0])
    for layer in range(num_layers):
        runner.load(layer)
        seen: list[tuple[list[str], int]] = []
        observed = hidden.copy()
        keys, values = runner.forward(
            LENGTHS, observed, lambda names, x, seen=seen: seen.append((names, x.shape[1]))
        )
        runner.forward(LENGTHS, hidden)
        assert np.array_equal(hidden, expected[layer + 1])
        assert np.array_equal(observed, hidden)
        assert keys > 0
        assert values > 0
        assert len(seen) == 4  # qkv, output, up, down
        prefix = runner.layer_names(layer)["prefix"]
        assert all(name.startswith(prefix) for names, _ in seen for name in names)


def test_what_is_observed_gives_the_keys_and_values_that_are_stored() -> None:
    path = checkpoint("llama")
    runner = runner_of(path)
    names = runner.layer_names(0)
    weight = load_file(next(path.glob("*.safetensors")))[f"{names['v']}.weight"].astype(np.float32)
    hidden = np.zeros((NUM_TOKENS, weight.shape[1]), np.float32)
    runner.embed(TOKENS, LENGTHS, hidden)
    runner.load(0)
    inputs: list[np.ndarray] = []
    _, largest = runner.forward(LENGTHS, hidden, lambda _, x: inputs.append(np.array(x)))
    assert largest == pytest.approx(np.abs(inputs[0] @ weight.T).max(), rel=1e-5)


def test_a_layer_can_come_from_another_folder(tmp_path: Path) -> None:
    import shutil

    path = checkpoint("llama")
    shutil.copytree(path, tmp_path / "copy")
    runner = runner_of(path)
    hidden = np.ones((4, runner.config["hidden_size"]), np.float32)
    other = hidden.copy()
    runner.load(1)
    runner.forward([4], hidden)
    runner.load(1, str(tmp_path / "copy"))
    runner.forward([4], other)
    assert np.array_equal(hidden, other)


@pytest.mark.parametrize(
    ("lengths", "rows", "message"),
    [
        ([0], 0, "lengths: expected at least 1, got 0"),
        ([40], 40, "at most 32 tokens in 2 sequences"),
        ([1, 1, 1], 3, "at most 32 tokens in 2 sequences"),
        ([3], 4, "hidden: expected the 3 tokens"),
    ],
)
def test_batches_that_do_not_fit_are_refused(lengths: list[int], rows: int, message: str) -> None:
    runner = runner_of(checkpoint("llama"), max_tokens=32, max_sequences=2)
    runner.load(0)
    with pytest.raises(InvalidArgument, match=message):
        runner.forward(lengths, np.zeros((rows, runner.config["hidden_size"]), np.float32))


def test_wrong_calls_are_refused() -> None:
    runner = runner_of(checkpoint("llama"))
    hidden = np.zeros((1, runner.config["hidden_size"]), np.float32)
    with pytest.raises(InvalidArgument, match="no layer is loaded"):
        runner.forward([1], hidden)
    with pytest.raises(InvalidArgument, match="layer_idx: expected 0 to"):
        runner.load(99)
    with pytest.raises(InvalidArgument, match="token_ids: expected ids"):
        runner.embed([10**6], [1], hidden)
    with pytest.raises(InvalidArgument, match=r"hidden: expected a writable float32 array"):
        runner.embed([1], [1], np.zeros((1, 3), np.float32))
    runner.load(0)
    with pytest.raises(ZeroDivisionError):
        runner.forward([1], hidden, lambda *_: 1 // 0)
