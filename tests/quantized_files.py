"""Writers of quantized checkpoints, by the layouts that other tools publish.

Each takes a plain checkpoint apart, rounds its linear weights and writes two folders: the
quantized one, and a twin in float32 that holds the very numbers that the first stands for. Values
are drawn so that columns, rows and groups differ from each other: a transposed or misplaced group
shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import copy_checkpoint

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]

# The tensors of a module by their suffixes, and the matrix [N, K] that they stand for.
Quantized = tuple[dict[str, Any], np.ndarray]
Writer = Callable[[np.ndarray, np.random.Generator], Quantized]


@dataclass(frozen=True)
class Layout:
    """A way to write linear weights, and what the configuration says of it."""

    config: dict[str, Any]
    write: Writer


def write_pair(
    source: Path,
    directory: Path,
    layout: Layout,
    *,
    quantizes: Callable[[str], bool] = lambda name: "proj" in name,
    config_file: str | None = None,
    seed: int = 0,
) -> tuple[Path, Path]:
    """The quantized folder and its twin. `quantizes` chooses modules by their names."""
    from safetensors.torch import load_file, save_file

    rng = np.random.default_rng(seed)
    quantized, twin = directory / "quantized", directory / "twin"
    for folder in (quantized, twin):
        folder.parent.mkdir(parents=True, exist_ok=True)
        copy_checkpoint(source, folder)
    packed, plain = {}, {}
    for name, tensor in sorted(load_file(source / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and tensor.ndim == 2 and quantizes(module):
            tensors, values = layout.write(tensor.float().numpy(), rng)
            for suffix, part in tensors.items():
                packed[f"{module}.{suffix}"] = as_torch(part)
            plain[name] = as_torch(np.ascontiguousarray(values, np.float32))
        else:
            packed[name] = plain[name] = tensor.float()
    save_file(packed, quantized / "model.safetensors")
    save_file(plain, twin / "model.safetensors")
    for folder in (quantized, twin):
        config = json.loads((folder / "config.json").read_text())
        config["dtype"] = "float32"
        if folder == quantized and config_file is None:
            config["quantization_config"] = layout.config
        (folder / "config.json").write_text(json.dumps(config))
    if config_file is not None:
        (quantized / config_file).write_text(json.dumps(layout.config))
    return quantized, twin


def as_torch(part: Any) -> Any:
    """A tensor of torch, whose types NumPy does not all have."""
    import torch

    return part if isinstance(part, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(part))


def _pack_stream(fields: np.ndarray, bits: int) -> np.ndarray:
    """[lines, count] to I32 words [lines, ceil(count * bits / 32)], low bits first."""
    lines, count = fields.shape
    spread = (fields[:, :, None] >> np.arange(bits)) & 1
    stream = np.zeros((lines, (count * bits + 31) // 32 * 32), np.uint8)
    stream[:, : count * bits] = spread.reshape(lines, -1)
    return np.packbits(stream, axis=1, bitorder="little").view(np.uint32).view(np.int32)


def _pack_words(fields: np.ndarray, bits: int) -> np.ndarray:
    """The same with whole fields in each word alone."""
    per_word = 32 // bits
    lines, count = fields.shape
    padded = np.zeros((lines, (count + per_word - 1) // per_word * per_word), np.uint32)
    padded[:, :count] = fields
    shifts = np.arange(per_word, dtype=np.uint32) * bits
    return (
        (padded.reshape(lines, -1, per_word) << shifts)
        .sum(-1, dtype=np.uint64)
        .astype(np.uint32)
        .view(np.int32)
    )


def _rounded(
    weight: np.ndarray, bits: int, group_of: np.ndarray, *, symmetric: bool, dtype: Any = np.float16
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fields [N, K], zero points [N, G] and scales [N, G], of `dtype`, of groups of columns."""
    num_groups = int(group_of.max()) + 1
    top = 2**bits - 1
    q = np.zeros(weight.shape, np.int64)
    zeros = np.full((len(weight), num_groups), 2 ** (bits - 1), np.int64)
    scales = np.zeros((len(weight), num_groups), dtype)
    for g in range(num_groups):
        part = weight[:, group_of == g]
        if symmetric:
            scale = 2 * np.abs(part).max(1) / top
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scale = (high - low) / top
            zeros[:, g] = np.clip(np.round(-low / scale), 0, top)
        scales[:, g] = scale.astype(dtype)
        exact = scales[:, g : g + 1].astype(np.float32)
        q[:, group_of == g] = np.clip(np.round(part / exact) + zeros[:, g : g + 1], 0, top)
    return q, zeros, scales


def _values(
    q: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group_of: np.ndarray
) -> np.ndarray:
    number = (q - zeros[:, group_of]).astype(np.float32)
    return number * scales.astype(np.float32)[:, group_of]


def gptq(
    bits: int = 4,
    group: int = 32,
    *,
    symmetric: bool = True,
    v2: bool = False,
    shuffled: bool = False,
    extreme_zeros: bool = False,
    **config: Any,
) -> Layout:
    """GPTQ. `extreme_zeros`: some zero points are 0, and the largest. Symmetric files have zero
    points of which nothing may be read."""

    def write(weight: np.ndarray, rng: np.random.Generator) -> Quantized:
        k = weight.shape[1]
        size = k if group == -1 else group
        group_of = np.arange(k) // size
        if shuffled:
            group_of = group_of[rng.permutation(k)]
        q, zeros, scales = _rounded(weight, bits, group_of, symmetric=symmetric)
        if extreme_zeros:
            zeros[::3] = 0
            zeros[1::3] = 2**bits - 1
        values = _values(q, zeros, scales, group_of)
        stored = rng.integers(0, 2**bits, zeros.shape) if symmetric else zeros - (0 if v2 else 1)
        return {
            "qweight": _pack_stream(q.astype(np.uint32), bits).T,
            "qzeros": _pack_stream((stored.T % 2**bits).astype(np.uint32), bits),
            "scales": scales.T,
            "g_idx": group_of.astype(np.int32),
        }, values

    fields = {"bits": bits, "group_size": group, "sym": symmetric, "desc_act": shuffled}
    if v2:
        fields["checkpoint_format"] = "gptq_v2"
    return Layout({"quant_method": "gptq", **fields, **config}, write)


def awq(group: int = 32, *, version: str = "gemm", **config: Any) -> Layout:
    """AutoAWQ's gemm and gemv."""

    def write(weight: np.ndarray, _: np.random.Generator) -> Quantized:
        n, k = weight.shape
        group_of = np.arange(k) // group
        q, zeros, scales = _rounded(weight, 4, group_of, symmetric=False)
        values = _values(q, zeros, scales, group_of)
        if version == "gemv":
            width = (zeros.shape[1] + 7) // 8
            padded = np.zeros((n, 8 * width), np.float16)
            padded[:, : scales.shape[1]] = scales
            fields = np.zeros((n, 8 * width), np.uint32)
            fields[:, : zeros.shape[1]] = zeros
            return {
                "qweight": _pack_words(q.astype(np.uint32), 4),
                "qzeros": _pack_words(fields, 4),
                "scales": padded,
            }, values

        def by_columns(fields: np.ndarray) -> np.ndarray:
            lines = fields.T.astype(np.uint32).reshape(fields.shape[1], -1, 8)
            return _pack_words(lines[:, :, _AWQ_ORDER].reshape(fields.shape[1], -1), 4)

        return {
            "qweight": by_columns(q),
            "qzeros": by_columns(zeros),
            "scales": scales.T,
        }, values

    fields = {"bits": 4, "group_size": group, "zero_point": True, "version": version}
    return Layout({"quant_method": "awq", **fields, **config}, write)


def _scheme(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def _bf16(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(array, np.float32)).to(torch.bfloat16)


def packed(
    bits: int = 4,
    group: int | None = 32,
    *,
    symmetric: bool = True,
    padded: bool = False,
    shuffled: bool = False,
    dtype: str = "bfloat16",
) -> Layout:
    """compressed-tensors, pack-quantized. `padded`: as before 3, 5, 6 and 7 bits were dense."""

    def write(weight: np.ndarray, rng: np.random.Generator) -> Quantized:
        n, k = weight.shape
        group_of = np.arange(k) // (group or k)
        if shuffled:
            group_of = group_of[rng.permutation(k)]
        q, zeros, scales = _rounded(weight, bits, group_of, symmetric=symmetric, dtype=np.float32)
        stored = _bf16(scales) if dtype == "bfloat16" else scales
        exact = stored.float().numpy() if dtype == "bfloat16" else scales
        pack = _pack_words if padded else _pack_stream
        tensors: dict[str, Any] = {
            "weight_packed": pack(q.astype(np.uint32), bits),
            "weight_scale": stored,
            "weight_shape": np.array([n, k], np.int64),
        }
        if not symmetric:
            tensors["weight_zero_point"] = pack(zeros.T.astype(np.uint32), bits).T
        if shuffled:
            tensors["weight_g_idx"] = group_of.astype(np.int32)
        return tensors, _values(q, zeros, exact, group_of)

    scheme = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group else "channel",
        "group_size": group,
        "actorder": "group" if shuffled else None,
    }
    return Layout({**_scheme(**scheme), "format": "pack-quantized"}, write)


def int_quantized(bits: int = 8, group: int | None = None, *, symmetric: bool = True) -> Layout:
    """compressed-tensors, int-quantized: W8A8, and 4 bits that are not packed."""

    def write(weight: np.ndarray, _: np.random.Generator) -> Quantized:
        _, k = weight.shape
        group_of = np.arange(k) // (group or k)
        q, zeros, scales = _rounded(weight, bits, group_of, symmetric=symmetric, dtype=np.float32)
        half = 2 ** (bits - 1)
        tensors: dict[str, Any] = {
            "weight": (q - half).astype(np.int8),
            "weight_scale": scales,
            "input_scale": np.array([0.25], np.float32),
            "input_zero_point": np.array([3], np.int8),
        }
        if not symmetric:
            tensors["weight_zero_point"] = (zeros - half).astype(np.int8)
        return tensors, _values(q, zeros, scales, group_of)

    scheme = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group else "channel",
        "group_size": group,
    }
    return Layout({**_scheme(**scheme), "format": "int-quantized"}, write)


def _e4m3(array: np.ndarray) -> tuple[Any, np.ndarray]:
    """As stored, and the numbers."""
    import torch

    codes = torch.from_numpy(np.ascontiguousarray(array, np.float32)).to(torch.float8_e4m3fn)
    return codes, codes.float().numpy()


def fp8(
    block: tuple[int, int] | None = None,
    *,
    per_row: bool = False,
    scale: str = "weight_scale_inv",
    config: dict[str, Any] | None = None,
    exponents: bool = False,
) -> Layout:
    """E4M3 with scales of the tensor, its rows or blocks. `exponents`: scales are E8M0."""

    def write(weight: np.ndarray, _: np.random.Generator) -> Quantized:
        import torch

        n, k = weight.shape
        down, across = block or ((1, k) if per_row else (n, k))
        rows, columns = np.arange(n) // down, np.arange(k) // across
        scales = np.zeros((rows[-1] + 1, columns[-1] + 1), np.float32)
        for i in range(len(scales)):
            for j in range(scales.shape[1]):
                part = weight[rows == i][:, columns == j]
                scales[i, j] = np.abs(part).max() / 448
        if exponents:
            scales = np.exp2(np.ceil(np.log2(scales))).astype(np.float32)
        spread = scales[rows][:, columns]
        codes, numbers = _e4m3(weight / spread)
        kept: Any = scales if block or per_row else scales.reshape(())
        if exponents:
            kept = torch.from_numpy(scales).to(torch.float8_e8m0fnu)
        return {"weight": codes, scale: kept}, numbers * spread

    fields: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if block:
        fields["weight_block_size"] = list(block)
    return Layout(config or fields, write)


def float_quantized(**weights: Any) -> Layout:
    """compressed-tensors, float-quantized: scales of rows, or of blocks of `block_structure`."""
    block = weights.get("block_structure")
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, **weights}
    return fp8(
        tuple(block) if block else None,
        per_row=block is None,
        scale="weight_scale",
        config={**_scheme(**scheme), "format": "float-quantized"},
    )


def _e2m1(array: np.ndarray) -> np.ndarray:
    """The codes of the nearest values."""
    at = np.abs(array[..., None] - E2M1[:8] * np.sign(array)[..., None]).argmin(-1)
    return (at + 8 * (array < 0)).astype(np.uint8)


def _pack_nibbles(codes: np.ndarray) -> np.ndarray:
    return codes[..., 0::2] | codes[..., 1::2] << 4


def nvfp4(*, modelopt: bool = False) -> Layout:
    """NVFP4 of compressed-tensors, whose scale of the tensor divides, or of ModelOpt, whose scale
    multiplies."""

    def write(weight: np.ndarray, _: np.random.Generator) -> Quantized:
        n, k = weight.shape
        groups = weight.reshape(n, k // 16, 16)
        outer = np.float32(np.abs(weight).max() / (448 * 6))
        divisor = np.float32(1) / outer
        if not modelopt:
            outer = np.float32(1) / divisor  # as it is read
        codes, inner = _e4m3(np.abs(groups).max(-1) / 6 / outer)
        scale = inner * outer
        safe = np.where(scale == 0, 1, scale)[..., None]
        q = _e2m1(groups / safe)
        values = (E2M1[q] * scale[..., None]).reshape(n, k)
        nibbles = _pack_nibbles(q.reshape(n, k))
        if modelopt:
            return {
                "weight": nibbles,
                "weight_scale": codes,
                "weight_scale_2": outer.reshape(()),
                "input_scale": np.float32(0.5).reshape(()),
            }, values
        return {
            "weight_packed": nibbles,
            "weight_scale": codes,
            "weight_global_scale": divisor.reshape(1),
            "input_global_scale": np.array([2.0], np.float32),
        }, values

    if modelopt:
        return Layout({"quant_method": "modelopt", "quant_algo": "NVFP4"}, write)
    scheme = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    return Layout({**_scheme(**scheme), "format": "nvfp4-pack-quantized"}, write)


def mxfp4() -> Layout:
    """compressed-tensors' MXFP4."""

    def write(weight: np.ndarray, _: np.random.Generator) -> Quantized:
        n, k = weight.shape
        groups = weight.reshape(n, k // 32, 32)
        exponent = np.floor(np.log2(np.abs(groups).max(-1))) - 2
        scale = np.exp2(exponent).astype(np.float32)
        q = _e2m1(groups / scale[..., None])
        values = (E2M1[q] * scale[..., None]).reshape(n, k)
        return {
            "weight_packed": _pack_nibbles(q.reshape(n, k)),
            "weight_scale": (exponent + 127).astype(np.uint8),
        }, values

    scheme = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    return Layout({**_scheme(**scheme), "format": "mxfp4-pack-quantized"}, write)


def modelopt_awq(group: int = 32) -> Layout:
    """ModelOpt's W4A16_AWQ: two rows to a byte, and a factor of each column."""

    def write(weight: np.ndarray, rng: np.random.Generator) -> Quantized:
        k = weight.shape[1]
        group_of = np.arange(k) // group
        factor = (0.5 + rng.random(k)).astype(np.float32)
        q, zeros, scales = _rounded(weight / factor, 4, group_of, symmetric=True, dtype=np.float32)
        signed = (q - 8).astype(np.int8).view(np.uint8) & 15
        return {
            "weight": signed[0::2] | signed[1::2] << 4,
            "weight_scale": scales,
            "pre_quant_scale": factor,
        }, _values(q, zeros, scales, group_of) * factor

    fields = {"quant_algo": "W4A16_AWQ", "group_size": group, "exclude_modules": ["lm_head"]}
    return Layout({"quantization": fields, "quant_method": "modelopt"}, write)


_NF4 = np.array(
    [
        -1.0,
        -0.6961928,
        -0.52507305,
        -0.3949175,
        -0.28444138,
        -0.18477343,
        -0.09105004,
        0.0,
        0.0795803,
        0.1609302,
        0.2461123,
        0.33791524,
        0.44070983,
        0.562617,
        0.72295684,
        1.0,
    ],
    np.float32,
)

# bitsandbytes' own: the codes of its FP4 are in another order than E2M1's.
FP4 = np.array(
    [
        sign * value
        for sign in (1, -1)
        for value in (0, 0.0052083333, 0.6666667, 1, 0.33333334, 0.5, 0.16666667, 0.25)
    ],
    np.float32,
)


def bitsandbytes_4bit(
    *, double: bool = False, table: np.ndarray = _NF4, name: str = "nf4"
) -> Layout:
    """NF4 or FP4, whose scales are codes of 8 bits where it is quantized twice."""

    def write(weight: np.ndarray, rng: np.random.Generator) -> Quantized:
        n, k = weight.shape
        flat = weight.reshape(-1, 64)
        absmax = np.abs(flat).max(1)
        tensors: dict[str, Any] = {}
        state = {"quant_type": name, "blocksize": 64, "shape": [n, k], "dtype": "float32"}
        if double:
            outer_size = 256
            offset = np.float32(absmax.mean())
            spread = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
            blocks = np.pad(absmax - offset, (0, -len(absmax) % outer_size))
            outer = np.abs(blocks.reshape(-1, outer_size)).max(1).astype(np.float32)
            ratio = (absmax - offset) / np.repeat(outer, outer_size)[: len(absmax)]
            codes = np.abs(ratio[:, None] - spread).argmin(1).astype(np.uint8)
            absmax = spread[codes] * np.repeat(outer, outer_size)[: len(absmax)] + offset
            tensors |= {
                "weight.absmax": codes,
                "weight.nested_absmax": outer,
                "weight.nested_quant_map": spread,
            }
            state |= {"nested_blocksize": outer_size, "nested_offset": float(offset)}
        else:
            tensors["weight.absmax"] = absmax.astype(np.float32)
        q = np.abs(flat[..., None] / np.abs(flat).max(1)[:, None, None] - table).argmin(-1)
        q = q.astype(np.uint8).reshape(-1)
        tensors |= {
            "weight": (q[0::2] << 4 | q[1::2]).reshape(-1, 1),
            "weight.quant_map": table.copy(),
            f"weight.quant_state.bitsandbytes__{name}": np.frombuffer(
                json.dumps(state).encode(), np.uint8
            ).copy(),
        }
        values = table[q].reshape(-1, 64) * absmax.astype(np.float32)[:, None]
        return tensors, values.reshape(n, k)

    fields = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": name,
        "bnb_4bit_use_double_quant": double,
    }
    return Layout({"quant_method": "bitsandbytes", **fields}, write)


def bitsandbytes_int8() -> Layout:
    """LLM.int8()."""

    def write(weight: np.ndarray, _: np.random.Generator) -> Quantized:
        absmax = np.abs(weight).max(1).astype(np.float32)
        q = np.round(weight / absmax[:, None] * 127).astype(np.int8)
        scale = absmax * np.float32(1 / 127)
        return {
            "weight": q,
            "SCB": absmax,
            "weight_format": np.array(0, np.uint8),
        }, q.astype(np.float32) * scale[:, None]

    return Layout({"quant_method": "bitsandbytes", "load_in_8bit": True}, write)


# The tensors of experts by what follows the name of the one that they stand for, and the matrices
# [X, N, K].
FusedWriter = Callable[[np.ndarray, np.random.Generator], Quantized]


def write_fused_pair(
    source: Path, directory: Path, config: dict[str, Any], write: FusedWriter, *, transposed: bool
) -> tuple[Path, Path]:
    """The same of a checkpoint whose experts are tensors [X, N, K], or `transposed` [X, K, N]."""
    from safetensors.torch import load_file, save_file

    rng = np.random.default_rng(0)
    quantized, twin = directory / "quantized", directory / "twin"
    packed, plain = {}, {}
    for name, tensor in sorted(load_file(source / "model.safetensors").items()):
        if tensor.ndim == 3:
            matrices = tensor.float().numpy()
            tensors, values = write(matrices.swapaxes(1, 2) if transposed else matrices, rng)
            packed |= {name + suffix: as_torch(part) for suffix, part in tensors.items()}
            plain[name] = as_torch(values.swapaxes(1, 2) if transposed else values)
        else:
            packed[name] = plain[name] = tensor.float()
    for folder, tensors in ((quantized, packed), (twin, plain)):
        copy_checkpoint(source, folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        fields = json.loads((folder / "config.json").read_text())
        fields["dtype"] = "float32"
        if folder == quantized:
            fields["quantization_config"] = config
        (folder / "config.json").write_text(json.dumps(fields))
    return quantized, twin


def fused_mxfp4(matrices: np.ndarray, rng: np.random.Generator) -> Quantized:
    """gpt-oss's: blocks [X, N, K / 32, 16], scales [X, N, K / 32]."""
    num, n, k = matrices.shape
    tensors, values = mxfp4().write(matrices.reshape(num * n, k), rng)
    return {
        "_blocks": tensors["weight_packed"].reshape(num, n, k // 32, 16),
        "_scales": tensors["weight_scale"].reshape(num, n, k // 32),
    }, values.reshape(matrices.shape)


def fused_fp8(
    block: tuple[int, int] | None = None, *, per_row: bool = False, transposed: bool = False
) -> FusedWriter:
    """E4M3 with scales of each matrix [X], of its rows [X, N, 1] or of its blocks, which are
    turned with the matrices."""

    def write(matrices: np.ndarray, rng: np.random.Generator) -> Quantized:
        import torch

        suffix = "_scale_inv" if block else "_scale"
        layout = fp8(block, per_row=per_row, scale="scale")
        parts = [layout.write(matrix, rng) for matrix in matrices]
        codes = torch.stack([tensors["weight"] for tensors, _ in parts])
        scales = np.stack([tensors["scale"] for tensors, _ in parts])
        if transposed:
            codes = codes.swapaxes(1, 2).contiguous()
            scales = scales.swapaxes(-1, -2) if scales.ndim == 3 else scales
        return {"": codes, suffix: scales}, np.stack([values for _, values in parts])

    return write
