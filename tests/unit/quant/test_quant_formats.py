"""Storage formats of weights: the values of the gguf package, bit for bit."""

from __future__ import annotations

import gguf
import gguf_files
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from llmserve import _core, _core_testing
from llmserve.errors import InvalidArgument

FORMATS = [name for name, _ in _core.supported_quant_formats()]
IN_GGUF = [name for name in FORMATS if name in gguf.GGMLQuantizationType.__members__]
# Halves that matter: zeros, subnormals, the largest, infinities, NaN, ordinary scales.
_EXTREME_HALVES = np.array(
    [0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x3C00, 0x2E66],
    np.uint16,
)


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    """NaN equals NaN, whatever its payload."""
    got_bits, expected_bits = got.view(np.uint32), expected.astype(np.float32).view(np.uint32)
    both_nan = np.isnan(got) & np.isnan(expected)
    np.testing.assert_array_equal(got_bits[~both_nan], expected_bits[~both_nan])
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))


def reference(name: str, blocks: np.ndarray) -> np.ndarray:
    qtype = gguf.GGMLQuantizationType[name]
    with np.errstate(all="ignore"):
        if name == "F64":
            return blocks.view(np.float64).ravel().astype(np.float32)
        return gguf.quants.dequantize(blocks, qtype).ravel()


def test_formats_are_those_of_the_issue() -> None:
    wanted = {"F32", "F16", "BF16", "Q8_0", "IQ4_NL", "IQ4_XS", "MXFP4", "TQ1_0", "TQ2_0"}
    wanted |= {"Q4_0", "Q4_1", "Q5_0", "Q5_1", *(f"Q{bits}_K" for bits in range(2, 7))}
    wanted |= {"NVFP4", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"}
    assert wanted <= set(IN_GGUF)


@pytest.mark.parametrize("name", IN_GGUF)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_values_are_those_of_the_gguf_package(name: str, data: st.DataObject) -> None:
    _, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    seed = data.draw(st.integers(0, 2**32 - 1))
    blocks = np.random.default_rng(seed).integers(0, 256, (64, num_bytes), np.uint8)
    # Any two bytes may be a scale: extreme ones go to drawn places.
    for _ in range(data.draw(st.integers(0, 12))):
        at = data.draw(st.integers(0, max(0, num_bytes - 2)))
        half = data.draw(st.sampled_from(_EXTREME_HALVES.tolist()))
        blocks[data.draw(st.integers(0, 63)), at : at + 2] = np.frombuffer(
            np.uint16(half).tobytes(), np.uint8
        )[: num_bytes - at]
    got = _core_testing.dequantize(name, blocks.tobytes())
    assert_same_bits(got, reference(name, blocks))


@pytest.mark.parametrize(
    ("name", "num_runs"),
    [
        *(("IQ1_S", 2048), ("IQ1_M", 2048), ("IQ2_XXS", 256), ("IQ2_XS", 512), ("IQ2_S", 1024)),
        *(("IQ3_XXS", 256), ("IQ3_S", 512)),
    ],
)
def test_every_run_of_a_grid_is_the_packages(name: str, num_runs: int) -> None:
    """Each place of the grid stands in a block, whose other bits are random."""
    runs = 64 if name.startswith("IQ3") else 32
    count = num_runs // runs
    _, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    blocks = np.random.default_rng(3).integers(0, 256, (count, num_bytes), np.uint8)
    gguf_files.put_scales(name, blocks, np.ones(count))
    place = np.arange(num_runs, dtype=np.uint32).reshape(count, runs)
    low, high = (place & 0xFF).astype(np.uint8), place >> 8
    if name == "IQ2_XXS":
        blocks[:, 2:66].reshape(count, 8, 8)[..., :4] = low.reshape(count, 8, 4)
    elif name == "IQ2_XS":
        blocks[:, 2:66].reshape(count, 32, 2)[..., 0] = low
        odd = blocks[:, 3:66:2]
        blocks[:, 3:66:2] = odd & 0xFE | high.astype(np.uint8)
    elif name == "IQ2_S":
        blocks[:, 2:34] = low
        shifts = np.arange(4, dtype=np.uint32) * 2
        blocks[:, 66:74] = (high.reshape(count, 8, 4) << shifts).sum(-1).astype(np.uint8)
    elif name == "IQ3_XXS":
        blocks[:, 2:66] = low
    elif name == "IQ3_S":
        blocks[:, 2:66] = low
        bits = (high.reshape(count, 8, 8) << np.arange(8, dtype=np.uint32)).sum(-1)
        blocks[:, 66:74] = bits.astype(np.uint8)
    elif name == "IQ1_S":
        blocks[:, 2:34] = low
        shifts = np.arange(4, dtype=np.uint32) * 3
        words = (high.reshape(count, 8, 4) << shifts).sum(-1).astype(np.uint16) | 0x5000
        blocks[:, 34:50] = words.view(np.uint8).reshape(count, 16)
    else:
        blocks[:, :32] = low
        halves = (high.reshape(count, 16, 2) << np.array([0, 4], np.uint32)).sum(-1)
        blocks[:, 32:48] = halves.astype(np.uint8)
    got = _core_testing.dequantize(name, blocks.tobytes())
    assert_same_bits(got, reference(name, blocks))
    assert len(np.unique(np.abs(got.reshape(num_runs, -1)), axis=0)) > num_runs // 2


def test_a_scale_of_nvfp4_past_e4m3_is_no_linear_layers() -> None:
    """The package reads it as 480; no writer makes it."""
    blocks = np.zeros((1, 36), np.uint8)
    blocks[0, 0], blocks[0, 4:12] = 0xFF, 0x77
    assert_same_bits(
        _core_testing.dequantize("NVFP4", blocks.tobytes()), reference("NVFP4", blocks)
    )
    with pytest.raises(InvalidArgument, match="finite"):
        _core_testing.make_backend("ref").pack_blocks(blocks, "NVFP4")


@pytest.mark.parametrize(
    "name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "TQ1_0", "TQ2_0"]
)
@settings(max_examples=5, deadline=None)
@given(
    values=npst.arrays(
        np.float32, (2, 256), elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=True)
    )
)
def test_quantized_values_come_back_as_the_package_reads_them(
    name: str, values: np.ndarray
) -> None:
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
    got = _core_testing.dequantize(name, blocks.tobytes())
    assert_same_bits(got, reference(name, blocks))


def test_every_f16_is_exact() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    got = _core_testing.dequantize("F16", halves.tobytes())
    assert_same_bits(got, halves.view(np.float16).astype(np.float32))


@pytest.mark.parametrize(
    ("name", "dtype"), [("F8_E4M3", "float8_e4m3fn"), ("F8_E5M2", "float8_e5m2")]
)
def test_every_f8_is_what_torch_has(name: str, dtype: str) -> None:
    import torch

    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(getattr(torch, dtype)).float().numpy()
    assert_same_bits(_core_testing.dequantize(name, codes.tobytes()), expected)
