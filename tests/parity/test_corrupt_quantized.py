"""Damaged quantized files: each kind of damage to each tensor of each method ends in a typed error
that names the tensor, before anything is made of it."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantized_files as files
from checkpoints import checkpoint
from llmserve import LLM
from llmserve.errors import CorruptFile, LLMServeError, NotSupported
from parity.test_quantization_traps import MODULE, load, save
from quantized_files import Layout

N, K = 64, 128


@dataclass(frozen=True)
class Method:
    """A layout, and which tensors of it have to be there, by what their elements are."""

    layout: Layout
    codes: tuple[str, ...]
    scales: tuple[str, ...]
    others: tuple[str, ...] = ()


METHODS: dict[str, Method] = {
    "gptq": Method(files.gptq(4, 32), ("qweight",), ("scales",)),
    "gptq-3-asym": Method(
        files.gptq(3, 32, symmetric=False), ("qweight",), ("scales",), ("qzeros",)
    ),
    "gptq-act-order": Method(files.gptq(4, 32, shuffled=True), ("qweight",), ("scales",)),
    "awq-gemm": Method(files.awq(32), ("qweight",), ("scales",), ("qzeros",)),
    "awq-gemv": Method(files.awq(32, version="gemv"), ("qweight",), ("scales",), ("qzeros",)),
    "ct-packed": Method(
        files.packed(4, 32, symmetric=False),
        ("weight_packed",),
        ("weight_scale",),
        ("weight_zero_point",),
    ),
    "ct-packed-3": Method(files.packed(3, 32), ("weight_packed",), ("weight_scale",)),
    "ct-w8a8": Method(
        files.int_quantized(symmetric=False), ("weight",), ("weight_scale",), ("weight_zero_point",)
    ),
    "ct-fp8": Method(files.float_quantized(strategy="channel"), ("weight",), ("weight_scale",)),
    "ct-nvfp4": Method(
        files.nvfp4(), ("weight_packed",), ("weight_scale",), ("weight_global_scale",)
    ),
    "ct-mxfp4": Method(files.mxfp4(), ("weight_packed",), ("weight_scale",)),
    "fp8": Method(files.fp8(scale="weight_scale"), ("weight",), ("weight_scale",)),
    "fp8-block": Method(files.fp8((32, 32)), ("weight",), ("weight_scale_inv",)),
    "modelopt-nvfp4": Method(
        files.nvfp4(modelopt=True), ("weight",), ("weight_scale",), ("weight_scale_2",)
    ),
    "modelopt-awq": Method(files.modelopt_awq(32), ("weight",), ("weight_scale",)),
    "bnb-nf4": Method(
        files.bitsandbytes_4bit(double=True),
        ("weight",),
        ("weight.absmax",),
        ("weight.nested_absmax", "weight.nested_quant_map", "weight.quant_map"),
    ),
    "bnb-int8": Method(files.bitsandbytes_int8(), ("weight",), ("SCB",)),
}


def _filled(value: float) -> Callable[[Any], Any]:
    """One element in the middle is the value."""

    def fill(tensor: Any) -> Any:
        import torch

        flat = tensor.float().reshape(-1).clone()
        flat[len(flat) // 2] = value
        as_float8 = tensor.dtype == torch.float8_e4m3fn
        if as_float8 and np.isinf(value):
            return None  # E4M3 has none
        return flat.reshape(tensor.shape).to(tensor.dtype)

    return fill


def _as_doubles(tensor: Any) -> Any:
    return tensor.double()


def _with_a_row_more(tensor: Any) -> Any:
    import torch

    if tensor.ndim == 0:
        return torch.stack([tensor, tensor])
    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    return torch.cat([raw, raw[:1]]).view(tensor.dtype)


# What a tensor is made; None: it is taken away.
SHAPES: dict[str, Callable[[Any], Any] | None] = {
    "absent": None,
    "a-row-more": _with_a_row_more,
    "empty": lambda tensor: tensor.reshape(-1)[:0],
    "doubles": _as_doubles,
    "booleans": lambda tensor: tensor.float() != 0,
}
SIDES: dict[str, Callable[[Any], Any]] = {
    "a-row-less": lambda tensor: tensor[:-1],
    "a-column-less": lambda tensor: tensor[:, :-1],
    "a-dimension-more": lambda tensor: tensor[None],
}
VALUES = {"nan": _filled(float("nan")), "inf": _filled(float("inf"))}


def tensors_of(method: Method) -> dict[str, Any]:
    weight = np.random.default_rng(2).standard_normal((N, K)).astype(np.float32)
    tensors, _ = method.layout.write(weight, np.random.default_rng(3))
    return {name: files.as_torch(part) for name, part in tensors.items()}


def damages() -> Iterator[tuple[str, str, str]]:
    import torch

    for name, method in METHODS.items():
        tensors = tensors_of(method)
        for suffix in (*method.codes, *method.scales, *method.others):
            tensor = tensors[suffix]
            is_float = tensor.dtype.is_floating_point
            for damage in SHAPES:
                if damage != "doubles" or suffix != "weight" or tensor.dtype == torch.uint8:
                    yield name, suffix, damage
            if suffix in method.codes and tensor.ndim == 2 and tensor.shape[1] > 1:
                for damage in SIDES:
                    yield name, suffix, damage
            # Of a map one place may be nobody's.
            if is_float and suffix not in method.codes and not suffix.endswith("map"):
                yield name, suffix, "nan"
                if tensor.dtype != torch.float8_e4m3fn:
                    yield name, suffix, "inf"


DAMAGES = list(damages())


def test_the_kinds_of_damage_are_many() -> None:
    assert len(DAMAGES) + len(LIES) + len(FILES) >= 250
    assert len({name for name, _, _ in DAMAGES}) == len(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_the_good_file_is_taken(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", tensors_of(METHODS[name]), METHODS[name].layout.config)
    for quantization in ("", "none"):
        assert load(folder, N, K, quantization)[0][:2] == (N, K)


@pytest.mark.parametrize(("name", "suffix", "damage"), DAMAGES, ids=map("-".join, DAMAGES))
def test_a_damaged_tensor_is_told(name: str, suffix: str, damage: str, tmp_path: Path) -> None:
    method = METHODS[name]
    tensors = tensors_of(method)
    change = {**SHAPES, **SIDES, **VALUES}[damage]
    tensor = tensors.pop(suffix)
    if change is not None:
        tensors[suffix] = change(tensor).contiguous()
    folder = save(tmp_path / "model", tensors, method.layout.config)
    for quantization in ("", "none"):
        with pytest.raises(CorruptFile) as error:
            load(folder, N, K, quantization)
        assert MODULE in str(error.value)


# What the configuration says, of which method, and whether it is a field that is wrong or the
# tensors that do not go with it.
LIES: list[tuple[str, dict[str, Any]]] = [
    *itertools.product(
        ["gptq"],
        [
            {"bits": 8},
            {"bits": 3},
            {"bits": 5},
            {"bits": 0},
            {"bits": -4},
            {"bits": 2**40},
            {"bits": "four"},
            {"bits": 4.5},
            {"group_size": 64},
            {"group_size": 16},
            {"group_size": 0.5},
            {"group_size": -2},
            {"group_size": 2**62},
            {"sym": "yes"},
            {"checkpoint_format": "gptq_p"},
            {"checkpoint_format": "gptq_v9"},
            {"checkpoint_format": 2},
            {"dynamic": []},
            {"dynamic": {f"+:.*{MODULE}": {"bits": 8}}},
            {"dynamic": {"+:.*[": {"bits": 8}}},
            {"dynamic": {"+:(?<=x)y": {"bits": 8}}},
        ],
    ),
    *itertools.product(
        ["awq-gemm"],
        [
            {"version": "gemv"},
            {"version": "gemv_fast"},
            {"version": 3},
            {"bits": 3},
            {"group_size": 64},
        ],
    ),
    *itertools.product(
        ["ct-packed"],
        [
            {"format": "pack-dequantized"},
            {"format": 1},
            {"config_groups": []},
            {"config_groups": {"g": {}}},
            {"config_groups": {"g": {"targets": 3, "weights": {}}}},
            {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 1}}}},
            {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 9}}}},
            {"config_groups": {"g": {"targets": ["Linear"], "weights": {"type": "fp"}}}},
            {"config_groups": {"g": {"targets": ["Linear"], "weights": {"group_size": "x"}}}},
            {"config_groups": {"g": {"targets": ["re:("], "weights": {"num_bits": 4}}}},
            {"config_groups": {"g": {"targets": ["Embedding"], "weights": {"num_bits": 4}}}},
            {"config_groups": {"W3A3": ["Linear"]}},
            {"ignore": {"a": 1}},
            {"ignore": [4]},
            {"sparsity_config": {"format": "sparse-bitmask"}},
        ],
    ),
    *itertools.product(
        ["fp8-block"],
        [
            {"weight_block_size": [16, 16]},
            {"weight_block_size": [0, 32]},
            {"weight_block_size": [32]},
            {"weight_block_size": "32x32"},
            {"weight_block_size": None},
            {"fmt": "e5m2"},
            {"modules_to_not_convert": 5},
        ],
    ),
    *itertools.product(
        ["modelopt-nvfp4"],
        [
            {"quant_algo": "NVFP3"},
            {"quant_algo": 4},
            {"quant_algo": "W4A8_AWQ"},
            {"exclude_modules": "lm_head"},
            {"group_size": "sixteen"},
        ],
    ),
    *itertools.product(
        ["bnb-int8"],
        [
            {"llm_int8_threshold": -1},
            {"llm_int8_threshold": "6"},
            {"llm_int8_skip_modules": 3},
            {"quant_method": "bitsandbites"},
            {"quant_method": []},
            {"quant_method": "eetq"},
            {"quant_method": "quanto"},
        ],
    ),
]


@pytest.mark.parametrize(
    ("name", "fields"), LIES, ids=[f"{name}-{json.dumps(fields)}" for name, fields in LIES]
)
def test_a_configuration_that_lies_is_told(
    name: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    method = METHODS[name]
    folder = save(tmp_path / "model", tensors_of(method), {**method.layout.config, **fields})
    with pytest.raises(LLMServeError) as error:
        load(folder, N, K)
    assert isinstance(error.value, CorruptFile | NotSupported)
    told = str(error.value)
    assert MODULE in told or "quantization_config" in told


def _cut(keeps: float) -> Callable[[bytes], bytes]:
    return lambda data: data[: int(len(data) * keeps)]


def _header(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    def edit(data: bytes) -> bytes:
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    return edit


def _of_the_first(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    return _header(lambda header: change(next(v for k, v in header.items() if k != "__metadata__")))


def _set(field: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(entry: dict[str, Any]) -> None:
        entry[field] = value

    return change


FILES: dict[str, Callable[[bytes], bytes]] = {
    "a-byte-less": lambda data: data[:-1],
    "half": _cut(0.5),
    "header-alone": _cut(0.02),
    "nothing": lambda data: b"",
    "offsets-past-the-end": _of_the_first(_set("data_offsets", [0, 2**40])),
    "offsets-the-other-way": _of_the_first(lambda entry: entry["data_offsets"].reverse()),
    "another-type": _of_the_first(_set("dtype", "I7")),
    "a-side-of-2-to-the-62": _of_the_first(lambda entry: entry["shape"].append(2**62)),
    "a-negative-side": _of_the_first(lambda entry: entry["shape"].append(-1)),
}


@pytest.mark.parametrize("name", ["gptq", "ct-nvfp4", "bnb-nf4"])
@pytest.mark.parametrize("damage", FILES)
def test_a_damaged_file_is_told(name: str, damage: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", tensors_of(METHODS[name]), METHODS[name].layout.config)
    path = folder / "model.safetensors"
    path.write_bytes(FILES[damage](path.read_bytes()))
    with pytest.raises((CorruptFile, NotSupported), match=r"model\.safetensors"):
        load(folder, N, K)


@pytest.mark.parametrize("name", ["fp8", "ct-w8a8", "bnb-int8"])
def test_floats_beside_scales_are_not_taken_for_the_weight(name: str, tmp_path: Path) -> None:
    """They are read as a module that was left alone, and then the scales are nobody's."""
    from safetensors.torch import load_file, save_file

    layout = METHODS[name].layout
    path, _ = files.write_pair(checkpoint("llama"), tmp_path, layout)
    tensors = load_file(path / "model.safetensors")
    tensors[f"{MODULE}.weight"] = tensors[f"{MODULE}.weight"].double()
    save_file(tensors, path / "model.safetensors")
    scale = METHODS[name].scales[0]
    with pytest.raises(NotSupported, match=rf"{MODULE}\.{scale}"):
        LLM(path, num_gpu_blocks_override=64)


@pytest.mark.parametrize("group", [-1, 3, 4, 77, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("name", ["gptq-act-order", "ct-act-order"])
def test_a_group_that_there_is_not_is_told(name: str, group: int, tmp_path: Path) -> None:
    layout = files.gptq(4, 32, shuffled=True)
    suffix = "g_idx"
    if name == "ct-act-order":
        layout, suffix = files.packed(4, 32, shuffled=True), "weight_g_idx"
    tensors = tensors_of(Method(layout, (), ()))
    tensors[suffix][70] = group
    folder = save(tmp_path / "model", tensors, layout.config)
    if group == 3:  # of four, which then has a column more than the others: it is still exact
        assert load(folder, N, K, "none")
        return
    with pytest.raises(
        CorruptFile, match=rf"element 70: expected a group in \[0, 4\), got {group}"
    ):
        load(folder, N, K)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (b"{", "quant_state"),
        (b"[]", "quant_state"),
        (b'{"shape": [64, 64]}', r"expected \[64, 128\]"),
        (b'{"shape": [64]}', r"expected \[64, 128\]"),
        (b'{"shape": [64, 128], "blocksize": 0}', "blocksize"),
        (b'{"shape": [64, 128], "blocksize": 32}', "absmax"),
        (b'{"shape": [64, 128], "nested_blocksize": -1}', "nested_blocksize"),
        (b'{"shape": [64, 128], "nested_offset": "x"}', "nested_offset"),
        (b'{"shape": [64, 128], "nested_offset": 1e400}', "nested_offset|number"),
        (b"\xff\xfe" * 40, "quant_state"),
    ],
)
def test_a_state_that_is_none_is_told(state: bytes, message: str, tmp_path: Path) -> None:
    method = METHODS["bnb-nf4"]
    tensors = tensors_of(method)
    said = np.frombuffer(state, np.uint8).copy()
    tensors["weight.quant_state.bitsandbytes__nf4"] = files.as_torch(said)
    folder = save(tmp_path / "model", tensors, method.layout.config)
    with pytest.raises(CorruptFile, match=message):
        load(folder, N, K)
