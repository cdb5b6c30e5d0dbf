"""Weights that are stored in other types, orders or under other names: converted when loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import checkpoint, copy_checkpoint
from llmserve import LLM, SamplingParams, _core_testing
from llmserve.errors import CorruptFile, NotSupported

PARAMS = SamplingParams(temperature=0, max_tokens=8, logprobs=2, detokenize=False, ignore_eos=True)


def answers(path: Path) -> list[Any]:
    with LLM(path, num_gpu_blocks_override=32, num_threads=1, dtype="float32") as llm:
        outputs = llm.generate([[5, 9, 200], [1, 2, 3, 4]], PARAMS, use_tqdm=False)
    return [
        (
            list(out.outputs[0].token_ids),
            [[lp.logprob for lp in step.values()] for step in out.outputs[0].logprobs],
        )
        for out in outputs
    ]


def save(directory: Path, tensors: dict[str, Any], name: str = "model.safetensors") -> None:
    from safetensors.torch import save_file

    save_file({key: t.contiguous() for key, t in tensors.items()}, directory / name)


def load(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize("stored", ["float64", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_other_float_types_are_the_numbers_that_they_hold(stored: str, tmp_path: Path) -> None:
    import torch

    dtype = getattr(torch, stored)
    for name in ("stored", "plain"):
        copy_checkpoint(checkpoint("qwen2"), tmp_path / name)
    tensors = {key: t.to(dtype) for key, t in load(tmp_path / "plain").items()}
    save(tmp_path / "stored", tensors)
    save(tmp_path / "plain", {key: t.to(torch.float32) for key, t in tensors.items()})
    assert answers(tmp_path / "stored") == answers(tmp_path / "plain")


@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
def test_f8_with_scales_is_refused_by_name(suffix: str, tmp_path: Path) -> None:
    import torch

    copy_checkpoint(checkpoint("llama"), tmp_path / "model")
    tensors = load(tmp_path / "model")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[name + suffix] = torch.ones(1)
    save(tmp_path / "model", tensors)
    with pytest.raises(NotSupported, match=rf'"{name}" is float8_e4m3fn .* scaled by "{name}'):
        LLM(tmp_path / "model")


@pytest.mark.parametrize("stored", ["int8", "uint8", "int16", "int32", "int64", "bool"])
def test_integers_are_read_and_no_weights(stored: str, tmp_path: Path) -> None:
    import torch

    copy_checkpoint(checkpoint("llama"), tmp_path / "model")
    tensors = load(tmp_path / "model")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3).to(
        getattr(torch, stored)
    )
    save(tmp_path / "model", tensors)
    assert answers(tmp_path / "model") == answers(checkpoint("llama"))
    name = "model.norm.weight"
    tensors[name] = tensors[name].to(getattr(torch, stored))
    save(tmp_path / "model", tensors)
    with pytest.raises(CorruptFile, match=rf'"{name}": expected floats \[48\], as .* got {stored}'):
        LLM(tmp_path / "model")


def mistral_folder(to: Path, **params: Any) -> Path:
    """The tiny Mistral in its makers' own layout: Meta's names and order of rotary rows."""
    source = checkpoint("mistral")
    config = json.loads((source / "config.json").read_text())
    names = {
        "model.embed_tokens.": "tok_embeddings.",
        "model.norm.": "norm.",
        "lm_head.": "output.",
        "model.layers.": "layers.",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
    }
    tensors = {}
    for name, tensor in load(source).items():
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        for part, count in heads.items():
            if part in name:
                halves = tensor.reshape(count, 2, tensor.shape[0] // count // 2, -1)
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
        for old, new in names.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    to.mkdir()
    save(to, tensors, "consolidated.safetensors")
    written = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "hidden_dim": config["intermediate_size"],
        "norm_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "max_seq_len": config["max_position_embeddings"],
        **params,
    }
    (to / "params.json").write_text(json.dumps(written))
    return to


def test_consolidated_file_of_mistral_gives_what_its_conversion_gives(tmp_path: Path) -> None:
    folder = mistral_folder(tmp_path / "mistral")
    assert answers(folder) == answers(checkpoint("mistral"))


def test_consolidated_file_of_another_kind_is_refused_by_field(tmp_path: Path) -> None:
    folder = mistral_folder(tmp_path / "mistral", moe={"num_experts": 8})
    with pytest.raises(NotSupported, match=r"params.json: moe: models with it are not supported"):
        LLM(folder)


def test_missing_field_of_params_is_named(tmp_path: Path) -> None:
    folder = mistral_folder(tmp_path / "mistral", dim=None)
    with pytest.raises(CorruptFile, match=r"params.json: dim: expected an integer"):
        LLM(folder)


def test_f8_values_are_rounded_to_bfloat16_exactly() -> None:
    """Every F8 has at most 3 bits of precision, so that bf16 loses nothing."""

    for name in ("F8_E4M3", "F8_E5M2"):
        values = _core_testing.dequantize(name, bytes(range(256)))
        finite = values[np.isfinite(values)]
        assert not (finite.view(np.uint32) & 0xFFFF).any()
