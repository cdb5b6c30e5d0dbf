"""Heads for tests: random ones in the layouts that are published, and ones that are always right,
of a target that draws each token by the one before alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from checkpoints import make_checkpoint

sys.path.insert(0, str(Path(__file__).parents[3]))

from tools.draft_heads.export import write_head
from tools.draft_heads.heads import Eagle, Eagle3, Medusa
from tools.draft_heads.target import TargetModel

LAYERS = (0, 1, 1)  # whose input is read, of the tiny targets, which have two


def randomize(head: torch.nn.Module, seed: int) -> None:
    """Weights that keep activations near 1, rounded to bfloat16 as they are written."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scaled = 1 + 0.2 * noise if noise.ndim == 1 else noise / noise.shape[1] ** 0.5
            parameter.copy_(scaled.to(torch.bfloat16))


def random_head(
    method: str,
    target: Path,
    folder: Path,
    *,
    seed: int = 3,
    speculators: bool = False,
    layers: tuple[int, ...] = LAYERS,
) -> tuple[Any, TargetModel]:
    """Writes a head of no use to `folder`, and gives it and its target in torch."""
    model = TargetModel(str(target))
    shape = model.shape
    head: Eagle | Eagle3 | Medusa
    if method == "eagle3":
        head = Eagle3(shape, torch.arange(7, shape.vocab_size, 3))
    elif method == "eagle":
        head = Eagle(shape, model.head)
    else:
        head = Medusa(shape, model.head, 3, num_layers=2)
    randomize(head, seed)
    write_head(
        head,
        folder,
        shape,
        target=str(target),
        layers=layers,
        max_positions=256,
        speculators=speculators,
        num_tokens=3,
    )
    return head.eval(), model


# A target whose layers add nothing: a token's final state is its embedding, which has a one of its
# own and one that all tokens have, so that the next token hangs on this one alone.
VOCAB = 320  # the tokenizer's
SIZE = 384  # E
_OWN = 13.875  # (E / 2)^0.5 in bfloat16: a norm leaves the embedding as it is
_CHAIN = 7  # the most likely token behind t is t * 7 + 3


def token_table() -> torch.Tensor:
    table = torch.zeros(VOCAB, SIZE)
    table[:, :VOCAB] = _OWN * torch.eye(VOCAB)
    table[:, VOCAB] = _OWN
    return table


def next_tokens(steps: int = 1) -> torch.Tensor:
    """Logits [V, E] of the token `steps` behind one whose embedding is read."""
    noise = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5))
    following = torch.arange(VOCAB)
    for _ in range(steps):
        following = (following * _CHAIN + 3) % VOCAB
    noise[following, torch.arange(VOCAB)] += 7
    head = torch.zeros(VOCAB, SIZE)
    head[:, :VOCAB] = noise / _OWN
    return head.to(torch.bfloat16).float()


def clear_layers(layers: Any) -> None:
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)


def bigram_target(folder: Path) -> Path:
    model = make_checkpoint(
        folder,
        "llama",
        vocab_size=VOCAB,
        hidden_size=SIZE,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=96,
        eos_token_id=None,
        max_position_embeddings=512,
    )
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(token_table())
        model.lm_head.weight.copy_(next_tokens())
        model.model.norm.weight.fill_(1.0)
        clear_layers(model.model.layers)
    model.save_pretrained(folder)
    return folder


def right_head(method: str, target: Path, folder: Path) -> Path:
    """A head whose guesses are distributed as the target's draws; of Medusa, the most likely."""
    model = TargetModel(str(target))
    shape = model.shape
    head: Eagle | Eagle3 | Medusa
    eye = torch.eye(SIZE)
    with torch.no_grad():
        if method == "eagle":
            head = Eagle(shape, model.head)
            clear_layers(head.layers)
            head.fc.weight.copy_(torch.cat([eye, torch.zeros(SIZE, SIZE)], 1))
            head.fc.bias.zero_()
        elif method == "eagle3":
            head = Eagle3(shape, torch.arange(VOCAB))
            _make_right(head)
        else:
            head = Medusa(shape, model.head, 3)
            for place, (block, out) in enumerate(head.heads):
                for parameter in block.parameters():
                    parameter.zero_()
                out.weight.copy_(next_tokens(place + 2))
    write_head(head, folder, shape, target=str(target), layers=LAYERS, max_positions=512)
    if method == "eagle3":
        change_config(folder, norm_before_residual=True)
    return folder


def change_config(folder: Path, **fields: object) -> None:
    """Sets fields of a config.json; None takes one out."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text(encoding="utf-8")), **fields}
    config = {name: value for name, value in config.items() if value is not None}
    file.write_text(json.dumps(config), encoding="utf-8")


def _make_right(head: Eagle3) -> None:
    """Each row sees itself alone, takes its embedding over, and reads nothing else: features are
    cleared by their norm."""
    head.fc.weight.zero_()
    layer = head.midlayer
    clear_layers([layer])
    layer.hidden_norm.weight.zero_()
    head.norm.weight.fill_(1.0)
    head.lm_head.weight.copy_(next_tokens())
    attention = layer.self_attn
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight.zero_()
    # Queries and keys are one vector at all positions, which the rotation turns: a score falls
    # with the distance.
    attention.q_proj.weight[:, VOCAB] = 8.0
    attention.k_proj.weight[:, VOCAB] = 8.0
    attention.v_proj.weight[:, :SIZE] = torch.eye(SIZE)
    attention.o_proj.weight.copy_(torch.eye(SIZE))


def add_draft_layer(folder: Path, num_layers: int, vocab_size: int, *, count: int = 1) -> None:
    """Adds layers that draft to a checkpoint's file, behind its layers, with random weights."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(9)
    last = f"model.layers.{num_layers - 1}."
    size = tensors["model.norm.weight"].shape[0]

    def noise(*shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator)
        return 1 + 0.2 * drawn if len(shape) == 1 else drawn / shape[-1] ** 0.5

    shapes = {n.removeprefix(last): t.shape for n, t in tensors.items() if n.startswith(last)}
    for own in (f"model.layers.{num_layers + i}." for i in range(count)):
        for name, shape in shapes.items():
            tensors[own + name] = noise(*shape)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{own}{name}.weight"] = noise(size)
        tensors[f"{own}eh_proj.weight"] = noise(size, 2 * size)
        tensors[f"{own}embed_tokens.weight"] = noise(vocab_size, size) * size**0.5
        tensors[f"{own}shared_head.head.weight"] = noise(vocab_size, size)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, num_nextn_predict_layers=count)


def add_mtp_block(folder: Path) -> dict[str, torch.Tensor]:
    """Adds the block that drafts of ERNIE 4.5, like the first layer, with random weights; gives its
    tensors by their names without "model.mtp_"."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(9)
    size = tensors["model.norm.weight"].shape[0]
    shapes = {
        name.replace("model.layers.0.", "block.0."): tensor.shape
        for name, tensor in tensors.items()
        if name.startswith("model.layers.0.")
    }
    shapes["emb_norm.0.weight"] = shapes["hidden_norm.0.weight"] = torch.Size([size])
    shapes["linear_proj.0.weight"] = torch.Size([size, 2 * size])
    own = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator)
        is_norm = "norm" in name
        own[name] = 1 + 0.2 * drawn if is_norm else drawn / shape[-1] ** 0.5
    added = {f"model.mtp_{name}": tensor for name, tensor in own.items()}
    save_file({**tensors, **added}, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, num_nextn_predict_layers=1)
    return own
