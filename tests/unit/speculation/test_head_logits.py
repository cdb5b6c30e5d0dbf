"""Heads compute what their torch twins compute: the logits of each guess, golden, by layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from checkpoints import VOCAB_SIZE, checkpoint, make_checkpoint  # noqa: E402
from heads import (  # noqa: E402
    LAYERS,
    add_draft_layer,
    add_mtp_block,
    change_config,
    random_head,
)
from llmserve import NotSupported, _core_testing  # noqa: E402

IDS = [5, 17, 200, 33, 8, 91, 64, 300, 12, 77, 150, 7, 41]
READ = 9  # of them, by the target; the others are guesses
# f32 sums of some hundred terms near 1, in another order.
TOLERANCE = 2e-4


def engine_logits(target: Path, method: str, head: Path) -> list[np.ndarray]:
    """[N - 1, D] of the first guesses, then of one guess after another behind the last."""
    probe = _core_testing.DraftHead(str(target), method, "" if method == "mtp" else str(head))
    found = [probe.read(IDS[:READ])]
    return found + [probe.go_on(token) for token in IDS[READ : READ + 2]]


def check(found: list[np.ndarray], passes: list[torch.Tensor]) -> None:
    """passes[s]: [T - 1 - s, D], what is guessed s + 2 behind each index."""
    np.testing.assert_allclose(found[0], passes[0][: READ - 1], rtol=TOLERANCE, atol=TOLERANCE)
    for s in (1, 2):
        wanted = passes[s][READ - 2]
        np.testing.assert_allclose(found[s][0], wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("speculators", [False, True])
def test_eagle_3(tmp_path: Path, speculators: bool) -> None:
    target = checkpoint("llama")
    head, model = random_head("eagle3", target, tmp_path, speculators=speculators)
    with torch.no_grad():
        passes = [x[0] for x in head.passes(model.read(torch.tensor([IDS]), LAYERS), 3)]
    check(engine_logits(target, "eagle3", tmp_path), passes)


def test_eagle_3_reads_the_layers_that_its_config_names(tmp_path: Path) -> None:
    target = checkpoint("llama")
    head, model = random_head("eagle3", target, tmp_path)
    change_config(tmp_path, eagle_aux_hidden_state_layer_ids=[1, 0, 0])
    assert _core_testing.DraftHead(str(target), "eagle3", str(tmp_path)).wanted_layers == [0, 1]
    with torch.no_grad():
        passes = [x[0] for x in head.passes(model.read(torch.tensor([IDS]), (1, 0, 0)), 3)]
    check(engine_logits(target, "eagle3", tmp_path), passes)


def variant_passes(head: Any, model: Any, extra: dict[str, Any], config: dict[str, Any]) -> Any:
    """EAGLE-3 one token at a time, in plain causal passes, with what configs may ask for."""
    read = model.read(torch.tensor([IDS]), LAYERS)
    states = torch.cat(read.entering, -1)
    size = states.shape[-1] // 3
    norm = torch.nn.functional.rms_norm
    eps = model.shape.rms_norm_eps
    if "input_norm.weight" in extra:
        states = norm(states, (3 * size,), extra["input_norm.weight"], eps)
    if "fc_norm.0.weight" in extra:
        parts = states.split(size, -1)
        states = torch.cat(
            [norm(x, (size,), extra[f"fc_norm.{i}.weight"], eps) for i, x in enumerate(parts)], -1
        )
    layer = head.midlayer
    features = head.fc(states)[:, : READ - 1]
    passes = []
    for s in range(3):
        embedded = layer.input_layernorm(read.embeddings[:, 1 : READ + s])
        normed = layer.hidden_norm(features)
        x = normed if config.get("norm_before_residual") else features
        x = x + layer.self_attn(torch.cat([embedded, normed], -1), [])
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        out = head.norm(x)
        passes.append(head.lm_head(out)[0])
        recycled = out if config.get("norm_output") else x
        features = torch.cat([features, recycled[:, -1:]], 1)
    return passes


@pytest.mark.parametrize(
    "config",
    [
        {"norm_before_residual": True},
        {"norm_output": True},
        {"norm_before_fc": True, "norm_before_residual": True},
        {"fc_norm": True},
    ],
)
def test_what_configs_of_eagle_3_may_ask_for(tmp_path: Path, config: dict[str, Any]) -> None:
    from safetensors.torch import load_file, save_file

    target = checkpoint("llama")
    head, model = random_head("eagle3", target, tmp_path)
    change_config(tmp_path, **config)
    size = model.shape.hidden_size
    extra = {}
    if "norm_before_fc" in config:
        extra["input_norm.weight"] = torch.linspace(0.5, 1.5, 3 * size)
    if "fc_norm" in config:
        extra |= {f"fc_norm.{i}.weight": torch.linspace(0.5, 1 + i, size) for i in range(3)}
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | extra, file)
    with torch.no_grad():
        passes = variant_passes(head, model, extra, config)
    found = engine_logits(target, "eagle3", tmp_path)
    np.testing.assert_allclose(found[0], passes[0], rtol=TOLERANCE, atol=TOLERANCE)
    for s in (1, 2):
        np.testing.assert_allclose(found[s][0], passes[s][-1], rtol=TOLERANCE, atol=TOLERANCE)


def test_eagle(tmp_path: Path) -> None:
    target = checkpoint("llama")
    head, model = random_head("eagle", target, tmp_path)
    with torch.no_grad():
        read = model.read(torch.tensor([IDS]), LAYERS)
        passes = [(x @ head.head.T)[0] for x in head.features(read, 3)]
    check(engine_logits(target, "eagle", tmp_path), passes)


@pytest.mark.parametrize("converted", [False, True])
def test_medusa(tmp_path: Path, converted: bool) -> None:
    from safetensors.torch import load_file, save_file

    target = checkpoint("llama")
    head, model = random_head("medusa", target, tmp_path)
    tokens = torch.arange(1, VOCAB_SIZE, 2)
    if converted:  # with a part of the vocabulary
        state = load_file(tmp_path / "medusa_lm_head.safetensors")
        (tmp_path / "medusa_lm_head.safetensors").unlink()
        named = {"token_map": tokens}
        for name, tensor in state.items():
            i, j, *rest = name.split(".")
            if rest[0] == "linear":
                named[f"blocks.{i}.layers.{j}.{rest[1]}"] = tensor
            else:
                named[f"lm_heads.{i}.weight"] = tensor[tokens]
        save_file(named, tmp_path / "model.safetensors")
        change_config(
            tmp_path,
            medusa_num_heads=None,
            medusa_num_layers=None,
            num_heads=3,
            num_layers=2,
            truncated_vocab_size=len(tokens),
        )
    with torch.no_grad():
        read = model.read(torch.tensor([IDS]), LAYERS)
        passes = [one(read.hidden)[0] for one in head.heads]
    if converted:
        passes = [x[:, tokens] for x in passes]
    check(engine_logits(target, "medusa", tmp_path), passes)


def check_block(
    folder: Path,
    target: Any,
    table: torch.Tensor,
    project: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    layer: Any,
    rotary: Any,
    answer: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Three guesses in a row of a layer that drafts, computed by torch: embeddings and features are
    projected, go through the layer, and are answered; what it made is the next one's feature."""
    ids = torch.tensor([IDS])
    with torch.no_grad():
        features = target.model(ids).last_hidden_state[:, : READ - 1]
        passes = []
        for s in range(3):
            embedded = table[ids[:, 1 : READ + s]].clone()
            embedded[:, 0] = 0
            x = project(embedded, features)
            positions = torch.arange(x.shape[1])[None]
            later = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)[None, None]
            x = layer(
                x,
                attention_mask=later,
                position_ids=positions,
                position_embeddings=rotary(x, positions),
            )
            passes.append(answer(x)[0])
            features = torch.cat([features, x[:, -1:]], 1)
    found = engine_logits(folder / "target", "mtp", folder)
    np.testing.assert_allclose(found[0], passes[0], rtol=1e-3, atol=1e-3)
    for s in (1, 2):
        np.testing.assert_allclose(found[s][0], passes[s][-1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "glm4_moe_lite"])
@pytest.mark.parametrize("shares", [False, True])
def test_layers_behind_a_models_own(tmp_path: Path, family: str, shares: bool) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    target = make_checkpoint(tmp_path / "target", family, num_hidden_layers=2)
    add_draft_layer(tmp_path / "target", 2, VOCAB_SIZE)
    file = tmp_path / "target" / "model.safetensors"
    tensors = load_file(file)
    if shares:  # GLM's files have neither
        for name in ("embed_tokens", "shared_head.head"):
            del tensors[f"model.layers.2.{name}.weight"]
        save_file(tensors, file, metadata={"format": "pt"})
    own = {
        name.removeprefix("model.layers.2."): tensor
        for name, tensor in tensors.items()
        if name.startswith("model.layers.2.")
    }
    # The twin's layer is the third of a model of three.
    (tmp_path / "twin").mkdir()
    for name in ("config.json", "generation_config.json"):
        (tmp_path / "twin" / name).write_bytes((tmp_path / "target" / name).read_bytes())
    change_config(tmp_path / "twin", num_hidden_layers=3, mlp_layer_types=None)
    save_file(tensors, tmp_path / "twin" / "model.safetensors", metadata={"format": "pt"})
    twin = AutoModelForCausalLM.from_pretrained(
        tmp_path / "twin", attn_implementation="eager", dtype=torch.float32
    ).eval()
    eps = twin.config.rms_norm_eps

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], own[f"{name}.weight"], eps)

    table = own.get("embed_tokens.weight", target.model.embed_tokens.weight)
    head = own.get("shared_head.head.weight", target.lm_head.weight)
    check_block(
        tmp_path,
        target,
        table,
        lambda embedded, features: (
            torch.cat([norm(embedded, "enorm"), norm(features, "hnorm")], -1)
            @ own["eh_proj.weight"].T
        ),
        twin.model.layers[2],
        twin.model.rotary_emb,
        lambda x: norm(x, "shared_head.norm") @ head.T,
    )


def test_the_block_of_ernie_4_5(tmp_path: Path) -> None:
    """A layer without experts by names of its own; the target's head reads it without a norm."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    def load(folder: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()

    make_checkpoint(tmp_path / "target", "ernie4_5_moe", num_hidden_layers=2)
    target = load(tmp_path / "target")
    own = add_mtp_block(tmp_path / "target")
    # The twin's first layer is the block.
    (tmp_path / "twin").mkdir()
    for name in ("config.json", "generation_config.json"):
        (tmp_path / "twin" / name).write_bytes((tmp_path / "target" / name).read_bytes())
    tensors = load_file(tmp_path / "target" / "model.safetensors")
    block = {
        name.replace("block.0.", "model.layers.0."): tensor
        for name, tensor in own.items()
        if name.startswith("block.")
    }
    kept = {name: tensor for name, tensor in tensors.items() if "mtp_" not in name}
    save_file({**kept, **block}, tmp_path / "twin" / "model.safetensors", metadata={"format": "pt"})
    twin = load(tmp_path / "twin")
    eps = twin.config.rms_norm_eps

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], own[f"{name}_norm.0.weight"], eps)

    check_block(
        tmp_path,
        target,
        target.model.embed_tokens.weight,
        lambda embedded, features: (
            torch.cat([norm(embedded, "emb"), norm(features, "hidden")], -1)
            @ own["linear_proj.0.weight"].T
        ),
        twin.model.layers[0],
        twin.model.rotary_emb,
        target.lm_head,
    )


def test_a_speculators_folder_of_the_first_eagle(tmp_path: Path) -> None:
    """The same head under other names, its layer's config within another."""
    import json

    from safetensors.torch import load_file, save_file

    target = checkpoint("llama")
    random_head("eagle", target, tmp_path)
    expected = engine_logits(target, "eagle", tmp_path)
    file = tmp_path / "model.safetensors"
    named = {
        name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): tensor
        for name, tensor in load_file(file).items()
    }
    assert "transformer.self_attn.q_proj.weight" in named
    save_file(named, file)
    layer = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config = {
        "architectures": ["EagleSpeculator"],
        "speculators_model_type": "eagle",
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": layer,
        "fusion_bias": True,
        "layernorms": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for a, b in zip(engine_logits(target, "eagle", tmp_path), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    for field, value in (
        ("layernorms", True),
        ("transformer_layer_architecture", "QwenDecoderLayer"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
        with pytest.raises(NotSupported, match=field):
            engine_logits(target, "eagle", tmp_path)
