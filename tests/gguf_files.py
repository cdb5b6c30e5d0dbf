"""GGUF files: tiny models written with the gguf package, and raw bytes, good and bad.

What the converter of llama.cpp does to a model's tensors is written down here once more, on the
other side of the file from the reader.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from safetensors.numpy import load_file

Quantize = Callable[[str, np.ndarray], tuple[np.ndarray, gguf.GGMLQuantizationType | None]]

ARCHITECTURES = {
    "arcee": "arcee",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "dots1": "dots1",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone4": "exaone4",
    "exaone_moe": "exaone-moe",
    "falcon": "falcon",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "glm": "chatglm",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
    "glm4_moe_lite": "deepseek2",
    "gpt2": "gpt2",
    "gpt_bigcode": "starcoder",
    "gpt_neox": "gptneox",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "llama": "llama",
    "minicpm3": "minicpm3",
    "minimax_m2": "minimax-m2",
    "ministral3": "mistral3",
    "mistral": "llama",
    "mixtral": "llama",
    "nemotron": "nemotron",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmoe": "olmoe",
    "phi": "phi2",
    "phi3": "phi3",
    "phimoe": "phimoe",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "solar_open": "glm4moe",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
    "youtu": "deepseek2",
}
# Latents whose matrices are whole blocks of Q8_0 either way round, and one factor of two.
_LATENT = {"q_lora_rank": 32, "qk_nope_head_dim": 32}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# What the files cannot say, because the converter knows it of the published models: tied heads, by
# what queries are scaled, which layers have a window, no rotary embedding or no experts.
OVERRIDES: dict[str, dict[str, Any]] = {
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {
        "tie_word_embeddings": True,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": {**_LATENT, "rope_parameters": _YARN},
    # llama.cpp knows the windows of 64 layers alone.
    "exaone4": {
        "num_hidden_layers": 64,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True, "query_pre_attn_scalar": 16},
    "gemma3_text": {
        "query_pre_attn_scalar": 16,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
    "glm4_moe_lite": _LATENT,
    "minicpm3": {
        "tie_word_embeddings": True,
        "q_lora_rank": 32,
        "v_head_dim": None,
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    },
    "ernie4_5_moe": {"moe_norm_min": 1e-12},
    "phimoe": {"router_jitter_noise": 0.01},
    "qwen2_moe": {"mlp_only_layers": []},
    "qwen3_moe": {"mlp_only_layers": []},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "youtu": {**_LATENT, "rope_parameters": _YARN},
}
# What the family's config calls the numbers of experts, beside the spellings that most have.
_EXPERTS = {
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k", "moe_topk"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
    ),
    "expert_shared_count": ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "leading_dense_block_count": ("first_k_dense_replace", "moe_layer_start_index"),
    "interleave_moe_layer_step": ("moe_layer_interval",),
}
_HEADS = ("num_attention_heads", "n_head")
_PAIRED = ("arcee", "llama", "granite", "granitemoe", "mistral3", "smollm3")
# What the converter writes of config.json beside what it writes for all.
_NUMBERS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}


def as_f32(name: str, array: np.ndarray) -> tuple[np.ndarray, None]:
    return array.astype(np.float32), None


def _is_vector(array: np.ndarray) -> bool:
    """Also of those that have a dimension of one row."""
    return array.ndim == 1 or array.shape[0] == 1


def quantized(kind: str) -> Quantize:
    """Matrices in the format of that name, vectors in F32."""
    qtype = gguf.GGMLQuantizationType[kind]

    def quantize(name: str, array: np.ndarray) -> tuple[np.ndarray, Any]:
        if _is_vector(array) or name.endswith("bias"):
            return array.astype(np.float32), None
        return gguf.quants.quantize(array.astype(np.float32), qtype), qtype

    return quantize


# Where in a block its f16 scale lies, and that of its minima or its minimum.
SCALE_PLACES: dict[str, tuple[int, ...]] = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),  # a byte, an exponent
    "NVFP4": (),  # four bytes, 8-bit floats
    "IQ1_S": (0,),
    "IQ1_M": (),  # in the upper bits of four half words
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}

# Of the types that the gguf package does not quantize to: a scale for values around 1 over the
# square root of a row's length. That of minima is five times as large.
_SCALES: dict[str, float] = {
    "Q2_K": 6e-3,
    "Q3_K": 1e-3,
    "Q4_K": 2e-4,
    "Q5_K": 1e-4,
    "Q6_K": 5e-5,
    "IQ4_NL": 1e-3,
    "IQ4_XS": 5e-5,
    "IQ1_S": 8e-3,
    "IQ1_M": 8e-3,
    "IQ2_XXS": 1e-3,
    "IQ2_XS": 1e-3,
    "IQ2_S": 1e-3,
    "IQ3_XXS": 3e-4,
    "IQ3_S": 4e-4,
    "NVFP4": 2e-2,
}


def put_scales(kind: str, blocks: np.ndarray, halves: np.ndarray) -> None:
    """Blocks [..., bytes] with float16 scales [...], and minima if they have any."""
    bits = np.asarray(halves, np.float16).view(np.uint16)
    for at in SCALE_PLACES[kind]:
        blocks[..., at], blocks[..., at + 1] = bits & 0xFF, bits >> 8
    if kind == "IQ1_M":
        for i in range(4):
            upper = (bits >> 4 * i & 0xF) << 4
            blocks[..., 49 + 2 * i] = blocks[..., 49 + 2 * i] & 0xF | upper


def random_blocks(kind: str, rows: int, width: int) -> np.ndarray:
    """Rows of random blocks [rows, bytes] in one of those types."""
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(rows)
    blocks = rng.integers(0, 256, (rows * width // block_elements, block_bytes), np.uint8)
    size = _SCALES[kind]
    if kind == "NVFP4":
        blocks[:, :4] = rng.integers(8, 16, (len(blocks), 4))  # 2^-6 to 2^-5
    put_scales(kind, blocks, np.full(len(blocks), size))
    for at in SCALE_PLACES[kind][1:]:
        blocks[:, at : at + 2] = np.frombuffer(np.float16(5 * size).tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


def in_format(kind: str) -> Quantize:
    """Matrices in the format of that name, if need be of other values than theirs."""
    if kind not in _SCALES:
        return quantized(kind)

    def quantize(name: str, array: np.ndarray) -> tuple[np.ndarray, Any]:
        if _is_vector(array) or name.endswith("bias"):
            return array.astype(np.float32), None
        blocks = random_blocks(kind, array.size // array.shape[-1], array.shape[-1])
        return blocks.reshape(*array.shape[:-1], -1), gguf.GGMLQuantizationType[kind]

    return quantize


def write_gguf(
    path: Path,
    checkpoint: Path,
    quantize: Quantize = as_f32,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    has_whole_kv_b: bool = False,
) -> Path:
    """The checkpoint (a directory with config.json and f32 safetensors) as one GGUF file.

    `extra` adds metadata, such as a tokenizer's; `tensors` more tensors. With `has_whole_kv_b`
    latents are as converters had them before llama.cpp attended to the latents themselves.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch)
    _add_hyper_parameters(writer, config, arch, has_whole_kv_b)
    if extra is not None:
        extra(writer)
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch),
        _field(config, "num_hidden_layers", "n_layer"),
    )
    stored = load_file(checkpoint / "model.safetensors")
    if arch == "deepseek2" and not has_whole_kv_b:
        stored = _split_kv_b(stored, config)
    for name, array in _stacked(stored).items():
        gguf_name = names.get_name(
            name.replace("e_score_correction_bias", "e_score_correction.bias").replace(
                "self_attn.sinks", "self_attn.sinks.weight"
            ),
            try_suffixes=(".weight", ".bias"),
        )
        assert gguf_name is not None, name
        data, raw_dtype = quantize(name, _converted(name, array, config, arch))
        writer.add_tensor(gguf_name, data, raw_dtype=raw_dtype)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _field(config: Mapping[str, Any], *spellings: str) -> Any:
    return next(config[name] for name in spellings if config.get(name) is not None)


def _num_kv_heads(config: Mapping[str, Any]) -> int:
    family, heads = config["model_type"], _field(config, *_HEADS)
    if family in ("gpt2", "gpt_neox"):
        return heads
    if family == "gpt_bigcode":
        return 1
    if family == "falcon" and not config["new_decoder_architecture"]:
        return 1 if config["multi_query"] else heads
    return _field(config, "num_key_value_heads", "num_kv_heads")


def _add_hyper_parameters(
    writer: gguf.GGUFWriter, config: dict[str, Any], arch: str, has_whole_kv_b: bool
) -> None:
    heads, width = _field(config, *_HEADS), _field(config, "hidden_size", "n_embd")
    head_dim = config.get("head_dim") or width // heads
    writer.add_context_length(_field(config, "max_position_embeddings", "n_positions"))
    writer.add_embedding_length(width)
    writer.add_block_count(_field(config, "num_hidden_layers", "n_layer"))
    inner = _field(config, "intermediate_size", "n_inner", "ffn_hidden_size")
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    is_absorbed = arch == "deepseek2" and not has_whole_kv_b
    writer.add_head_count_kv(1 if is_absorbed else _num_kv_heads(config))
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters", {"rope_theta": 10000.0})
    rope = rope.get("full_attention", rope)
    stretch = rope.get("alpha", 1.0) ** (head_dim / (head_dim - 2))  # Hunyuan's
    writer.add_rope_freq_base(rope["rope_theta"] * stretch)
    for field, key in _NUMBERS.items():
        if config.get(field) is not None:
            writer.add_float32(f"{arch}.{key}", config[field])
    _add_rope_scaling(writer, rope, arch)
    _add_experts(writer, config, arch)
    if "use_parallel_residual" in config:
        writer.add_parallel_residual(config["use_parallel_residual"])
    family, window = config["model_type"], config.get("sliding_window")
    has_pattern = family in ("gemma3_text", "olmo3") or (family.startswith("exaone") and window)
    if has_pattern or family in ("cohere2", "gemma2", "gpt_oss", "phi3"):
        writer.add_sliding_window(window or 0)
    if has_pattern:
        is_sliding = [t == "sliding_attention" for t in config["layer_types"]]
        writer.add_sliding_window_pattern(is_sliding)
    if "kv_lora_rank" in config:
        _add_latent(writer, config, arch, is_absorbed)
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def _add_latent(
    writer: gguf.GGUFWriter, config: dict[str, Any], arch: str, is_absorbed: bool
) -> None:
    rank, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(rotary)
    if is_absorbed:
        writer.add_key_length(rank + rotary)
        writer.add_value_length(rank)
        writer.add_key_length_mla(config["qk_nope_head_dim"] + rotary)
        writer.add_value_length_mla(config["v_head_dim"])
        return
    writer.add_key_length(config["qk_nope_head_dim"] + rotary)
    if arch == "deepseek2":
        writer.add_value_length(config["v_head_dim"])


def _split_kv_b(
    tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    out = {}
    for name, array in tensors.items():
        if ".kv_b_proj." not in name:
            out[name] = array
            continue
        keys, values = split_heads(array, config)
        out[name.replace("kv_b", "k_b")] = np.ascontiguousarray(keys.swapaxes(1, 2))
        out[name.replace("kv_b", "v_b")] = np.ascontiguousarray(values)
    return out


def split_heads(kv_b: np.ndarray, config: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Of each head what makes keys [H, nope, rank], and what makes values [H, v, rank]."""
    heads = kv_b.reshape(config["num_attention_heads"], -1, kv_b.shape[-1])
    return heads[:, : config["qk_nope_head_dim"]], heads[:, config["qk_nope_head_dim"] :]


def _add_experts(writer: gguf.GGUFWriter, config: Mapping[str, Any], arch: str) -> None:
    if arch == "deepseek2":
        is_dense = [kind == "dense" for kind in config.get("mlp_layer_types", [])]
        first = len(is_dense) if all(is_dense) else is_dense.index(False)
        config = {"first_k_dense_replace": first, **config}
    if "n_routed_experts" not in config and arch == "deepseek2":  # as if of experts, and of none
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_expert_shared_count(0)
        writer.add_leading_dense_block_count(config["num_hidden_layers"])
    if not any(spelling in config for spelling in _EXPERTS["expert_used_count"]):
        return
    if arch in ("gpt-oss", "hunyuan-moe", "minimax-m2"):  # whose experts have no width of their own
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if arch in ("hunyuan-moe", "ernie4_5-moe"):
        shares = config["num_key_value_heads"] if arch == "ernie4_5-moe" else 1
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"] // shares)
    if arch == "exaone-moe":
        shared = config["num_shared_experts"] * config["moe_intermediate_size"]
        writer.add_expert_shared_feed_forward_length(shared)
    for key, spellings in _EXPERTS.items():
        found = next((config[s] for s in spellings if config.get(s) is not None), None)
        if found is not None:
            writer.add_uint32(f"{arch}.{key}", found)
    # The converter says it of families whose config does; llama.cpp knows the others.
    if "norm_topk_prob" in config and arch in ("deepseek2", "dots1", "exaone-moe", "glm4moe"):
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if "routed_scaling_factor" in config:
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if arch in ("deepseek2", "dots1", "exaone-moe", "minimax-m2"):
        is_sigmoid = config["model_type"] != "deepseek_v2"
        kind = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(kind.SIGMOID if is_sigmoid else kind.SOFTMAX)


def _add_rope_scaling(writer: gguf.GGUFWriter, rope: Mapping[str, Any], arch: str) -> None:
    if rope.get("rope_type") != "yarn":
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if arch == "deepseek2":
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if arch == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Norms that each head has a tensor of, and matrices that each expert has, in one. What is of
    the gate and of what it is multiplied with, apart."""
    out: dict[str, np.ndarray] = {}
    tensors = _split_input_linear(tensors)
    for name in sorted(tensors, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]):
        whole = re.sub(r"\.(norms|experts)\.\d+\.", r".\1.", name).replace(".norms.", ".")
        array = tensors[name] if whole == name else tensors[name][None]
        out[whole] = np.concatenate([out[whole], array]) if whole in out else array
    return out


def _split_input_linear(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        if ".mlp.experts." in name and "_proj." not in name:  # gpt-oss: [experts, in, out]
            out |= _split_columns(name, array)
            continue
        if not name.endswith("input_linear.weight"):
            out[name] = array
            continue
        layer = name.split(".")[2]
        kind = "shared_experts.{}_proj" if "shared_mlp" in name else "experts.{}_proj"
        for part, half in zip(("gate", "up"), np.split(array, 2, axis=-2), strict=True):
            out[f"model.layers.{layer}.mlp.{kind.format(part)}.weight"] = half
    return out


def _split_columns(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    stem, _, part = name.rpartition(".")
    kind = "bias" if part.endswith("_bias") else "weight"
    whole = array if kind == "bias" else np.ascontiguousarray(array.swapaxes(1, 2))
    if part.startswith("down"):
        return {f"{stem}.down_proj.{kind}": whole}
    return {
        f"{stem}.{each}_proj.{kind}": np.ascontiguousarray(whole[:, i::2])
        for i, each in enumerate(("gate", "up"))
    }


def _converted(name: str, array: np.ndarray, config: dict[str, Any], arch: str) -> np.ndarray:
    """The rows of a head of q and k go from halves to rotary pairs where llama.cpp wants that,
    the norms of Gemma and Nemotron multiply by what is stored, not by one more, linear weights are
    [out, in], and a fused qkv has all queries, then all keys, then all values."""
    if name.endswith(("shared_expert_gate.weight", "e_score_correction_bias")):
        return array.reshape(-1)
    if arch == "gpt2" and array.ndim == 2 and ".h." in name:
        return np.ascontiguousarray(array.T)
    if ".query_key_value." in name:
        return _ungrouped(array, _field(config, *_HEADS), _num_kv_heads(config))
    if arch.startswith(("gemma", "nemotron")) and name.endswith("norm.weight"):
        return array + np.float32(1)
    if arch not in _PAIRED:
        return array
    heads = 0
    if ".q_proj." in name:
        heads = config["num_attention_heads"]
    if ".k_proj." in name:
        heads = config["num_key_value_heads"]
    if heads == 0:
        return array
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def _ungrouped(array: np.ndarray, heads: int, kv_heads: int) -> np.ndarray:
    groups = array.reshape(kv_heads, heads // kv_heads + 2, -1, *array.shape[1:])
    parts = groups[:, :-2], groups[:, -2], groups[:, -1]
    return np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])


def add_bpe(writer: gguf.GGUFWriter, source: tokenizers.Tokenizer, pre: str) -> None:
    """As llama.cpp's converter writes a tokenizer.json."""
    parsed = json.loads(source.to_str())
    vocab = source.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    added = {token["content"]: token["special"] for token in parsed["added_tokens"]}
    types = [
        gguf.TokenType.NORMAL
        if token not in added
        else gguf.TokenType.CONTROL
        if added[token]
        else gguf.TokenType.USER_DEFINED
        for token in tokens
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in parsed["model"]["merges"]])


# Raw files, for the reader's tests.

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_PACK = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B"}
_PACK |= {U64: "Q", I64: "q", F64: "d"}


def raw_string(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def raw_scalar(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return raw_string(value)
    return struct.pack("<" + _PACK[kind], value)


def raw_value(key: bytes, kind: int, value: Any) -> bytes:
    return raw_string(key) + struct.pack("<I", kind) + raw_scalar(kind, value)


def raw_array(key: bytes, kind: int, payload: bytes, count: int) -> bytes:
    return raw_string(key) + struct.pack("<IIQ", ARRAY, kind, count) + payload


def raw_tensor(name: bytes, dims: list[int], kind: int, offset: int) -> bytes:
    """`dims` in the file's order: the row's length first."""
    return (
        raw_string(name)
        + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        + struct.pack("<IQ", kind, offset)
    )


def raw_file(
    values: list[bytes],
    tensors: list[bytes],
    data: bytes,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_values: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if num_tensors is None else num_tensors,
        len(values) if num_values is None else num_values,
    )
    head += b"".join(values) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment) + data
