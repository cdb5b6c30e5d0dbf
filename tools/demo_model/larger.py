"""Grow the demo model to 17 M parameters and train it on, for figures that a small one exaggerates.

    python -m tools.demo_model.larger --work build/larger_model --out build/larger_model/model

It has the demo's tokenizer and corpus, and does not ship. It begins as the shipped model: each
hidden state as a random rotation of it in twice the room, and new heads and neurons that add
nothing yet, so that a few hundred steps are enough. Everything follows from fixed seeds and the
shipped weights, nothing is downloaded, and the same command goes on from the last checkpoint in
--work. Matrix products are in bfloat16.

After Chen, Goodfellow and Shlens 2016, "Net2Net: accelerating learning via knowledge transfer".
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .data import encode_documents
from .evaluate import NUM_HELD_OUT, held_out_windows, perplexity
from .export import save_weights
from .recipe import INIT_SEED, TARGET, Recipe, next_token_loss
from .train import PACKAGE_DEMO, Job, train

LARGER = Recipe(
    "larger",
    hidden_size=512,
    intermediate_size=1536,
    num_layers=TARGET.num_layers,
    num_heads=16,
    num_kv_heads=4,
    matrix_lr=0.01,
    other_lr=1e-3,
    windows_per_step=16,
    long_from=1.0,  # the demo has read whole contexts, and copies
    copy_until=0.0,
    warmup=0.05,
    decay=0.9,
)


def grow(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return a model of the shape of LARGER that computes what `model` does.

    With P [512, 256], P^T P = 2: a hidden state h becomes P h, whose mean square is that of h.
    What reads it is W diag(norm) P^T / 2, what writes it is P W.
    """
    torch.manual_seed(INIT_SEED)
    config: LlamaConfig = LARGER.config()
    config.tie_word_embeddings = False
    larger = LlamaForCausalLM(config)
    width = model.config.hidden_size
    rotation = torch.empty(config.hidden_size, width)
    torch.nn.init.orthogonal_(rotation, gain=(config.hidden_size / width) ** 0.5)

    def reading(weight: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        return weight * norm @ rotation.T * (width / config.hidden_size)

    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        larger.model.embed_tokens.weight.copy_(embedding @ rotation.T)
        larger.lm_head.weight.copy_(reading(model.lm_head.weight, model.model.norm.weight))
        for new, old in zip(larger.model.layers, model.model.layers, strict=True):
            norm = old.input_layernorm.weight
            for name in ("q_proj", "k_proj", "v_proj"):
                matrix = getattr(old.self_attn, name).weight
                getattr(new.self_attn, name).weight[: len(matrix)] = reading(matrix, norm)
            _write(new.self_attn.o_proj.weight, rotation @ old.self_attn.o_proj.weight)
            norm = old.post_attention_layernorm.weight
            for name in ("gate_proj", "up_proj"):
                matrix = getattr(old.mlp, name).weight
                getattr(new.mlp, name).weight[: len(matrix)] = reading(matrix, norm)
            _write(new.mlp.down_proj.weight, rotation @ old.mlp.down_proj.weight)
    return larger


def _write(weight: torch.Tensor, known: torch.Tensor) -> None:
    """Set the first columns to `known`, and the others, of new heads and neurons, to zero."""
    weight.zero_()
    weight[:, : known.shape[1]] = known


def bfloat16_loss(
    model: LlamaForCausalLM,
    ids: torch.Tensor,
    teacher: LlamaForCausalLM | None = None,
    names: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return next_token_loss with the products in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        return next_token_loss(model, ids, teacher, names)


def main() -> None:
    """Train what is not trained yet and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=1_500_000, help="tokens of the corpus")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(PACKAGE_DEMO / "model")
    stream = encode_documents(tokenizer, args.tokens, args.work / "tokens.npy")
    shipped = LlamaForCausalLM.from_pretrained(PACKAGE_DEMO / "model", dtype=torch.float32)
    model = grow(shipped)
    checkpoint = args.work / "model.pt"
    train(Job(LARGER, stream, args.steps, checkpoint, args.threads, loss=bfloat16_loss), model)
    loaded = save_weights(model, tokenizer, args.out)
    value = perplexity(loaded, held_out_windows(tokenizer, NUM_HELD_OUT))
    print(f"held-out perplexity {value:.3f}, {loaded.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
