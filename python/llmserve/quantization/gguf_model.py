"""A model's folder as one GGUF file, which llama.cpp and its kin load.

Names and metadata: gguf-py 0.19; what happens to tensors, and which get more bits: llama.cpp.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmserve.common.arguments import describe
from llmserve.errors import InvalidArgument, NotSupported
from llmserve.quantization.gguf_blocks import BLOCKS, PLAIN
from llmserve.quantization.gguf_file import GgufTensor, Value, write_gguf
from llmserve.quantization.gguf_vocabulary import vocabulary_fields
from llmserve.quantization.number_formats import Array, Floats, f32_to_bf16
from llmserve.quantization.tensor_files import TensorFolder

# Architecture -> GGUF's name, and whether rows of q and k go in rotary pairs.
_ARCHITECTURES = {
    "LlamaForCausalLM": ("llama", True),
    "MistralForCausalLM": ("llama", True),
    "Qwen2ForCausalLM": ("qwen2", False),
    "Qwen3ForCausalLM": ("qwen3", False),
}
_NAMES = (
    (r"model\.embed_tokens\.", "token_embd."),
    (r"model\.norm\.", "output_norm."),
    (r"lm_head\.", "output."),
    (r"model\.layers\.(\d+)\.input_layernorm\.", r"blk.\1.attn_norm."),
    (r"model\.layers\.(\d+)\.post_attention_layernorm\.", r"blk.\1.ffn_norm."),
    (r"model\.layers\.(\d+)\.self_attn\.(q|k|v)_proj\.", r"blk.\1.attn_\2."),
    (r"model\.layers\.(\d+)\.self_attn\.o_proj\.", r"blk.\1.attn_output."),
    (r"model\.layers\.(\d+)\.self_attn\.(q|k)_norm\.", r"blk.\1.attn_\2_norm."),
    (r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.", r"blk.\1.ffn_\2."),
)
# The mixes: what most matrices are, what those that need more are, and llama.cpp's number.
_MIXES = {
    "F16": ("F16", "F16", 1),
    "BF16": ("BF16", "BF16", 32),
    "Q8_0": ("Q8_0", "Q8_0", 7),
    "Q6_K": ("Q6_K", "Q6_K", 18),
    "Q5_K_M": ("Q5_K", "Q6_K", 17),
    "Q5_K_S": ("Q5_K", "Q5_K", 16),
    "Q4_K_M": ("Q4_K", "Q6_K", 15),
    "Q4_K_S": ("Q4_K", "Q4_K", 14),
    "Q4_0": ("Q4_0", "Q4_0", 2),
}
_ROWS = 256  # made at a time: a strip of floats and its blocks


def find_mix(scheme: str) -> str | None:
    """The mix that a scheme "gguf:Q4_K_M" names; None for other schemes. Raises InvalidArgument."""
    prefix, separator, name = scheme.partition(":")
    if not separator or prefix.lower() != "gguf":
        return None
    mix = name.upper()
    if mix not in _MIXES:
        raise InvalidArgument(f"gguf: expected one of {', '.join(_MIXES)}, got {describe(name)}")
    return mix


def gguf_name(name: str) -> str:
    """A tensor's name there. Raises NotSupported."""
    for pattern, replacement in _NAMES:
        found = re.match(pattern, name)
        if found:
            return found.expand(replacement) + name[found.end() :]
    raise NotSupported(f"tensor {name!r} has no name in GGUF that is known here")


def kind_of(name: str, shape: tuple[int, ...], mix: str, num_layers: int, *, is_tied: bool) -> str:
    """The type of a tensor by its name in GGUF: vectors are F32, the head has 6 bits or more, and
    of a mix "M" so have the values and the MLP's outputs of the first and last eighth of the layers
    and every third between. Rows that blocks do not divide get a type of smaller ones."""
    if len(shape) != 2:
        return "F32"
    most, more, _ = _MIXES[mix]
    is_head = name == "output.weight" or (is_tied and name == "token_embd.weight")
    kind = most
    if is_head and most in ("Q4_0", "Q4_K", "Q5_K"):
        kind = "Q6_K"
    found = re.match(r"blk\.(\d+)\.(attn_v|ffn_down)\.", name)
    if found and more != most:
        layer, eighth = int(found[1]), num_layers // 8
        if layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2:
            kind = more
    for smaller in (kind, "Q8_0", "F16"):
        if smaller in PLAIN or shape[1] % BLOCKS[smaller][1] == 0:
            return smaller
    raise AssertionError(kind)


def write_model(model: Path, out: Path, mix: str) -> dict[str, str]:
    """Writes the file; returns the type of each tensor. Raises NotSupported for an architecture,
    a rotary scaling or a tokenizer that GGUF has and this does not know."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    tensors = TensorFolder(model)
    architecture = (config.get("architectures") or [None])[0]
    if architecture not in _ARCHITECTURES:
        raise NotSupported(
            f"{model}: gguf is written of {', '.join(_ARCHITECTURES)}, got {architecture}; use a "
            f"scheme of compressed-tensors"
        )
    arch, is_paired = _ARCHITECTURES[architecture]
    is_tied = "lm_head.weight" not in tensors or bool(config.get("tie_word_embeddings"))
    num_layers = int(config["num_hidden_layers"])
    kinds, written = {}, []
    for name in tensors:
        if is_tied and name == "lm_head.weight":
            continue
        shape = tensors.shape(name)
        target = gguf_name(name)
        kind = kind_of(target, shape, mix, num_layers, is_tied=is_tied)
        kinds[target] = kind
        heads = _paired_heads(name, config) if is_paired else 0
        written.append(_tensor(tensors, name, target, kind, heads))
    factors = _llama3_factors(config)
    if factors is not None:
        written.append(_vector("rope_freqs.weight", factors))
    metadata = _metadata(config, arch, model, mix) | vocabulary_fields(model, config)
    write_gguf(out, metadata, written)
    return kinds


def _paired_heads(name: str, config: Mapping[str, Any]) -> int:
    heads = int(config["num_attention_heads"])
    if ".q_proj." in name:
        return heads
    return int(config.get("num_key_value_heads") or heads) if ".k_proj." in name else 0


def _tensor(tensors: TensorFolder, name: str, target: str, kind: str, heads: int) -> GgufTensor:
    shape = tensors.shape(name)
    count = int(np.prod(shape))
    if kind in PLAIN:
        number, num_bytes = PLAIN[kind], count * (4 if kind == "F32" else 2)
    else:
        number, size, make = BLOCKS[kind]
        num_bytes = count // size * make(np.zeros((1, size), np.float32)).shape[1]

    def parts() -> Iterator[Array]:
        values = tensors.floats(name)
        if heads:  # halves of a head's rows become pairs of neighbours
            halves = values.reshape(heads, 2, shape[0] // heads // 2, -1)
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(shape)
        for begin in range(0, shape[0], _ROWS * 16 if len(shape) == 1 else _ROWS):
            end = begin + (_ROWS * 16 if len(shape) == 1 else _ROWS)
            yield _encoded(values[begin:end], kind)

    return GgufTensor(target, number, shape, num_bytes, parts)


def _encoded(values: Floats, kind: str) -> Array:
    if kind == "F32":
        return values
    if kind == "F16":
        return values.astype(np.float16)
    if kind == "BF16":
        return f32_to_bf16(values)
    return BLOCKS[kind][2](values)


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _rope(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The rotary embedding's settings, and how it is scaled."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope, str(rope.get("rope_type", rope.get("type", "default")))


def _rope_base(config: Mapping[str, Any]) -> float:
    return float(_rope(config)[0].get("rope_theta", config.get("rope_theta", 10000.0)))


def _llama3_factors(config: Mapping[str, Any]) -> Floats | None:
    """What Llama 3 divides each frequency by [head_dim / 2]: 1 where a context that was trained
    holds high_freq_factor turns or more, `factor` where it holds low_freq_factor or fewer, and a
    blend between. None for other scalings."""
    rope, kind = _rope(config)
    if kind != "llama3":
        return None
    head_dim = _head_dim(config)
    frequencies = _rope_base(config) ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = int(rope["original_max_position_embeddings"]) * frequencies / (2 * np.pi)
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    blend = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - blend) / float(rope["factor"]) + blend)).astype(np.float32)


def _vector(name: str, values: Floats) -> GgufTensor:
    return GgufTensor(name, PLAIN["F32"], values.shape, values.nbytes, lambda: [values])


def _metadata(config: Mapping[str, Any], arch: str, model: Path, mix: str) -> dict[str, Value]:
    heads = int(config["num_attention_heads"])
    head_dim = _head_dim(config)
    rope, kind = _rope(config)
    if kind not in ("default", "linear", "yarn", "llama3"):
        raise NotSupported(f"{model}: gguf is not written of rotary scaling {kind!r}")
    out: dict[str, Value] = {
        "general.architecture": arch,
        "general.name": model.name,
        "general.file_type": _MIXES[mix][2],
        "general.quantization_version": 2,
        f"{arch}.context_length": int(config["max_position_embeddings"]),
        f"{arch}.embedding_length": int(config["hidden_size"]),
        f"{arch}.block_count": int(config["num_hidden_layers"]),
        f"{arch}.feed_forward_length": int(config["intermediate_size"]),
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": int(config.get("num_key_value_heads") or heads),
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.rope.dimension_count": head_dim,
        f"{arch}.rope.freq_base": _rope_base(config),
        f"{arch}.vocab_size": int(config["vocab_size"]),
    }
    if kind in ("linear", "yarn"):  # llama3's factors are a tensor
        out[f"{arch}.rope.scaling.type"] = kind
        out[f"{arch}.rope.scaling.factor"] = float(rope["factor"])
        length = rope.get("original_max_position_embeddings")
        if length:
            out[f"{arch}.rope.scaling.original_context_length"] = int(length)
    return out
