"""Where readers of quantized checkpoints are known to go wrong, each on a matrix of its own.

A matrix is read twice: from its quantized tensors, and from a twin in float32. What both become in
memory is compared byte for byte.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantized_files as files
from checkpoints import VOCAB_SIZE, checkpoint
from llmserve import LLM, _core_testing
from llmserve.errors import CorruptFile, NotSupported
from model_runner import PagedRunner
from quantized_files import Layout, write_pair

testing: Any = _core_testing
MODULE = "model.layers.0.mlp.up_proj"
TOKENS = np.random.default_rng(0).integers(3, VOCAB_SIZE, 24).tolist()


def save(folder: Path, tensors: dict[str, Any], config: dict[str, Any] | None) -> Path:
    """A checkpoint with these tensors of one module alone."""
    from safetensors.torch import save_file

    folder.mkdir()
    named = {f"{MODULE}.{name}": files.as_torch(part) for name, part in tensors.items()}
    # Of what most bytes are of, "auto" makes the type that weights are expanded to.
    named["model.embed_tokens.weight"] = files.as_torch(np.zeros((320, 64), np.float32))
    save_file(named, folder / "model.safetensors")
    fields = json.loads((checkpoint("llama") / "config.json").read_text())
    fields["dtype"] = "float32"
    if config is not None:
        fields["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def load(folder: Path, n: int, k: int, quantization: str = "none") -> list[Any]:
    part = testing.WeightPart(name=f"{MODULE}.weight", size=n)
    request = testing.WeightRequest(
        path=str(folder), parts=[part], in_features=k, quantization=quantization
    )
    return testing.load_linear(request)


def check_values(tmp_path: Path, layout: Layout, tensors: dict[str, Any], values: Any) -> None:
    """The tensors are read as the values."""
    quantized = save(tmp_path / "quantized", tensors, layout.config)
    twin = save(tmp_path / "twin", {"weight": np.float32(values)}, None)
    assert load(quantized, *values.shape) == load(twin, *values.shape)


def normal(n: int, k: int) -> np.ndarray:
    return np.random.default_rng(n * k).standard_normal((n, k)).astype(np.float32)


PARTIAL: dict[str, Layout] = {
    "gptq": files.gptq(4, 32, symmetric=False),
    "gptq-act-order": files.gptq(4, 32, shuffled=True),
    "awq-gemm": files.awq(32),
    "awq-gemv": files.awq(32, version="gemv"),
    "ct-packed": files.packed(4, 32, symmetric=False),
    "ct-w4a8": files.int_quantized(4, 32),
    "fp8-block": files.fp8((128, 128)),
    "fp8-block-e8m0": files.fp8((128, 128), exponents=True),
    "ct-fp8-block": files.float_quantized(strategy="block", block_structure=[128, 128]),
    "bnb-nf4": files.bitsandbytes_4bit(),
    "bnb-nf4-double": files.bitsandbytes_4bit(double=True),
}


@pytest.mark.parametrize("name", PARTIAL)
@pytest.mark.parametrize(("n", "k"), [(200, 144), (136, 80), (8, 400)])
def test_the_last_group_and_the_last_block_of_a_side_may_be_partial(
    tmp_path: Path, name: str, n: int, k: int
) -> None:
    layout = PARTIAL[name]
    tensors, values = layout.write(normal(n, k), np.random.default_rng(1))
    check_values(tmp_path, layout, tensors, values)


@pytest.mark.parametrize("layout", [files.mxfp4(), files.nvfp4()], ids=["mxfp4", "nvfp4"])
def test_formats_of_whole_groups_refuse_rows_that_are_none(tmp_path: Path, layout: Layout) -> None:
    tensors, _ = layout.write(normal(16, 64), np.random.default_rng(1))
    folder = save(tmp_path / "quantized", tensors, layout.config)
    with pytest.raises(NotSupported, match=r"of 72 columns, which are no whole groups"):
        load(folder, 16, 72)


def test_every_code_of_e4m3_is_its_number(tmp_path: Path) -> None:
    import torch

    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    codes[codes & 0x7F == 0x7F] = 0x7E
    weight = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    scale = np.float32([[0.37], [1e-3]])
    layout = files.fp8(per_row=True, scale="weight_scale")
    tensors = {"weight": weight, "weight_scale": scale}
    check_values(tmp_path, layout, tensors, weight.float().numpy() * scale)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("quantization", ["", "none"])
def test_the_nan_of_e4m3_is_no_weight(tmp_path: Path, code: int, quantization: str) -> None:
    import torch

    codes = np.full((16, 64), 0x38, np.uint8)
    codes[5, 17] = code
    tensors = {
        "weight": torch.from_numpy(codes).view(torch.float8_e4m3fn),
        "weight_scale": np.float32(1).reshape(()),
    }
    folder = save(tmp_path / "model", tensors, files.fp8(scale="weight_scale").config)
    with pytest.raises(CorruptFile, match=r"row 5, column 17.* NaN"):
        load(folder, 16, 64, quantization)


def test_every_power_of_two_but_the_last_is_a_scale(tmp_path: Path) -> None:
    """2^-127, which is below the least normal float, with all its multiples."""
    layout = files.mxfp4()
    exponents = np.arange(252, dtype=np.uint8)[:, None]
    codes = np.tile(np.arange(16, dtype=np.uint8), (252, 2))
    tensors = {"weight_packed": codes[:, 0::2] | codes[:, 1::2] << 4, "weight_scale": exponents}
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    check_values(tmp_path, layout, tensors, files.E2M1[codes] * scales)


def test_exponents_of_255_are_none(tmp_path: Path) -> None:
    layout = files.mxfp4()
    tensors, _ = layout.write(normal(16, 64), np.random.default_rng(1))
    tensors["weight_scale"][3, 1] = 255
    folder = save(tmp_path / "model", tensors, layout.config)
    for quantization in ("", "none"):
        with pytest.raises(CorruptFile, match=r"row 3, column 32.* NaN"):
            load(folder, 16, 64, quantization)


@pytest.mark.parametrize(
    "name", ["gemm", "gemv", "packed", "modelopt", "nf4", "nvfp4", "mxfp4", "gptq", "w4a8"]
)
def test_every_weight_is_where_it_belongs(tmp_path: Path, name: str) -> None:
    """Rows and columns differ from each other in one place each: a diagonal."""
    layouts = {
        "gemm": files.awq(32),
        "gemv": files.awq(32, version="gemv"),
        "packed": files.packed(4, 32, symmetric=False),
        "modelopt": files.modelopt_awq(32),
        "nf4": files.bitsandbytes_4bit(),
        "nvfp4": files.nvfp4(),
        "mxfp4": files.mxfp4(),
        "gptq": files.gptq(4, 32, symmetric=False),
        "w4a8": files.int_quantized(4, 32),
    }
    weight = np.full((96, 64), 0.125, np.float32)
    weight[np.arange(96), np.arange(96) * 7 % 64] = 1
    layout = layouts[name]
    tensors, values = layout.write(weight, np.random.default_rng(1))
    assert (np.abs(values).argmax(1) == np.arange(96) * 7 % 64).mean() > 0.5
    check_values(tmp_path, layout, tensors, values)


def logits(path: Path, **options: Any) -> np.ndarray:
    return PagedRunner(path, **{"device": "cpu", "dtype": "float32", **options}).run(TOKENS)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt((x**2).mean()))


SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 16}


@pytest.mark.parametrize("quantization", ["", "none"])
def test_scales_that_float16_does_not_hold_stay(tmp_path: Path, quantization: str) -> None:
    """2^17 in one layer, and 2^-30 in that which reads it."""
    from safetensors.torch import load_file, save_file

    layout = files.packed(4, 32)
    quantized, twin = write_pair(checkpoint("llama", **SIZES), tmp_path, layout)
    factors = {"v_proj": 2.0**17, "o_proj": 2.0**-30}
    for folder, suffix in ((quantized, "weight_scale"), (twin, "weight")):
        tensors = load_file(folder / "model.safetensors")
        for part, factor in factors.items():
            for layer in range(2):
                name = f"model.layers.{layer}.self_attn.{part}.{suffix}"
                tensors[name] = tensors[name] * factor
                assert tensors[name].abs().max() > 0
        save_file(tensors, folder / "model.safetensors")
    expected = logits(twin)
    got = logits(quantized, quantization=quantization)
    assert rms(got - expected) <= (0 if quantization else 0.05) * rms(expected)


def test_an_outlier_in_a_neighbour_changes_no_bit(tmp_path: Path) -> None:
    """A token whose activations have one from 6 on, beside a sequence that has none."""
    from safetensors.torch import load_file, save_file

    layout = files.bitsandbytes_int8()
    path, _ = write_pair(checkpoint("llama", **SIZES), tmp_path, layout)
    tensors = load_file(path / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    table[5] = 0.01 * table[5]
    table[5, 40] = 3.0  # all of the row's length, so that its norm makes it 11
    save_file(tensors, path / "model.safetensors")
    neighbour = [5] * len(TOKENS)

    def run(rows: list[list[int]], **options: Any) -> np.ndarray:
        runner = PagedRunner(path, device="cpu", dtype="float32", **options)
        pairs = [(runner.add_sequence(), tokens) for tokens in rows]
        return np.asarray(runner.step(pairs)[1])

    tokens = [token if token != 5 else 6 for token in TOKENS]
    alone = run([tokens])
    with_outliers = run([neighbour])
    both = run([tokens, neighbour])
    assert np.array_equal(both[: len(tokens)], alone)
    assert np.array_equal(both[len(tokens) :], with_outliers)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["llm_int8_threshold"] = 0.0
    (path / "config.json").write_text(json.dumps(config))
    assert not np.array_equal(run([neighbour]), with_outliers)


@pytest.mark.parametrize("style", ["re:.*[.](q|gate)_proj$", "names"])
def test_of_what_runs_as_one_a_part_may_be_left_alone(tmp_path: Path, style: str) -> None:
    """Queries as floats beside quantized keys and values, whatever the list calls them."""
    layout = files.packed(4, 32)
    skipped = [
        f"model.language_model.layers.{layer}.{name}"
        for layer in range(2)
        for name in ("self_attn.q_proj", "mlp.gate_proj")
    ]
    ignore = ["lm_head", *(skipped if style == "names" else [style])]
    quantized, twin = write_pair(
        checkpoint("llama", **SIZES),
        tmp_path,
        Layout({**layout.config, "ignore": ignore}, layout.write),
        quantizes=lambda name: "proj" in name and not name.endswith(("q_proj", "gate_proj")),
    )
    assert np.array_equal(logits(quantized, quantization="none"), logits(twin))
    expected = logits(twin)
    assert rms(logits(quantized) - expected) <= 0.05 * rms(expected)


@pytest.mark.parametrize(
    ("layout", "scale"),
    [
        (files.fp8(scale="weight_scale"), "weight_scale"),
        (files.nvfp4(modelopt=True), "weight_scale_2"),
    ],
    ids=["fp8", "nvfp4"],
)
def test_scales_of_the_parts_of_one_product_may_differ(
    tmp_path: Path, layout: Layout, scale: str
) -> None:
    """Queries, keys and values side by side have each their own scale of the tensor."""
    from safetensors.torch import load_file, save_file

    quantized, twin = write_pair(checkpoint("llama", **SIZES), tmp_path, layout)
    for folder, suffix in ((quantized, scale), (twin, "weight")):
        tensors = load_file(folder / "model.safetensors")
        name = f"model.layers.0.self_attn.k_proj.{suffix}"
        tensors[name] = tensors[name] * 2.0
        save_file(tensors, folder / "model.safetensors")
    expected = logits(twin)
    assert np.array_equal(logits(quantized, quantization="none"), expected)
    assert rms(logits(quantized) - expected) <= 0.05 * rms(expected)


@pytest.mark.parametrize(
    ("layout", "fields", "message"),
    [
        (
            files.packed(4),
            {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}},
            "8 bits, as kv_cache_scheme has it: pass kv_cache_dtype='fp8'",
        ),
        (
            files.nvfp4(modelopt=True),
            {"kv_cache_quant_algo": "FP8"},
            "FP8, as kv_cache_quant_algo has it: pass kv_cache_dtype='fp8'",
        ),
    ],
    ids=["compressed-tensors", "modelopt"],
)
def test_scales_of_a_cache_are_told_and_change_nothing(
    tmp_path: Path, layout: Layout, fields: dict[str, Any], message: str
) -> None:
    """A row of an fp8 cache has its own scale here, so that 4 and 1 are the same, and no key is
    cut off."""
    from safetensors.torch import load_file, save_file

    with_scheme = Layout({**layout.config, **fields}, layout.write)
    path, _ = write_pair(checkpoint("llama", **SIZES), tmp_path, with_scheme)
    plain = logits(path, kv_dtype="fp8")
    assert not any("scales of keys" in note for note in LLM.plan(path).notes)
    tensors = load_file(path / "model.safetensors")
    for layer in range(2):
        for name in ("self_attn.k_scale", "self_attn.v_scale"):
            tensors[f"model.layers.{layer}.{name}"] = files.as_torch(np.float32([4.0]))
    save_file(tensors, path / "model.safetensors")
    assert np.array_equal(logits(path, kv_dtype="fp8"), plain)
    notes = LLM.plan(path).notes
    assert any(message in note for note in notes)
    assert any("4 scales of keys and values" in note for note in notes)
