"""Small floats in NumPy, which has none of them: bfloat16, E4M3, E2M1, E8M0.

Sources: OCP 8-bit Floating Point Specification (OFP8) 1.0; OCP Microscaling Formats (MX) 1.0.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = Array  # of float32: NumPy's stubs lose the type of most operations

MAX_E4M3 = 448.0
MAX_E2M1 = 6.0
_E8M0_BIAS = 127

E2M1_VALUES: Floats = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def _e4m3_table() -> Floats:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    values = np.where((codes & 127) == 127, np.nan, values)
    return np.where(codes & 128, -values, values).astype(np.float32)


E4M3_VALUES = _e4m3_table()


def bf16_to_f32(bits: Array) -> Floats:
    """Of uint16 words."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: Floats) -> Array:
    """Finite values, to nearest even, as uint16 words."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def rounded(values: Floats, dtype: str) -> Floats:
    """The values as `dtype` ("float32", "bfloat16", "float16") holds them."""
    if dtype == "bfloat16":
        return bf16_to_f32(f32_to_bf16(values))
    if dtype == "float16":
        return np.clip(values, -65504, 65504).astype(np.float16).astype(np.float32)
    return np.asarray(values, np.float32)


def f32_to_e4m3(values: Floats) -> Array:
    """Finite values, to nearest even, beyond 448 the largest, as bytes."""
    magnitude = np.minimum(np.abs(values), np.float32(MAX_E4M3))
    _, exponent = np.frexp(np.maximum(magnitude, np.float32(2.0**-6)))
    step = exponent - 4  # of the last of three bits; of numbers below 2^-6, 2^-9
    steps = np.rint(np.ldexp(magnitude, -step)).astype(np.int32)  # up to 16: the next exponent
    code = steps + ((step + 9) << 3)
    return np.asarray((code | np.where(np.signbit(values), 128, 0)).astype(np.uint8))


def e4m3_to_f32(codes: Array) -> Floats:
    """Of bytes."""
    return E4M3_VALUES[codes]


# Halfway between neighbours, the tie goes to the even code: below for even ones, above for odd.
_E2M1_MIDDLES: Floats = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
_E2M1_EDGES: Floats = np.array(
    [
        edge if low % 2 == 0 else np.nextafter(edge, np.float32(0))
        for low, edge in enumerate(_E2M1_MIDDLES)
    ],
    np.float32,
)


def f32_to_e2m1(values: Floats) -> Array:
    """Finite values, to nearest even, beyond 6 the largest, as codes of 4 bits."""
    magnitude = np.searchsorted(_E2M1_EDGES, np.abs(values).ravel(), side="left")
    code = magnitude.reshape(np.shape(values)) | np.where(np.signbit(values), 8, 0)
    return code.astype(np.uint8)


def e2m1_to_f32(codes: Array) -> Floats:
    """Of codes of 4 bits."""
    return np.concatenate([E2M1_VALUES, -E2M1_VALUES])[codes]


def e8m0_to_f32(codes: Array) -> Floats:
    """Of bytes 0 to 254: powers of two."""
    return np.asarray(
        np.ldexp(np.float32(1), codes.astype(np.int32) - _E8M0_BIAS).astype(np.float32)
    )


def e8m0_of(exponents: Array) -> Array:
    """Of whole exponents of two, kept within what a byte can say."""
    return np.asarray(np.clip(exponents + _E8M0_BIAS, 0, 254).astype(np.uint8))


def pack_words(values: Array, bits: int) -> Array:
    """Unsigned integers below 2^bits [R, C] as int32 words [R, ceil(C * bits / 32)]: a row's values
    one after another, low bits first, across the borders of words."""
    rows, columns = values.shape
    padded = -(-columns // 32) * 32
    wide = np.zeros((rows, padded), np.uint64)
    wide[:, :columns] = values
    groups = wide.reshape(rows, padded // 32, 32)
    words = np.zeros((rows, padded // 32, bits + 1), np.uint64)
    for i in range(32):
        word, offset = divmod(i * bits, 32)
        shifted = groups[:, :, i] << np.uint64(offset)
        words[:, :, word] |= shifted & np.uint64(0xFFFFFFFF)
        words[:, :, word + 1] |= shifted >> np.uint64(32)
    flat = words[:, :, :bits].reshape(rows, -1)[:, : -(-columns * bits // 32)]
    return flat.astype(np.uint32).view(np.int32)


def unpack_words(words: Array, bits: int, columns: int) -> Array:
    """pack_words, undone: [R, columns]."""
    rows = words.shape[0]
    groups = -(-columns // 32)
    wide = np.zeros((rows, groups * bits + 1), np.uint64)
    wide[:, : words.shape[1]] = np.ascontiguousarray(words).view(np.uint32)
    first = np.arange(columns) * bits
    word, offset = first // 32, (first % 32).astype(np.uint64)
    pair = wide[:, word] | (wide[:, word + 1] << np.uint64(32))
    return np.asarray(((pair >> offset) & np.uint64((1 << bits) - 1)).astype(np.int32))


def pack_nibbles(codes: Array) -> Array:
    """Codes of 4 bits [R, C], C even, as bytes [R, C / 2], the first of two in the low half."""
    return np.asarray((codes[:, ::2] | (codes[:, 1::2] << 4)).astype(np.uint8))
