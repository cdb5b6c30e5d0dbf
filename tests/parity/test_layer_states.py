"""Hidden states between layers: those of transformers, and of no influence on anything else."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoints import FAMILIES, VOCAB_SIZE, checkpoint, reference_model
from llmserve.errors import NotSupported
from model_runner import PagedRunner

# Two f32 implementations differ by the order of sums: a few 1e-6 a layer of values near 1, of which
# embeddings scaled by sqrt(E) are up to 30.
TOLERANCE = 2e-4
TOKENS = [int(t) for t in np.random.default_rng(3).integers(3, VOCAB_SIZE, 37)]


def num_layers(family: str) -> int:
    return int(reference_model(checkpoint(family)).config.get_text_config().num_hidden_layers)


@pytest.mark.parametrize("device", ["cpu", "ref"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "gpt2", "olmo2"])
def test_states_that_enter_each_layer_are_those_of_transformers(family: str, device: str) -> None:
    import torch

    model = reference_model(checkpoint(family))
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    layers = list(range(len(expected) - 1))
    runner = PagedRunner(checkpoint(family), device=device, dtype="float32")
    runner.step([(runner.add_sequence(), TOKENS)], layers, range(len(TOKENS)))
    states = runner.model.layer_states(len(layers), len(TOKENS))
    for layer in layers:
        np.testing.assert_allclose(
            states[layer], expected[layer][0].numpy(), atol=TOLERANCE, rtol=TOLERANCE
        )


@pytest.mark.parametrize("family", sorted({"llama", "gemma2", "gpt2"} & set(FAMILIES)))
def test_wanted_states_change_nothing_and_are_the_same_in_any_chunks(family: str) -> None:
    last = num_layers(family)
    wanted = [0, 1, last]
    path = checkpoint(family)
    plain = PagedRunner(path, device="cpu", dtype="float32")
    hidden, logits = plain.step([(plain.add_sequence(), TOKENS)])
    whole = PagedRunner(path, device="cpu", dtype="float32")
    also = whole.step([(whole.add_sequence(), TOKENS)], wanted, range(len(TOKENS)))
    np.testing.assert_array_equal(also[0], hidden)
    np.testing.assert_array_equal(also[1], logits)
    states = whole.model.layer_states(len(wanted), len(TOKENS))
    chunked = PagedRunner(path, device="cpu", dtype="float32")
    sequence = chunked.add_sequence()
    for begin, end in [(0, 16), (16, 17), (17, len(TOKENS))]:
        chunked.step([(sequence, TOKENS[begin:end])], wanted, range(end - begin))
        part = chunked.model.layer_states(len(wanted), end - begin)
        np.testing.assert_array_equal(part, states[:, begin:end])


def test_what_leaves_the_last_layer_is_normed_to_the_hidden_states() -> None:
    model = reference_model(checkpoint("llama"))
    last = num_layers("llama")
    runner = PagedRunner(checkpoint("llama"), device="cpu", dtype="float32")
    hidden, _ = runner.step([(runner.add_sequence(), TOKENS)], [last], [5, 30])
    states = runner.model.layer_states(1, 2)[0]
    weight = model.model.norm.weight.detach().numpy()
    scale = 1 / np.sqrt(np.mean(states**2, axis=1, keepdims=True) + model.config.rms_norm_eps)
    np.testing.assert_allclose(states * scale * weight, hidden[[5, 30]], rtol=1e-5, atol=1e-6)


def test_a_group_of_several_ranks_that_no_layer_uses_is_refused_by_name() -> None:
    runner = PagedRunner(checkpoint("llama"), device="cpu", dtype="float32")
    runner.model.set_pp(2)
    with pytest.raises(NotSupported, match="group pp has 2 ranks, and no layer of this model"):
        runner.step([(runner.add_sequence(), TOKENS)])
    runner.model.set_pp(1)
    runner.step([(runner.add_sequence(), TOKENS)])
