"""Writes a head as its paper's authors publish theirs, or as a `speculators` folder."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .heads import Eagle, Eagle3, Medusa, Shape


def llama_config(shape: Shape) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "vocab_size": shape.vocab_size,
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def write_head(
    head: Eagle | Eagle3 | Medusa,
    folder: Path,
    shape: Shape,
    *,
    target: str,
    layers: tuple[int, ...],
    max_positions: int,
    speculators: bool = False,
    num_tokens: int = 4,
) -> None:
    """Write config.json and the weights in bfloat16. `layers` are those EAGLE-3 reads."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in head.state_dict().items()
    }
    name = "model.safetensors"
    config: dict[str, Any] = llama_config(shape) | {"max_position_embeddings": max_positions}
    if isinstance(head, Eagle3):
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(head.d2t),
            "target_hidden_size": shape.hidden_size,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(layers),
                "use_aux_hidden_state": True,
            },
        }
        if speculators:
            config = _speculators_config(config, target, layers, num_tokens)
            state = {key.replace("midlayer.", "layers.0."): x for key, x in state.items()}
    elif isinstance(head, Eagle):
        config |= {"architectures": ["LlamaForCausalLMEagle"], "bias": True}
    else:
        name = "medusa_lm_head.safetensors"
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "base_model_name_or_path": target,
            "hidden_size": shape.hidden_size,
            "vocab_size": shape.vocab_size,
            "medusa_num_heads": len(head.heads),
            "medusa_num_layers": len(head.heads[0]) - 1,
        }
        state = {key.removeprefix("heads."): x for key, x in state.items()}
    text = json.dumps(config, indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    tensors = {key: x.contiguous() for key, x in state.items()}
    save_file(tensors, folder / name, metadata={"format": "pt"})


def _speculators_config(
    config: dict[str, Any], target: str, layers: tuple[int, ...], num_tokens: int
) -> dict[str, Any]:
    shared = ("draft_vocab_size", "target_hidden_size", "architectures", "eagle_config")
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": config["target_hidden_size"],
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_tokens}],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "transformer_layer_config": {
            key: value for key, value in config.items() if key not in shared
        },
        "torch_dtype": "bfloat16",
    }
