"""Tiny random-weight checkpoints and a tiny tokenizer, made on the spot and cached for the session.

Written by transformers' own save_pretrained, so that a test against them is a test against the
format that users have. Nothing is downloaded.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tiny_tokenizer import VOCAB_SIZE, tokenizer

# What every family gets unless a test overrides it: GQA, two layers, a head_dim that is no power
# of two.
_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_LAYER_NORM: dict[str, Any] = {"layer_norm_eps": 1e-4}
# Latent attention, whose inner norms have an epsilon of their own.
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
    "rms_norm_eps": 1e-2,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
_LATENT_EXPERTS: dict[str, Any] = {
    **_LATENT,
    "moe_intermediate_size": 32,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
_FAMILY: dict[str, dict[str, Any]] = {
    "arcee": {},
    "cohere": {**_LAYER_NORM, "logit_scale": 0.3},
    "cohere2": {
        **_LAYER_NORM,
        "logit_scale": 0.3,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_v2": {
        **_LATENT_EXPERTS,
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v3": {
        **_LATENT_EXPERTS,
        "num_nextn_predict_layers": 0,
        "rope_parameters": _YARN,
    },
    "dots1": {
        "moe_intermediate_size": 32,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 3,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.7,
        "sliding_window": None,
    },
    "ernie4_5": {"head_dim": 16, "use_bias": True},
    "ernie4_5_moe": {
        "moe_intermediate_size": 32,
        "moe_num_experts": 5,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "use_bias": False,
        "moe_norm_min": 0.9,
    },
    "exaone4": {
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "falcon": {"bias": True},
    "gemma": {"head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 20,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 20,
        "query_pre_attn_scalar": 20,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm": {"head_dim": 16, "hidden_size": 64},
    "glm4": {"head_dim": 16},
    "glm4_moe": {
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 0,
    },
    "glm4_moe_lite": {
        **_LATENT_EXPERTS,
        "num_nextn_predict_layers": 0,
    },
    "gpt2": {},
    "gpt_bigcode": {},
    "gptj": {"rotary_dim": 6},
    "gpt_neo": {
        "layer_norm_epsilon": 1e-4,
        "window_size": 20,
        "attention_layers": ["global", "local"],
    },
    "gpt_neox": {
        **_LAYER_NORM,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "gpt_oss": {
        "head_dim": 16,
        "intermediate_size": 32,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 1.5,
    },
    "granitemoe": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 1.5,
        "intermediate_size": 32,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
    },
    "granitemoeshared": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 1.5,
        "intermediate_size": 32,
        "shared_intermediate_size": 64,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
    },
    "helium": {"head_dim": 12},
    "hunyuan_v1_dense": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 10000.0,
            "alpha": 50.0,
            "factor": 1.0,
        },
    },
    "hunyuan_v1_moe": {
        "head_dim": 16,
        "num_experts": 5,
        "moe_topk": 3,
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 10000.0,
            "alpha": 50.0,
            "factor": 1.0,
        },
    },
    "llama": {},
    "minicpm3": {**_LATENT, "scale_emb": 3.0, "scale_depth": 0.8, "dim_model_base": 32},
    "minimax_m2": {
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "ministral": {
        "head_dim": 12,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "ministral3": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "mistral": {"sliding_window": None},
    "mistral4": {
        **_LATENT_EXPERTS,
        "first_k_dense_replace": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "nemotron": {
        "norm_eps": 1e-4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "olmo": {},
    "olmo2": {},
    "olmo3": {
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 3},
    "opt": {},
    "persimmon": {
        **_LAYER_NORM,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "phi": {
        **_LAYER_NORM,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "phi3": {},
    "phimoe": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.02,
        "rms_norm_eps": 1e-4,
        "attention_bias": True,
        "lm_head_bias": True,
    },
    "qwen2": {},
    "qwen2_moe": {
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [0],
    },
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "seed_oss": {"head_dim": 16, "attention_out_bias": True},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {
        **_LAYER_NORM,
        "use_qkv_bias": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "starcoder2": {"norm_epsilon": 1e-4},
    "youtu": {
        **_LATENT,
        "rope_parameters": _YARN,
    },
}
FAMILIES = tuple(_FAMILY)
# Of these a rounded activation now and then chooses another expert with as large a weight, and what
# comes of it is another token's: their rows are compared by the median.
ROUTERS_THAT_FLIP = (
    *("deepseek_v2", "deepseek_v3", "dots1", "glm4_moe", "glm4_moe_lite", "gpt_oss"),
    *("minimax_m2", "mistral4", "phimoe"),
)
# What a family's config may say and is refused: family, field, its value, what is supported.
REFUSED: tuple[tuple[str, str, Any, Any], ...] = (
    ("gpt2", "scale_attn_by_inverse_layer_idx", True, False),
    ("gpt_bigcode", "add_cross_attention", True, False),
    ("minicpm3", "attention_bias", True, False),
    ("olmo", "clip_qkv", 8.5, None),
    ("opt", "do_layer_norm_before", False, True),
    ("opt", "_remove_final_layer_norm", True, False),
    ("opt", "layer_norm_elementwise_affine", False, True),
    ("youtu", "attention_bias", True, False),
)
# Text models that are only found within others: the first by head_dim 12, of 6 frequencies.
_MROPE = {"rope_type": "default", "rope_theta": 10000.0}
_TEXT_FAMILY: dict[str, dict[str, Any]] = {
    "glm4v_text": {
        "rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]}
    },
    "qwen2_vl_text": {"rope_parameters": {**_MROPE, "mrope_section": [2, 2, 2]}},
    "qwen2_5_vl_text": {"rope_parameters": {**_MROPE, "mrope_section": [1, 2, 3]}},
    "qwen3_vl_text": {
        "head_dim": 16,
        "rope_parameters": {**_MROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    },
    "qwen3_vl_moe_text": {
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "mlp_only_layers": [1],
        "rope_parameters": {**_MROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    },
}
# "wrapper:text model", by their model_type.
WRAPPED = (
    "aya_vision:cohere2",
    "cohere2_vision:cohere2",
    "exaone4_5:exaone4",
    "gemma3:gemma3_text",
    "glm4v:glm4v_text",
    "idefics3:llama",
    "internvl:qwen3",
    "kimi_k25:deepseek_v3",
    "llava:llama",
    "llava_next:granite",
    "llava_onevision:qwen2",
    "mistral3:ministral3",
    "mistral3:mistral",
    "mistral3:mistral4",
    "qwen2_5_vl:qwen2_5_vl_text",
    "qwen2_vl:qwen2_vl_text",
    "qwen3_vl:qwen3_vl_text",
    "qwen3_vl_moe:qwen3_vl_moe_text",
    "smolvlm:llama",
)
# In the spellings of all vision towers; what one does not know is ignored.
_VISION: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "intermediate_size", "out_hidden_size"), 8),
    **dict.fromkeys(("num_attention_heads", "num_heads"), 2),
    **dict.fromkeys(("num_hidden_layers", "depth"), 1),
    **{"image_size": 8, "patch_size": 4},
}
# Where a family has another name for a field of _COMMON, and transformers does not translate it.
_SPELLINGS = {
    "falcon": {"intermediate_size": "ffn_hidden_size"},
    "gpt2": {"intermediate_size": "n_inner"},
    "gptj": {"intermediate_size": "n_inner"},
    "opt": {"intermediate_size": "ffn_dim"},
    "gpt_bigcode": {"intermediate_size": "n_inner"},
}


@functools.cache
def _session_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="llmserve-checkpoints-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def checkpoint(family: str, *, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Path:
    """Directory of a tiny checkpoint with a tokenizer; the same arguments give the same directory.

    `overrides` are fields of the family's transformers config. Read-only: copy it to damage it.
    """
    key = json.dumps([family, seed, dtype, overrides], sort_keys=True)
    return _cached_checkpoint(key)


@functools.cache
def _cached_checkpoint(key: str) -> Path:
    family, seed, dtype, overrides = json.loads(key)
    directory = Path(tempfile.mkdtemp(prefix=f"{family}-", dir=_session_directory()))
    make_checkpoint(directory, family, seed=seed, dtype=dtype, **overrides)
    return directory


def make_checkpoint(
    directory: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str | None = None,
    **overrides: Any,
) -> Any:
    """Writes a checkpoint and returns the transformers model that it was saved from."""
    import torch
    import transformers

    wrapper, _, text = family.rpartition(":")
    fields = {**_COMMON, **(_FAMILY | _TEXT_FAMILY)[text], **overrides}
    for key, spelling in _SPELLINGS.get(family, {}).items():
        fields[spelling] = fields.pop(key)
    # A pattern, over as many layers as there are.
    for key in ("layer_types", "no_rope_layers", "attention_layers"):
        if key in fields:
            num_layers = fields["num_hidden_layers"]
            fields[key] = (fields[key] * num_layers)[:num_layers]
    if wrapper:
        fields = {
            "text_config": {"model_type": text, **fields},
            "vision_config": _VISION,
            "tie_word_embeddings": fields["tie_word_embeddings"],
        }
    config = transformers.AutoConfig.for_model(wrapper or text, **fields)
    model = _auto_class(config).from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled(model, name, noise))
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
    model = model.eval().to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    options = {"max_shard_size": max_shard_size} if max_shard_size else {}
    model.save_pretrained(directory, **options)
    if wrapper == "kimi_k25":
        _call_layers_what_they_are(directory / "model.safetensors")
    tokenizer().save_pretrained(directory)
    return model


def _call_layers_what_they_are(path: Path) -> None:
    """transformers 5 writes the text's layers by the name that the tower's have in its files."""
    from safetensors.torch import load_file, save_file

    wrong, right = "language_model.model.blocks.", "language_model.model.layers."
    tensors = {name.replace(wrong, right): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


# Of what a router of experts is called.
_ROUTERS = ("mlp.gate.weight", ".router.weight", ".gate.wg.weight")
# Families whose experts are stored [experts, in, out].
_EXPERTS_OF_COLUMNS = ("gpt_oss", "llama4_text")


def _scaled(model: Any, name: str, noise: Any) -> Any:
    """Weights that keep activations near 1, norms near 1 but not at it, logits well apart."""
    family = model.config.model_type
    if name.endswith("bias"):
        return 0.3 * noise
    if name.endswith("sinks"):
        return 2 * noise
    if noise.ndim == 1 or "norm" in name:
        is_minus_one = family.startswith(("gemma", "nemotron"))
        return (0 if is_minus_one else 1) + 0.2 * noise
    tables = ("embed_tokens", "embed_in", "embed_positions", "word_embeddings", "wte", "wpe")
    if any(part in name for part in tables):
        # Gemma multiplies by the square root of the width.
        return noise / (noise.shape[1] ** 0.5 if family.startswith("gemma") else 1)
    gain = 3.0 if name.startswith(("lm_head", "embed_out")) else 1.0
    if name.endswith(_ROUTERS):
        gain = 8.0  # or rounding to bfloat16 would choose other experts
    if noise.ndim == 3 and family not in _EXPERTS_OF_COLUMNS:
        return noise / noise.shape[2] ** 0.5
    return gain * noise / noise.shape[0 if family == "gpt2" else 1] ** 0.5


@functools.cache
def reference_model(directory: Path) -> Any:
    """The checkpoint as transformers runs it: f32 arithmetic, eager attention."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    model = _auto_class(config).from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    text = config.get_text_config()
    if text is not config:
        # Wrappers leave out by what the text model's own class scales logits.
        scale = getattr(text, "logit_scale", 1 / getattr(text, "logits_scaling", 1))
        model.lm_head.register_forward_hook(lambda _module, _inputs, logits: scale * logits)
    return model.eval()


def _auto_class(config: Any) -> Any:
    import transformers

    if config.model_type == "mistral4":  # whose class no table of transformers names
        model_class = transformers.models.mistral4.modeling_mistral4.Mistral4ForCausalLM
        transformers.AutoModelForCausalLM.register(type(config), model_class, exist_ok=True)
    is_wrapper = hasattr(config, "text_config")
    return (
        transformers.AutoModelForImageTextToText
        if is_wrapper
        else transformers.AutoModelForCausalLM
    )


def copy_checkpoint(source: Path, destination: Path) -> Path:
    """A copy of a cached checkpoint that a test may damage."""
    shutil.copytree(source, destination, dirs_exist_ok=True)
    return destination


def edit_config(directory: Path, *, remove: tuple[str, ...] = (), **fields: Any) -> None:
    """Changes config.json in place."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key in remove:
        config.pop(key, None)
    path.write_text(json.dumps({**config, **fields}))
