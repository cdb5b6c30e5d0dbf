"""GGUF's blocks of quantized values, made from floats. Layouts: csrc/quant/formats.

Scales and minima of the k-quants are found by weighted least squares: for each of several roundings
of a group to its levels, the scale and minimum that fit them best, of which the best pair is kept.
Large elements weigh more.
"""

from collections.abc import Callable, Mapping

import numpy as np

from llmserve.quantization.number_formats import Array, Floats
from llmserve.quantization.weight_grid import reciprocal

_SUPER = 256  # elements of a k-quant's block
_STEPS = 21  # roundings that are tried


def _f16(values: Floats) -> Floats:
    return np.clip(values, -65504, 65504).astype(np.float16).astype(np.float32)


def _f16_bytes(values: Floats) -> Array:
    """[B] -> [B, 2]."""
    return values.astype(np.float16).view(np.uint8).reshape(-1, 2)


def q8_0(rows: Floats) -> Array:
    """Blocks of 32: an f16 scale, and a byte an element."""
    x = rows.reshape(-1, 32)
    scale = _f16(np.abs(x).max(1) / np.float32(127))
    codes = np.clip(np.rint(x * reciprocal(scale)[:, None]), -127, 127).astype(np.int8)
    return np.concatenate([_f16_bytes(scale), codes.view(np.uint8)], 1)


def q4_0(rows: Floats) -> Array:
    """Blocks of 32: an f16 scale, and 4 bits around 8 an element, the two halves in one byte."""
    x = rows.reshape(-1, 32)
    most = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1)[:, 0]
    scale = _f16(most / np.float32(-8))
    codes = np.clip(np.rint(x * reciprocal(scale)[:, None]) + 8, 0, 15).astype(np.uint8)
    return np.concatenate([_f16_bytes(scale), codes[:, :16] | codes[:, 16:] << 4], 1)


def _weights(groups: Floats) -> Floats:
    """How much each element counts: its size, beside the group's."""
    return np.asarray(np.sqrt(np.square(groups).mean(-1, keepdims=True)) + np.abs(groups))


def _fit_with_min(groups: Floats, levels: int) -> tuple[Floats, Floats]:
    """(scale, minimum) [R] of groups [R, G], so that scale * q - minimum with q in 0 … levels is
    near them; neither is negative."""
    low = np.minimum(groups.min(1), 0)
    high = np.maximum(groups.max(1), 0)
    w = _weights(groups)
    sum_w, sum_x = w.sum(1), (w * groups).sum(1)
    best = np.full(len(groups), np.inf, np.float32)
    scale, minimum = np.zeros_like(best), np.zeros_like(best)
    for step in range(_STEPS):
        inverse = reciprocal(high - low) * np.float32(levels - 1 + 0.1 * step)
        q = np.clip(np.rint((groups - low[:, None]) * inverse[:, None]), 0, levels)
        sum_q, sum_qq = (w * q).sum(1), (w * q * q).sum(1)
        sum_xq = (w * groups * q).sum(1)
        with np.errstate(divide="ignore", invalid="ignore"):
            determinant = sum_w * sum_qq - sum_q * sum_q
            fitted = (sum_w * sum_xq - sum_x * sum_q) / determinant
            offset = (sum_qq * sum_x - sum_q * sum_xq) / determinant
            is_above = offset > 0
            fitted = np.where(is_above, sum_xq / sum_qq, fitted)
            offset = np.where(is_above, 0, offset)
        is_usable = np.isfinite(fitted) & np.isfinite(offset) & (fitted > 0)
        fitted, offset = np.where(is_usable, fitted, 0), np.where(is_usable, offset, 0)
        error = (w * np.square(fitted[:, None] * q + offset[:, None] - groups)).sum(1)
        is_better = error < best
        best = np.where(is_better, error, best)
        scale = np.where(is_better, fitted, scale).astype(np.float32)
        minimum = np.where(is_better, -offset, minimum).astype(np.float32)
    return scale, minimum


def _with_mins(rows: Floats, levels: int) -> tuple[Array, Array, Array]:
    """Blocks of 8 groups of 32: 4 bytes of scales, 12 of codes of these, and q [B, 8, 32]."""
    groups = rows.reshape(-1, 32)
    scale, minimum = (part.reshape(-1, 8) for part in _fit_with_min(groups, levels))
    whole = _f16(scale.max(1) / np.float32(63))
    whole_min = _f16(minimum.max(1) / np.float32(63))
    codes = np.clip(np.rint(scale * reciprocal(whole)[:, None]), 0, 63).astype(np.uint8)
    min_codes = np.clip(np.rint(minimum * reciprocal(whole_min)[:, None]), 0, 63).astype(np.uint8)
    step = whole[:, None] * codes
    offset = whole_min[:, None] * min_codes
    x = groups.reshape(-1, 8, 32)
    q = np.clip(np.rint((x + offset[:, :, None]) * reciprocal(step)[:, :, None]), 0, levels)
    packed = np.concatenate(
        [
            codes[:, :4] | (codes[:, 4:] >> 4) << 6,
            min_codes[:, :4] | (min_codes[:, 4:] >> 4) << 6,
            (codes[:, 4:] & 15) | (min_codes[:, 4:] & 15) << 4,
        ],
        1,
    )
    head = np.concatenate([_f16_bytes(whole), _f16_bytes(whole_min)], 1)
    return head, packed, q.astype(np.uint8)


def _pairs_of_groups(q: Array) -> Array:
    """[B, 8, 32] of 4 bits: groups 0 and 1 share bytes, 2 and 3, and so on."""
    return np.asarray((q[:, ::2] | q[:, 1::2] << 4).reshape(len(q), -1))


def q4_k(rows: Floats) -> Array:
    """Blocks of 256: groups of 32 of 4 bits with scales and minima of 6."""
    head, packed, q = _with_mins(rows, 15)
    return np.concatenate([head, packed, _pairs_of_groups(q)], 1)


def q5_k(rows: Floats) -> Array:
    """As q4_k, with a fifth bit: bit g of byte i belongs to group g's element i."""
    head, packed, q = _with_mins(rows, 31)
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    high = np.bitwise_or.reduce((q >> 4) << shifts, axis=1)
    return np.concatenate([head, packed, high, _pairs_of_groups(q & 15)], 1)


def q6_k(rows: Floats) -> Array:
    """Blocks of 256: groups of 16 of 6 bits around 32, with a signed byte each as scale."""
    groups = rows.reshape(-1, 16)
    most = np.take_along_axis(groups, np.abs(groups).argmax(1)[:, None], 1)[:, 0]
    w = np.square(groups)
    best = np.full(len(groups), -1.0, np.float32)
    scale = np.zeros_like(best)
    for step in range(-9, 10):
        inverse = reciprocal(most) * np.float32(-(32 + 0.1 * step))
        q = np.clip(np.rint(groups * inverse[:, None]), -32, 31)
        along, square = (w * groups * q).sum(1), (w * q * q).sum(1)
        fit = along * along * reciprocal(square)
        is_better = fit > best
        best = np.where(is_better, fit, best)
        scale = np.where(is_better, along * reciprocal(square), scale).astype(np.float32)
    by_block = scale.reshape(-1, 16)
    largest = np.take_along_axis(by_block, np.abs(by_block).argmax(1)[:, None], 1)[:, 0]
    whole = _f16(largest / np.float32(-128))
    codes = np.clip(np.rint(by_block * reciprocal(whole)[:, None]), -128, 127).astype(np.int8)
    step_size = whole[:, None] * codes
    x = groups.reshape(-1, 16, 16)
    q = np.clip(np.rint(x * reciprocal(step_size)[:, :, None]), -32, 31) + 32
    quarters = q.astype(np.uint8).reshape(-1, 2, 4, 32)  # of each half of 128
    low = quarters[:, :, :2] & 15 | (quarters[:, :, 2:] & 15) << 4
    shifts = np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]
    high = np.bitwise_or.reduce((quarters >> 4) << shifts, axis=2)
    count = len(q)
    return np.concatenate(
        [low.reshape(count, -1), high.reshape(count, -1), codes.view(np.uint8), _f16_bytes(whole)],
        1,
    )


# Type -> (GGUF's number, elements of a block, what makes its bytes [blocks, bytes]).
BLOCKS: Mapping[str, tuple[int, int, Callable[[Floats], Array]]] = {
    "Q4_0": (2, 32, q4_0),
    "Q8_0": (8, 32, q8_0),
    "Q4_K": (12, _SUPER, q4_k),
    "Q5_K": (13, _SUPER, q5_k),
    "Q6_K": (14, _SUPER, q6_k),
}
PLAIN: Mapping[str, int] = {"F32": 0, "F16": 1, "BF16": 30}
