"""Small floats, against torch, every code of them; packed integers, there and back."""

from __future__ import annotations

import numpy as np
import pytest
from llmserve.quantization.number_formats import (
    e2m1_to_f32,
    e4m3_to_f32,
    e8m0_to_f32,
    f32_to_bf16,
    f32_to_e2m1,
    f32_to_e4m3,
    pack_words,
    unpack_words,
)

torch = pytest.importorskip("torch")


def some_floats(scale: float) -> np.ndarray:
    rng = np.random.default_rng(5)
    values = rng.standard_normal(20000).astype(np.float32) * np.float32(scale)
    powers = np.ldexp(np.float32(1), rng.integers(-14, 10, 20000))
    return np.concatenate([values * powers, values]).astype(np.float32)


def test_every_e4m3_code_is_what_torch_has() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(e4m3_to_f32(codes), expected, equal_nan=True)


def test_e4m3_rounds_to_nearest_even_and_stops_at_448() -> None:
    finite = e4m3_to_f32(np.arange(127, dtype=np.uint8))
    middles = (finite[1:] + finite[:-1]) / 2
    values = np.concatenate([some_floats(1.0), finite, middles, -middles, [500, -1e9, 0, -0.0]])
    clipped = torch.from_numpy(values.astype(np.float32)).clamp(-448, 448)
    expected = clipped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(f32_to_e4m3(values.astype(np.float32)), expected)


def test_bfloat16_rounds_as_torch_does() -> None:
    values = some_floats(3.0)
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(f32_to_bf16(values), expected)


def test_e2m1_rounds_to_nearest_even_and_stops_at_6() -> None:
    grid = e2m1_to_f32(np.arange(8))
    assert grid.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for code, middle in enumerate((grid[1:] + grid[:-1]) / 2):
        even = code if code % 2 == 0 else code + 1
        below, above = np.nextafter(middle, 0), np.nextafter(middle, 9)
        got = f32_to_e2m1(np.array([middle, below, above, -middle], np.float32))
        assert got.tolist() == [even, code, code + 1, even | 8]
    assert f32_to_e2m1(np.array([100, -100], np.float32)).tolist() == [7, 15]


def test_e8m0_is_a_power_of_two() -> None:
    assert e8m0_to_f32(np.array([127, 128, 0, 254])).tolist() == [1, 2, 2.0**-127, 2.0**127]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("columns", [1, 31, 32, 77])
def test_packed_integers_come_back_from_as_few_words_as_they_fill(bits: int, columns: int) -> None:
    values = np.random.default_rng(bits).integers(0, 1 << bits, (3, columns))
    words = pack_words(values, bits)
    assert words.shape == (3, -(-columns * bits // 32))
    assert np.array_equal(unpack_words(words, bits, columns), values)
    bit = sum(int(value) << (bits * i) for i, value in enumerate(values[1]))
    whole = int.from_bytes(words[1].tobytes(), "little")
    assert whole == bit
