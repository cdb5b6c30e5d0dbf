"""Checkpoints of published shapes with random weights, as llmserve and its peers read them.

`write_checkpoint` writes a Hugging Face directory with NumPy alone. This file as a script, run with
DIR FILE FORMAT in an environment with the gguf package, turns one into a GGUF file. Both have the
tokenizer of random_tokenizer.py, which servers need to answer at all.
"""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from random_tokenizer import read_tokenizer, write_tokenizer

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 10000.0}
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_theta": 1000000.0}
_OLMOE = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "rope_theta": 10000.0,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "vocab_size": 50304,
    "tie_word_embeddings": False,
}
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "rope_theta": 1000000.0,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
# Drawn once and repeated, since a billion draws take long; prime, so that no two rows are equal.
_NUM_DRAWS = 4_194_301
_SIZES = {"BF16": 2, "F8_E4M3": 1, "F32": 4}
_FP8_BLOCK = 128
_LARGEST_DRAW = 4.5  # of normal numbers as E4M3 has them
_COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
# Of the models' config.json on the Hugging Face Hub; the first is of the size of stories110M.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-110m": {
        **_LLAMA,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
    "tinyllama-1.1b": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": {
        **_LLAMA,
        "rope_theta": 500000.0,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        **_LLAMA,
        "rope_theta": 500000.0,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    # Models of experts, with fewer layers than they have: all their weights lie in memory.
    "olmoe-1b-7b-2l": {**_OLMOE, "num_hidden_layers": 2},
    "qwen3-30b-a3b-2l": {**_QWEN3_MOE, "num_hidden_layers": 2},
    # Of these only num_drawn_layers are drawn, and GGUF files repeat them (repeated_layers.py).
    "olmoe-1b-7b": {**_OLMOE, "num_hidden_layers": 16, "num_drawn_layers": 2},
    "qwen3-30b-a3b-12l": {**_QWEN3_MOE, "num_hidden_layers": 12, "num_drawn_layers": 2},
    "gpt-oss-20b-8l": {
        "model_type": "gpt_oss",
        "rope_theta": 150000.0,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 8,
        "num_drawn_layers": 1,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "vocab_size": 201088,
        "tie_word_embeddings": False,
    },
    # With a rank of queries, since llama.cpp takes files of 26 or 27 layers alone for V2-Lite's.
    "deepseek-v2-lite-9l": {
        "model_type": "deepseek_v2",
        "rope_theta": 10000.0,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "num_shared_experts": 2,
        "num_dense_layers": 1,
        "num_hidden_layers": 9,
        "num_drawn_layers": 3,
        "num_attention_heads": 16,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 102400,
        "tie_word_embeddings": False,
    },
    # Of no model: to try a benchmark where the others would take hours.
    "tiny-moe": {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "rope_theta": 10000.0,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 512,
        "tie_word_embeddings": False,
    },
    "tiny": {
        **_QWEN3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": 512,
        "tie_word_embeddings": False,
    },
}


def write_checkpoint(folder: Path, shape: str, fp8: str = "") -> None:
    """config.json, a tokenizer and model.safetensors with bf16 weights, in `folder`; nothing if the
    weights are there. fp8: linear layers are in E4M3, with a scale of each of their "rows" or of
    "blocks" of 128 x 128, and activations are to be.

    Norms are 1, everything else normal with variance 1 / fan-in: activations keep their size.
    """
    if (folder / "model.safetensors").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = {**_COMMON, **SHAPES[shape]}
    config["num_hidden_layers"] = config.get("num_drawn_layers", config["num_hidden_layers"])
    if fp8:
        config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if fp8 == "blocks":
        config["quantization_config"]["weight_block_size"] = [_FP8_BLOCK, _FP8_BLOCK]
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    write_tokenizer(folder, config["vocab_size"])
    header: dict[str, Any] = {}
    end = 0
    tensors = list(_with_scales(tensors_of(config), fp8))
    for name, dims, dtype in tensors:
        begin, end = end, end + _SIZES[dtype] * int(np.prod(dims))
        header[name] = {"dtype": dtype, "shape": list(dims), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    draws = np.random.default_rng(0).standard_normal(_NUM_DRAWS, dtype=np.float32)
    codes = _e4m3_codes(draws) if fp8 else draws
    unfinished = folder / "model.safetensors.part"
    with unfinished.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, dims, dtype in tensors:
            is_norm = len(dims) == 1 and "norm" in name
            if dtype == "BF16":
                file.write((_ones if is_norm else _random_bf16)(draws, dims).tobytes())
                draws = np.roll(draws, 7919)  # other weights for the next tensor
            elif dtype == "F8_E4M3":
                file.write(np.resize(codes, dims).tobytes())
                codes = np.roll(codes, 7919)
                fan_in = dims[-1]
            else:
                scale = np.float32(_LARGEST_DRAW / 448 * fan_in**-0.5)
                file.write(np.full(dims, scale, np.float32).tobytes())
    unfinished.rename(folder / "model.safetensors")


def _with_scales(
    tensors: Iterator[tuple[str, tuple[int, ...]]], fp8: str
) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Names, shapes and types, each weight of a linear layer in front of its scales."""
    for name, dims in tensors:
        if not fp8 or not name.endswith("proj.weight"):
            yield name, dims, "BF16"
            continue
        yield name, dims, "F8_E4M3"
        if fp8 == "rows":
            yield name + "_scale", (dims[0], 1), "F32"
        else:
            down, across = (-(-size // _FP8_BLOCK) for size in dims)
            yield name + "_scale_inv", (down, across), "F32"


def _e4m3_codes(draws: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of normal numbers, the largest of which are cut off."""
    codes = np.arange(127)
    exponents, mantissas = codes >> 3, codes & 7
    values = np.where(
        exponents == 0, mantissas * 2.0**-9, (8 + mantissas) * 2.0 ** (exponents - 10.0)
    )
    middles = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    found = np.searchsorted(middles, np.abs(draws) * np.float32(448 / _LARGEST_DRAW))
    return (found | np.where(draws < 0, 128, 0)).astype(np.uint8)


def tensors_of(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a shape's tensors, as transformers names those of most models. gpt-oss'
    experts are apart, and latent attention has its parts by heads, as GGUF files have both."""
    width, experts = config["hidden_size"], config.get("num_experts", 0)
    ffn = config.get("moe_intermediate_size", config["intermediate_size"])
    is_gpt_oss = config["model_type"] == "gpt_oss"
    yield "model.embed_tokens.weight", (config["vocab_size"], width)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm.weight", (width,)
        latent = "kv_lora_rank" in config
        for name, dims in _latent_tensors(config) if latent else _attention_tensors(config):
            yield f"{layer}self_attn.{name}", dims
        yield layer + "post_attention_layernorm.weight", (width,)
        has_experts = experts and i >= config.get("num_dense_layers", 0)
        if has_experts:
            yield layer + "mlp.gate.weight", (experts, width)
        if is_gpt_oss:
            yield layer + "mlp.gate.bias", (experts,)
        inner = ffn if has_experts else config["intermediate_size"]
        shared = ffn * config.get("num_shared_experts", 0) if has_experts else 0
        for kind, rows, columns in (("gate", inner, width), ("up", inner, width), ("down", 0, 0)):
            dims = (rows, columns) if rows else (width, inner)
            if not has_experts:
                yield f"{layer}mlp.{kind}_proj.weight", dims
                continue
            for expert in range(experts):
                yield f"{layer}mlp.experts.{expert}.{kind}_proj.weight", dims
            if is_gpt_oss:
                for expert in range(experts):
                    yield f"{layer}mlp.experts.{expert}.{kind}_proj.bias", dims[:1]
            if shared:
                dims = (shared, width) if rows else (width, shared)
                yield f"{layer}mlp.shared_experts.{kind}_proj.weight", dims
    yield "model.norm.weight", (width,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], width)


def _attention_tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, head, family = config["hidden_size"], config["head_dim"], config["model_type"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    for name, rows in (("q", queries), ("k", keys), ("v", keys), ("o", width)):
        yield f"{name}_proj.weight", (rows, queries if name == "o" else width)
        if family == "gpt_oss":
            yield f"{name}_proj.bias", (rows,)
    if family == "gpt_oss":
        yield "sinks", (config["num_attention_heads"],)
    elif family != "llama":
        is_olmoe = family == "olmoe"  # over all heads at once
        yield "q_norm.weight", (queries if is_olmoe else head,)
        yield "k_norm.weight", (keys if is_olmoe else head,)


def _latent_tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, heads, rank = (config[k] for k in ("hidden_size", "num_attention_heads", "kv_lora_rank"))
    plain, rotary, value = (
        config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    query_rank = config["q_lora_rank"]
    yield "q_a_proj.weight", (query_rank, width)
    yield "q_a_layernorm.weight", (query_rank,)
    yield "q_b_proj.weight", (heads * (plain + rotary), query_rank)
    yield "kv_a_proj_with_mqa.weight", (rank + rotary, width)
    yield "kv_a_layernorm.weight", (rank,)
    yield "k_b_proj.weight", (heads, rank, plain)
    yield "v_b_proj.weight", (heads, value, rank)
    yield "o_proj.weight", (width, heads * value)


def _random_bf16(draws: np.ndarray[Any, Any], dims: tuple[int, ...]) -> np.ndarray[Any, Any]:
    values = draws * np.float32(dims[-1] ** -0.5)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)  # truncated: any bf16 will do
    return np.resize(bits, dims)


def _ones(_draws: np.ndarray[Any, Any], dims: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.full(dims, 0x3F80, np.uint16)


def write_gguf(folder: Path, path: Path, dtype: str) -> None:
    """The checkpoint in `folder` as one GGUF file; norms are f32 always.

    dtype: float32, float16, bfloat16, or int8 and int4 for llama.cpp's own Q8_0 and Q4_0; or Q8_0
    and Q4_K, whose blocks are drawn, which takes no time.
    """
    import gguf

    types = gguf.GGMLQuantizationType
    blocks = {"int8": types.Q8_0, "int4": types.Q4_0}
    drawn = {"Q8_0": types.Q8_0, "Q4_K": types.Q4_K}
    kinds = {
        "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
        "Q4_K": gguf.LlamaFileType.MOSTLY_Q4_K_M,
        "float32": gguf.LlamaFileType.ALL_F32,
        "float16": gguf.LlamaFileType.MOSTLY_F16,
        "bfloat16": gguf.LlamaFileType.MOSTLY_BF16,
        "int8": gguf.LlamaFileType.MOSTLY_Q8_0,
        "int4": gguf.LlamaFileType.MOSTLY_Q4_0,
    }

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    family = config["model_type"]
    archs = {"qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "deepseek_v2": "deepseek2"}
    arch = archs.get(family, family)
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_name(folder.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if "kv_lora_rank" in config:
        _add_latent(writer, config)
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"])
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if "moe_intermediate_size" in config:
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        elif family == "gpt_oss":
            writer.add_expert_feed_forward_length(config["intermediate_size"])
    if "num_shared_experts" in config:
        writer.add_expert_shared_count(config["num_shared_experts"])
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_weights_scale(1.0)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(kinds[dtype])
    tokens, merges = read_tokenizer(folder)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(tokens) - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_add_bos_token(False)
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch),
        config["num_hidden_layers"],
    )
    for name, data in _stacked(_read_safetensors(folder / "model.safetensors")):
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if name.endswith("sinks"):
            new_name += ".weight"
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        part = name.split(".")[-2]
        if arch == "llama" and part in heads and dtype not in drawn:
            data = _interleave(data, config[heads[part]])
        # Routers are floats, and so are biases, of which experts have a row each.
        is_weight = data.ndim >= 2 and not name.endswith(("mlp.gate.weight", ".bias"))
        if is_weight and dtype == "bfloat16":
            writer.add_tensor(new_name, data.view(np.uint8), raw_dtype=types.BF16)
            continue
        if is_weight and dtype in drawn:
            writer.add_tensor(new_name, _drawn_blocks(dtype, data.shape), raw_dtype=drawn[dtype])
            continue
        floats = (data.astype(np.uint32) << 16).view(np.float32)
        if is_weight and dtype == "float16":
            writer.add_tensor(new_name, floats.astype(np.float16))
        elif is_weight and dtype in blocks:
            packed = gguf.quants.quantize(floats, blocks[dtype])
            writer.add_tensor(new_name, packed, raw_dtype=blocks[dtype])
        else:
            writer.add_tensor(new_name, floats)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def drawn_rows(kind: str, rows: int, columns: int) -> np.ndarray[Any, Any]:
    """Blocks of Q8_0 or Q4_K as bytes [rows, bytes of a row]: codes of any bits, scales for values
    with a variance of about 1 / columns."""
    elements, num_bytes = {"Q8_0": (32, 34), "Q4_K": (256, 144)}[kind]
    count = rows * columns // elements
    drawn = np.random.default_rng(0).integers(0, 256, (min(count, 30_011), num_bytes), np.uint8)
    scale = columns**-0.5 / (74 if kind == "Q8_0" else 150)
    scales = [scale] if kind == "Q8_0" else [scale, 7.5 * scale]
    drawn[:, : 2 * len(scales)] = np.array(scales, np.float16).view(np.uint8)
    return np.resize(drawn, (count, num_bytes)).reshape(rows, -1)


def _drawn_blocks(kind: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    rows = int(np.prod(shape[:-1]))
    return drawn_rows(kind, rows, shape[-1]).reshape(*shape[:-1], -1)


def _add_latent(writer: Any, config: dict[str, Any]) -> None:
    rank, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(rotary)
    writer.add_key_length(rank + rotary)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotary)
    writer.add_value_length_mla(config["v_head_dim"])


def _stacked(
    tensors: Iterator[tuple[str, np.ndarray[Any, Any]]],
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Matrices that each expert has, one after another, as one tensor of all."""
    begun, parts = "", []
    for name, data in tensors:
        whole = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        if parts and whole != begun:
            yield begun, np.stack(parts)
            parts = []
        if whole == name:
            yield name, data
        else:
            begun = whole
            parts.append(data)
    if parts:
        yield begun, np.stack(parts)


def _interleave(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """The rows of q or k in the order of llama.cpp's Llama, which rotates neighbouring pairs."""
    split = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, rows.shape[1])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(rows.shape))


def _read_safetensors(path: Path) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    data = np.memmap(path, np.uint8, "r")
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    header = json.loads(data[8 : 8 + length].tobytes())
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        yield name, data[begin:end].view(np.uint16).reshape(entry["shape"])


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
