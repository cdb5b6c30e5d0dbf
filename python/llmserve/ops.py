"""The engine's kernels themselves, on torch tensors, NumPy arrays or anything with ``__dlpack__``.

Arrays are read and written in place. A result comes back as what the first array argument is: a
torch tensor, a NumPy array, or an `llmserve.Array`; ``out=`` names an array to write to instead.
Activations are float32; weights, embedding tables and KV caches may be bfloat16 too, which NumPy
users hold in an `llmserve.Array`. Rows may be strided; the last dimension must be contiguous
(pass ``x.contiguous()`` or ``numpy.ascontiguousarray(x)``), and so must a KV cache as a whole.
Indices are lists, or int32 or int64 arrays. Shape letters are those of docs/glossary.md.

backend: "cpu" (vectorised; the instruction set is picked at run time), "ref" (scalar loops, the
specification) or "cuda"; by default that of the first array's device. num_threads: by default the
physical cores. The GIL is released while a kernel runs; two calls with the same backend and
num_threads run one after the other. A row's result does not depend on the other rows or the number
of threads, bit for bit (on CUDA with LLMSERVE_CUDA_GEMM=invariant).

On CUDA a call's arrays are all on device 0, but for what `pack_linear` takes and indices, which may
be on either side (lists and host arrays are quicker: those on the device are waited for). Work goes
to torch's current stream, or the legacy default stream where torch uses no CUDA, and a call returns
before it is done; only `sample` waits. New arrays come from torch, so that what is no torch tensor
needs ``out=``. Not within the capture of a CUDA graph.

Errors: InvalidArgument names the argument, the shape and dtype that were expected and what came, or
the array that is not where the others are; NotSupported for arrays on a device that the backend has
not, and unknown backends. Kernels are not differentiable.
"""

import functools
import os
from collections.abc import Sequence
from typing import Any

from llmserve import _core
from llmserve.common.arguments import optional_integer, text
from llmserve.errors import InvalidArgument

ArrayLike = Any  # a torch tensor, a NumPy array, or an object with __dlpack__
Integers = Any  # a list of integers, or an int32 or int64 array
LinearWeight = _core.LinearWeight
_DLPACK_CUDA = 2

__all__ = [
    "LinearWeight",
    "add_rms_norm",
    "copy_blocks",
    "embedding",
    "gather",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "layer_norm",
    "linear",
    "pack_linear",
    "paged_attention",
    "quantize",
    "rms_norm",
    "rotary_embedding",
    "sample",
    "silu_and_mul",
    "store_kv",
]


@functools.cache
def _make_kernels(backend: str, num_threads: int, process_id: int) -> _core.Ops:
    return _core.Ops(backend, num_threads)


def _device_backend(array: ArrayLike) -> str:
    first = array[0] if isinstance(array, (list, tuple)) and array else array
    device = getattr(first, "__dlpack_device__", None)
    return "cuda" if device is not None and device()[0] == _DLPACK_CUDA else "cpu"


def _kernels(backend: str | None, num_threads: int | None, array: ArrayLike) -> _core.Ops:
    threads = optional_integer("num_threads", num_threads, 1, 1024)
    name = _device_backend(array) if backend is None else text("backend", backend)
    # A forked child has none of its parent's threads, so that it makes its own.
    return _make_kernels(name, threads or 0, os.getpid())


def rms_norm(
    x: ArrayLike,
    weight: ArrayLike,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    out: ArrayLike | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> Any:
    """x / sqrt(mean(x², over D) + eps) * (weight + weight_offset), for each row.

    x: float32 [R, D], or [T, H, D]: the heads of tokens. weight: float32 [D]; weight_offset is 1
    for families that store the weight minus one. Returns float32 of x's shape; out may be x itself.
    Moves 8 bytes an element. Zhang & Sennrich 2019, eq. 4.

    >>> import numpy
    >>> from llmserve import ops
    >>> ops.rms_norm(numpy.array([[3.0, 4.0]], "f4"), numpy.ones(2, "f4"), eps=0.0).round(3)
    array([[0.849, 1.131]], dtype=float32)
    """
    return _kernels(backend, num_threads, x).rms_norm(x, weight, eps, weight_offset, out=out)


def add_rms_norm(
    x: ArrayLike,
    residual: ArrayLike,
    weight: ArrayLike,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    out: ArrayLike | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> Any:
    """residual += x, in place; returns rms_norm(residual).

    x, residual: float32 [T, E]. weight: float32 [E]. Returns float32 [T, E]; out may be x itself.
    Moves 16 * T * E bytes.

    >>> import numpy
    >>> from llmserve import ops
    >>> residual = numpy.array([[1.0, 1.0]], "f4")
    >>> normed = ops.add_rms_norm(numpy.array([[2.0, 3.0]], "f4"), residual, numpy.ones(2, "f4"))
    >>> residual
    array([[3., 4.]], dtype=float32)
    """
    kernels = _kernels(backend, num_threads, x)
    return kernels.add_rms_norm(residual, x, weight, eps, weight_offset, out=out)


def layer_norm(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    eps: float = 1e-5,
    out: ArrayLike | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> Any:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias, for each row.

    x: float32 [R, D]. weight, bias: float32 [D]. Returns float32 [R, D]; out may be x itself. Moves
    8 * R * D bytes. Ba et al. 2016, eq. 4.

    >>> import numpy
    >>> from llmserve import ops
    >>> ops.layer_norm(numpy.array([[1.0, 3.0]], "f4"), numpy.ones(2, "f4"), eps=0.0)
    array([[-1.,  1.]], dtype=float32)
    """
    return _kernels(backend, num_threads, x).layer_norm(x, weight, bias, eps, out=out)


def silu_and_mul(
    gate_up: ArrayLike,
    *,
    out: ArrayLike | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> Any:
    """silu(gate_up[:, :F]) * gate_up[:, F:], the middle of a gated MLP.

    gate_up: float32 [T, 2F]. Returns float32 [T, F]. Moves 12 * T * F bytes. Shazeer 2020, eq. 5.

    >>> import numpy
    >>> from llmserve import ops
    >>> ops.silu_and_mul(numpy.array([[0.0, 2.0, 5.0, 3.0]], "f4")).round(3)
    array([[0.   , 5.285]], dtype=float32)
    """
    return _kernels(backend, num_threads, gate_up).gated_activation(gate_up, "silu", out)


def gelu_and_mul(
    gate_up: ArrayLike,
    *,
    out: ArrayLike | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> Any:
    """gelu(gate_up[:, :F]) * gate_up[:, F:], with gelu(x) = x * the normal distribution function.

    gate_up: float32 [T, 2F]. Returns float32 [T, F]. Moves 12 * T * F bytes. Hendrycks & Gimpel
    2016, section 2.

    >>> import numpy
    >>> from llmserve import ops
    >>> ops.gelu_and_mul(numpy.array([[0.0, 2.0, 5.0, 3.0]], "f4")).round(3)
    array([[0.   , 5.863]], dtype=float32)
    """
    return _kernels(backend, num_threads, gate_up).gated_activation(gate_up, "gelu", out)


def gelu_tanh_and_mul(
    gate_up: ArrayLike,
    *,
    out: ArrayLike | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> Any:
    """gelu(gate_up[:, :F]) * gate_up[:, F:], with the tanh form of gelu.

    gate_up: float32 [T, 2F]. Returns float32 [T, F]. Moves 12 * T * F bytes. Hendrycks & Gimpel
    2016, section 2.

    >>> import numpy
    >>> from llmserve import ops
    >>> ops.gelu_tanh_and_mul(numpy.array([[0.0, 2.0, 5.0, 3.0]], "f4")).round(3)
    array([[0.   , 5.864]], dtype=float32)
    """
    return _kernels(backend, num_threads, gate_up).gated_activation(gate_up, "gelu_tanh", out)


def rotary_embedding(
    heads: ArrayLike,
    positions: Integers,
    *,
    inv_freq: ArrayLike | None = None,
    theta: float = 10000.0,
    interleaved: bool = False,
    scale: float = 1.0,
    out: ArrayLike | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> Any:
    """Rotates pairs of each head's elements by angles of position * inv_freq (RoPE).

    heads: float32 [T, H, D], queries or keys. positions: [T]. inv_freq: float32 [d/2], d <= D even:
    the first d elements are rotated, the others copied; by default theta^(-2i/D). Pairs are halves,
    (i, i + d/2), or, interleaved, neighbours, (2i, 2i + 1). scale multiplies cosine and sine (the
    attention factor of yarn and kin). Returns float32 [T, H, D]; out may be heads itself. Moves
    8 * T * H * D bytes. Su et al. 2021, section 3.2.

    >>> import numpy
    >>> from llmserve import ops
    >>> ops.rotary_embedding(numpy.array([[[1.0, 0.0]]], "f4"), [1]).round(3)
    array([[[0.54 , 0.841]]], dtype=float32)
    """
    return _kernels(backend, num_threads, heads).rotary_embedding(
        heads, positions, inv_freq, theta, interleaved, scale, out
    )


def pack_linear(
    weight: ArrayLike | Sequence[ArrayLike],
    dtype: str | None = None,
    *,
    quantization: str | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> LinearWeight:
    """A linear layer's weight in the layout that `linear` reads: made once, used often.

    weight: float32, bfloat16 or float16 [N, K], as torch.nn.Linear has it, or a list of them to be
    stacked along N (query, key and value, say). dtype: "float32" or "bfloat16"; by default bfloat16
    if the weight is, else float32. quantization: one of LLM's, such as "int8", for one weight in
    place of dtype; see `quantize`. Copies: the result takes about N * K elements.

    >>> import numpy
    >>> from llmserve import ops
    >>> weight = ops.pack_linear(numpy.zeros((32, 64), "f4"), "bfloat16")
    >>> weight.out_features, weight.in_features, weight.dtype
    (32, 64, 'bfloat16')
    """
    if quantization is not None and dtype is not None:
        raise InvalidArgument(
            f"pack_linear: expected dtype or quantization, got {dtype!r} and {quantization!r}"
        )
    name = None if quantization is None else text("quantization", quantization)
    return _kernels(backend, num_threads, weight).pack_linear(weight, dtype, name)


def quantize(weight: ArrayLike, quantization: str) -> tuple[Any, Any, Any]:
    """A weight as integers: (values, scales, minima), of which `linear` has a packed copy.

    weight: float32, bfloat16 or float16 [N, K]. quantization: "int8" (one group a row), "int4" and
    "int4-asym" (groups of 128), "int4-g32" and "int4-g32-asym" (of 32). Returns values int8 [N, K],
    scales float32 [N, groups] and minima likewise, or None for symmetric formats; an element is
    about scale * value - minimum. Raises NotSupported where groups do not divide K. Frantar et al.
    2022, section 4.

    >>> import numpy
    >>> from llmserve import ops
    >>> values, scales, minima = ops.quantize(numpy.array([[1.0, -2.0, 0.5]], "f4"), "int8")
    >>> values.tolist(), (values * scales).round(1).tolist(), minima
    ([[64, -127, 32]], [[1.0, -2.0, 0.5]], None)
    """
    return _core.quantize(weight, text("quantization", quantization))


def linear(
    x: ArrayLike,
    weight: LinearWeight,
    bias: ArrayLike | None = None,
    *,
    out: ArrayLike | None = None,
    accumulate: bool = False,
    backend: str | None = None,
    num_threads: int | None = None,
) -> Any:
    """x Wᵀ + bias, and + out if accumulate.

    x: float32 [M, K]. weight: of `pack_linear`, [N, K]. bias: float32 [N]. Returns float32 [M, N].
    Each output is one chain of multiply-adds over K in order, whatever M. Beside a quantized weight
    x is rounded to 8 bits, in groups as the weight's, and the sums of a group are exact. Moves
    N * K elements of the weight and 4 * M * (K + N) bytes.

    >>> import numpy
    >>> from llmserve import ops
    >>> weight = ops.pack_linear(numpy.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "f4"))
    >>> ops.linear(numpy.array([[1.0, 10.0]], "f4"), weight)
    array([[21., 43., 65.]], dtype=float32)
    """
    if not isinstance(weight, LinearWeight):
        raise InvalidArgument(
            f"linear.weight: expected what ops.pack_linear(weight) returns, got "
            f"{type(weight).__name__}; pack it once and use it often"
        )
    return _kernels(backend, num_threads, x).linear(x, weight, bias, out, accumulate)


def embedding(
    token_ids: Integers,
    table: ArrayLike,
    *,
    scale: float = 1.0,
    out: ArrayLike | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> Any:
    """table[token_ids] * scale, in float32.

    token_ids: [T], each in [0, V). table: float32, bfloat16 or float16 [V, E]. Returns float32
    [T, E]. Moves T * E elements of the table and 4 * T * E bytes.

    >>> import numpy
    >>> from llmserve import ops
    >>> ops.embedding([2, 0], numpy.array([[0.0], [1.0], [2.0]], "f4"))
    array([[2.],
           [0.]], dtype=float32)
    """
    return _kernels(backend, num_threads, table).embedding(table, token_ids, scale, out)


def gather(
    x: ArrayLike,
    rows: Integers,
    *,
    out: ArrayLike | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> Any:
    """x[rows].

    x: float32 [T, E]. rows: [S], each in [0, T). Returns float32 [S, E]. Moves 8 * S * E bytes.

    >>> import numpy
    >>> from llmserve import ops
    >>> ops.gather(numpy.array([[0.0], [1.0], [2.0]], "f4"), [1, 1])
    array([[1.],
           [1.]], dtype=float32)
    """
    return _kernels(backend, num_threads, x).gather_rows(x, rows, out)


def store_kv(
    keys: ArrayLike,
    values: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    slots: Integers,
    *,
    backend: str | None = None,
    num_threads: int | None = None,
) -> None:
    """Writes tokens' keys and values to their slots of a paged cache (reshape_and_cache).

    keys: float32 [T, K, D]. values: float32 [T, K, Dv]. key_cache: float32 or bfloat16
    [N, K, P, D], value_cache the same dtype [N, K, P, Dv]: the layout is K before P, so that a
    head's keys of one block lie together. Bytes (uint8) [N, K, P, D + 4] are a cache of 8-bit
    floats: of each block and head first the e4m3 codes [P, D], then the float32 scales [P], which
    are powers of two. slots: [T], block * P + offset, all different; -1 skips the token. Rounds to
    nearest even. Moves T * K * (D + Dv) elements twice.

    >>> import numpy
    >>> from llmserve import ops
    >>> cache = numpy.zeros((2, 1, 4, 1), "f4"), numpy.zeros((2, 1, 4, 1), "f4")
    >>> new = numpy.ones((1, 1, 1), "f4")
    >>> ops.store_kv(new, new, *cache, slots=[1 * 4 + 2])
    >>> cache[0][1, 0, :, 0]
    array([0., 0., 1., 0.], dtype=float32)
    """
    _kernels(backend, num_threads, keys).store_kv(keys, values, key_cache, value_cache, slots)


def copy_blocks(
    pairs: Sequence[tuple[int, int]],
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    *,
    backend: str | None = None,
    num_threads: int | None = None,
) -> None:
    """Copies whole blocks of a paged cache, in order: what copy-on-write asks for.

    pairs: (source, destination) blocks, as `BlockAllocator.take_copies` gives them. The caches are
    those of `store_kv`. Moves 2 * K * P * (D + Dv) elements a pair.

    >>> import numpy
    >>> from llmserve import ops
    >>> cache = numpy.arange(2, dtype="f4").reshape(2, 1, 1, 1)
    >>> ops.copy_blocks([(1, 0)], cache, cache.copy())
    >>> cache.ravel()
    array([1., 1.], dtype=float32)
    """
    _kernels(backend, num_threads, key_cache).copy_blocks(pairs, key_cache, value_cache)


def paged_attention(
    q: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    block_tables: Integers,
    kv_lens: Integers,
    query_starts: Integers | None = None,
    *,
    scale: float | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: ArrayLike | None = None,
    out: ArrayLike | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> Any:
    """Causal attention of a ragged batch over a paged KV cache; prefill, chunks and decode alike.

    q: float32 [T, H, D], sequence after sequence. key_cache, value_cache: as in `store_kv`, the
    queries' own keys already in them; H is a multiple of K, query head h reads KV head h / (H / K).
    block_tables: [B, M], or a list of B lists; position p of sequence b is in block
    block_tables[b][p // P] at offset p % P. kv_lens: [B], positions in the cache. query_starts:
    [B + 1], where each sequence's queries begin, from 0 to T; by default one query a sequence. The
    queries are the last positions of their sequence. scale: by default D ** -0.5. window: w > 0
    sees only the last w positions. soft_cap: c > 0 makes scores c * tanh(score / c). sinks: float32
    [H], a score of each head that takes part in the softmax and has no value, or None. Returns
    float32 [T, H, Dv]. Moves the cache of kv_lens once for each KV head. Kwon et al. 2023, section
    4.1; tiles: Dao et al. 2022, section 3.1.

    >>> import numpy
    >>> from llmserve import BlockAllocator, ops
    >>> pool = BlockAllocator(num_blocks=4, block_size=2)
    >>> (first, second), slots = pool.allocate("a", 3), []
    >>> slots = [first * 2, first * 2 + 1, second * 2]
    >>> keys, values = numpy.zeros((4, 1, 2, 8), "f4"), numpy.zeros((4, 1, 2, 1), "f4")
    >>> new = numpy.zeros((3, 1, 8), "f4"), numpy.array([[[1.0]], [[2.0]], [[6.0]]], "f4")
    >>> ops.store_kv(*new, keys, values, slots)
    >>> q = numpy.ones((1, 1, 8), "f4")
    >>> ops.paged_attention(q, keys, values, [pool.get_block_table("a")], kv_lens=[3])
    array([[[3.]]], dtype=float32)
    """
    return _kernels(backend, num_threads, q).paged_attention(
        q,
        key_cache,
        value_cache,
        block_tables,
        kv_lens,
        query_starts,
        scale,
        window,
        soft_cap,
        sinks,
        out,
    )


def sample(
    logits: ArrayLike,
    *,
    temperature: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seed: int | Sequence[int] = 0,
    position: int | Sequence[int] = 0,
    backend: str | None = None,
    num_threads: int | None = None,
) -> Any:
    """Draws one token a row: temperature, min-p, top-k, top-p, then the largest logit plus noise.

    logits: float32 [S, V]. The others: one value, or one a row. temperature 0 is greedy; top_k <= 0
    keeps all. The noise is a function of (seed, position, token id) alone: the same token whatever
    the other rows, and another at the next position. Returns int64 [S]. Moves 4 * S * V bytes.
    Gumbel-max: Maddison et al. 2014. Raises InvalidArgument for a row with NaN, +inf or only -inf.

    >>> import numpy
    >>> from llmserve import ops
    >>> ops.sample(numpy.array([[0.0, 2.0, 1.0]], "f4"), temperature=0.0)
    array([1])
    """
    return _kernels(backend, num_threads, logits).sample(
        logits,
        {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p},
        seed,
        position,
    )
