"""Writes linear weights and their description as compressed-tensors has them (version 0.20), which
vLLM, SGLang, transformers and llmserve load. Source: the package's compressors and presets."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from llmserve.quantization.grids import BLOCK, Grid
from llmserve.quantization.number_formats import f32_to_e4m3, pack_nibbles, pack_words
from llmserve.quantization.schemes import Activations, Scheme
from llmserve.quantization.tensor_files import RawTensor, raw
from llmserve.quantization.weight_grid import Quantized

VERSION = "0.20.0"


def tensors_of(
    name: str,
    weight: Quantized,
    scheme_format: str,
    scale_dtype: str,
    input_scale: float | None = None,
) -> dict[str, RawTensor]:
    """The tensors that take the place of "<name>.weight". input_scale: of static activations."""
    grid, codes, scales = weight.grid, weight.codes, weight.scales
    out: dict[str, RawTensor] = {}
    if scheme_format == "pack-quantized":
        unsigned = codes.astype(np.int32) - grid.lowest
        out["weight_packed"] = raw(pack_words(unsigned, grid.bits))
        out["weight_shape"] = raw(np.array(codes.shape, np.int64))
        if scales.zero is not None:  # packed along the rows of the weight
            zero = scales.zero.astype(np.int32).T - grid.lowest
            packed = pack_words(zero, grid.bits)
            out["weight_zero_point"] = raw(np.ascontiguousarray(packed.T))
    elif scheme_format in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        out["weight_packed"] = raw(pack_nibbles(codes))
    elif scheme_format == "float-quantized":
        out["weight"] = raw(codes, "float8_e4m3fn")
    else:
        out["weight"] = raw(codes)
    if grid.kind == "nvfp4":
        out["weight_scale"] = raw(f32_to_e4m3(scales.scale), "float8_e4m3fn")
        out["weight_global_scale"] = raw(np.array([scales.global_scale], np.float32))
    elif grid.kind == "mxfp4":
        _, exponent = np.frexp(scales.scale)  # of powers of two: 0.5 * 2^exponent
        out["weight_scale"] = raw((exponent - 1 + 127).astype(np.uint8))
    else:
        scale = scales.scale[::BLOCK] if grid.is_block else scales.scale
        out["weight_scale"] = raw(scale, scale_dtype)
    if input_scale is not None:
        out["input_scale"] = raw(np.array([input_scale], np.float32), scale_dtype)
    return {f"{name}.{suffix}": tensor for suffix, tensor in out.items()}


def _weights(grid: Grid) -> dict[str, Any]:
    strategy = "group" if grid.group_size else "channel"
    if grid.is_block:
        strategy = "block"
    if grid.kind == "nvfp4":
        strategy = "tensor_group"
    out: dict[str, Any] = {
        "num_bits": grid.bits,
        "type": "int" if grid.kind == "int" else "float",
        "symmetric": grid.is_symmetric,
        "strategy": strategy,
        "group_size": grid.group_size if grid.group_size and not grid.is_block else None,
        "block_structure": [BLOCK, BLOCK] if grid.is_block else None,
        "dynamic": False,
        "actorder": None,
        "observer": "memoryless_minmax",
        "observer_kwargs": {},
    }
    if grid.kind == "nvfp4":
        out["scale_dtype"] = out["zp_dtype"] = "torch.float8_e4m3fn"
    if grid.kind == "mxfp4":
        out["scale_dtype"] = out["zp_dtype"] = "torch.uint8"
    return out


def _activations(activations: Activations) -> dict[str, Any]:
    return {
        "num_bits": 8,
        "type": "int" if activations.kind == "int" else "float",
        "symmetric": True,
        "strategy": activations.strategy,
        "group_size": BLOCK if activations.strategy == "group" else None,
        "block_structure": None,
        "dynamic": not activations.is_static,
        "actorder": None,
        "observer": "minmax" if activations.is_static else None,
        "observer_kwargs": {},
    }


def config_of(
    schemes: Sequence[tuple[Scheme, Sequence[str]]],
    ignore: Sequence[str],
    *,
    has_fp8_kv: bool = False,
) -> dict[str, Any]:
    """config.json's quantization_config. Each scheme comes with the modules that have it; "Linear"
    stands for all that others do not name."""
    formats = {scheme.format for scheme, _ in schemes}
    groups = {}
    for i, (scheme, targets) in enumerate(schemes):
        activations = scheme.activations
        groups[f"group_{i}"] = {
            "targets": list(targets),
            "format": scheme.format,
            "weights": _weights(scheme.grid),
            "input_activations": _activations(activations) if activations else None,
            "output_activations": None,
        }
    kv_cache = _activations(Activations("fp8", "tensor", is_static=True)) if has_fp8_kv else None
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "config_groups": groups,
        "ignore": list(ignore),
        "kv_cache_scheme": kv_cache,
        "sparsity_config": {},
        "transform_config": {},
        "version": VERSION,
    }
