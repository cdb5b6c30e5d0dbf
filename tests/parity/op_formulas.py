"""The ops of csrc/kernels/ops.h as NumPy formulas in float64, and helpers to make their inputs."""

from __future__ import annotations

import math

import numpy as np
from llmserve import _core_testing


def sum_tolerance(n: int) -> float:
    """Both sides sum n terms in float32, in different orders: an error of about sqrt(n) * 2^-24 of
    the terms' magnitude each; a factor of 4 for both sides and the tail."""
    return 4 * n**0.5 * 2**-24


SUM_TOLERANCE = sum_tolerance(1031)  # what ops beside the linear layer are held to

# Attention by dot products of bf16, which round queries and probabilities: a score of magnitude 1
# is off by 2^-9 of it, a weight by as much again, and values are up to 4; times 2 for the tail.
ROUNDED_ATTENTION_TOLERANCE = 2 * 2 * 4 * 2**-9


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Rounds float32 to bfloat16 (nearest even), as uint16 bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def as_dtype(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values as an array that the bindings read as `dtype`."""
    if dtype == "bfloat16":
        return to_bf16(x)
    if dtype == "fp8":
        return to_fp8_cache(x)
    return x.astype({"float32": np.float32, "float16": np.float16}[dtype])


# The numbers of the codes 0 to 126 of e4m3: Micikevicius et al. 2022, table 1.
E4M3 = np.array(
    [
        m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
        for e in range(16)
        for m in range(8)
    ]
)[:127]


def fp8_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes, and scales [..., 1], of float32 rows: StoreKvArgs of csrc/kernels/ops.h."""
    largest = np.abs(x).max(-1, keepdims=True).astype(np.float64)
    is_finite = np.isfinite(largest)
    mantissa, exponent = np.frexp(np.where(is_finite, largest, 1.0) / 448)
    exponent = np.where(largest == 0, -126, exponent - (mantissa == 0.5))
    scales = np.exp2(np.maximum(exponent, -126).astype(np.float64))
    magnitude = np.where(is_finite, np.abs(x).astype(np.float64), 0.0) / scales
    upper = np.clip(np.searchsorted(E4M3, magnitude), 1, 126)
    to_lower, to_upper = magnitude - E4M3[upper - 1], E4M3[upper] - magnitude
    is_lower = (to_lower < to_upper) | ((to_lower == to_upper) & (upper % 2 == 1))
    codes = np.where(is_lower, upper - 1, upper) + np.where(is_finite & np.signbit(x), 128, 0)
    return codes.astype(np.uint8), np.where(is_finite, scales, np.nan).astype(np.float32)


def through_fp8(x: np.ndarray) -> np.ndarray:
    """float32 rows as a cache of 8-bit floats gives them back."""
    codes, scales = fp8_rows(x)
    return (np.where(codes < 128, 1, -1) * E4M3[codes % 128] * scales).astype(np.float32)


def to_fp8_cache(x: np.ndarray) -> np.ndarray:
    """Rows [N, K, P, D] as bytes [N, K, P, D + 4]: of a block and head codes, then scales."""
    n, heads, block_size, dim = x.shape
    codes, scales = fp8_rows(x)
    parts = [codes.reshape(n, heads, -1), scales.reshape(n, heads, -1).view(np.uint8)]
    return np.concatenate(parts, axis=2).reshape(n, heads, block_size, dim + 4)


def isa_of(backend) -> str:
    """The instruction set of a cpu backend."""
    return backend.description.removeprefix("cpu/").split(",")[0]


def multiplies_bf16(backend) -> bool:
    """Whether it is a CPU's that rounds what it multiplies with caches in bf16 and fp8."""
    return backend.name == "cpu" and isa_of(backend) in ("avx512_bf16", "amx")


def as_float(x: np.ndarray) -> np.ndarray:
    return from_bf16(x) if x.dtype == np.uint16 else x.astype(np.float32)


def rms_norm(x, weight, eps=1e-6, weight_offset=0.0, scale=1.0):
    x = x.astype(np.float64)
    factor = scale / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return x * factor * (weight.astype(np.float64) + weight_offset)


def rotary(heads, positions, inv_freq, interleaved=False, scale=1.0):
    """heads [T, H, D]; the angle is rounded to float32, as transformers does."""
    angle = (positions[:, None].astype(np.float32) * inv_freq[None]).astype(np.float64)
    cos, sin = np.cos(angle)[:, None] * scale, np.sin(angle)[:, None] * scale
    half = inv_freq.size
    out = heads.astype(np.float64)
    a = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    b = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    x, y = out[..., a].copy(), out[..., b].copy()
    out[..., a], out[..., b] = x * cos - y * sin, y * cos + x * sin
    return out


def layer_norm(x, weight, bias=None, eps=1e-5, weight_offset=0.0, scale=1.0):
    x = x.astype(np.float64)
    x = x - x.mean(-1, keepdims=True)
    factor = weight.astype(np.float64) + weight_offset
    x = x * scale / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * factor
    return x if bias is None else x + bias.astype(np.float64)


def gelu_tanh(x):
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-2 * inner))


def swiglu_oai(gate, up):
    x, u = np.minimum(gate, 7), np.clip(up, -7, 7)
    return x / (1 + np.exp(-1.702 * x)) * (u + 1)


# One an activation of csrc/kernels/activations.inc, in float64.
ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x / 2 * np.vectorize(math.erfc)(-x / np.sqrt(2)),
    "gelu_tanh": gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}
# Of a gate and of what it is multiplied with.
GATED_ACTIVATIONS = {
    name: lambda gate, up, of=of: of(gate) * up for name, of in ACTIVATIONS.items()
} | {"swiglu_oai": swiglu_oai}


def activation(x, name):
    return ACTIVATIONS[name](x.astype(np.float64))


def gated_activation(gate_up, name):
    return GATED_ACTIVATIONS[name](*np.split(gate_up.astype(np.float64), 2, axis=-1))


def activations_of_one() -> list[str]:
    """The names of all activations of one number."""
    return [name for name, is_gated in _core_testing.activations() if not is_gated]


def all_activations() -> list[str]:
    """The names of all activations that a gated layer may have."""
    return [name for name, _ in _core_testing.activations()]


def attention(q, keys, values, scale, window=0, soft_cap=0.0, sinks=None):
    """One sequence: q [t, H, D] are the last t tokens of keys [n, K, D] and values [n, K, Dv].
    sinks [H]: a score of each head that has no value."""
    q, keys, values = (x.astype(np.float64) for x in (q, keys, values))
    num_queries, heads, _ = q.shape
    num_tokens, kv_heads, _ = keys.shape
    keys, values = (np.repeat(x, heads // kv_heads, axis=1) for x in (keys, values))
    scores = np.einsum("thd,jhd->htj", q, keys) * scale
    if soft_cap > 0:
        scores = soft_cap * np.tanh(scores / soft_cap)
    own = (num_tokens - num_queries + np.arange(num_queries))[:, None]
    position = np.arange(num_tokens)[None]
    seen = (position <= own) & ((window <= 0) | (position > own - window))
    scores = np.where(seen, scores, -np.inf)
    sink = np.full(heads, -np.inf) if sinks is None else sinks.astype(np.float64)
    sink = np.broadcast_to(sink[:, None, None], (*scores.shape[:2], 1))
    largest = np.maximum(scores.max(-1, keepdims=True), sink)
    p = np.exp(scores - largest)
    p /= p.sum(-1, keepdims=True) + np.exp(sink - largest)
    return np.einsum("htj,jhd->thd", p, values)


def log_softmax(logits):
    x = logits.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def kept_tokens(
    logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, top_n_sigma=0.0
) -> set[int]:
    """The tokens that top-n-sigma, min-p, top-k and top-p leave, one after another."""
    z = logits.astype(np.float64)
    z = (z - z.max()) / temperature
    kept = (np.exp(z) >= min_p) & (z > -np.inf)
    if top_n_sigma > 0:
        kept &= z >= -top_n_sigma * z[z > -np.inf].std()
    if 0 < top_k < z.size:
        kept &= z >= np.sort(np.where(kept, z, -np.inf))[::-1][top_k - 1]
    if top_p < 1:
        weights = np.where(kept, np.exp(z), 0.0)
        order = np.sort(weights)[::-1]
        count = int(np.searchsorted(np.cumsum(order), top_p * weights.sum()))
        kept &= weights >= order[count]
    return set(np.flatnonzero(kept).tolist())


def edited_logits(
    logits,
    biases=(),
    allowed=(),
    banned_token_ids=(),
    counts=(),
    repetition_penalty=1.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    **_,
):
    """The copy of a row that the token is drawn from, in float32 as the op says."""
    x = logits.astype(np.float32).copy()
    for token_id, bias in biases:
        x[token_id] += np.float32(bias)
    if allowed:
        for token_id in range(x.size):
            if not allowed[token_id // 32] >> (token_id % 32) & 1:
                x[token_id] = -np.inf
    x[list(banned_token_ids)] = -np.inf
    repetition = np.float32(repetition_penalty)
    for token_id, num_generated, _is_in_prompt in counts:
        value = x[token_id]
        value = value / repetition if value > 0 else value * repetition
        value -= np.float32(frequency_penalty) * np.float32(num_generated)
        if num_generated > 0:
            value -= np.float32(presence_penalty)
        x[token_id] = value
    return x


def draw_scores(x, temperature=1.0, seed=0, position=0, **filters):
    """What the drawn token is the argmax of."""
    x = x.astype(np.float64)
    if temperature < 1e-5:
        return x
    names = ("top_k", "top_p", "min_p", "top_n_sigma")
    given = {name: filters[name] for name in names if name in filters}
    kept = sorted(kept_tokens(x, temperature, **given))
    scores = np.full(x.size, -np.inf)
    scores[kept] = (x / temperature + gumbel_noise(x.size, seed, position))[kept]
    return scores


def philox4x32(counter: list[int], seed: int) -> list[int]:
    """Philox4x32-10 of Salmon et al. 2011, written from the paper."""
    mask = 0xFFFFFFFF
    key = [seed & mask, seed >> 32]
    c = list(counter)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ key[0], p1 & mask, (p0 >> 32) ^ c[3] ^ key[1], p0 & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return c


def gumbel_noise(num_tokens: int, seed: int, position: int) -> np.ndarray:
    noise = np.empty(num_tokens)
    for token in range(num_tokens):
        bits = philox4x32([token // 4, position & 0xFFFFFFFF, position >> 32, 0], seed)[token % 4]
        u = ((bits >> 9) + 0.5) / 2**23
        noise[token] = -np.log(-np.log(u))
    return noise


def to_panels(keys: np.ndarray) -> np.ndarray:
    """Rows [N, K, P, D] of keys in panels of 16 tokens (KeyLayout of csrc/kernels/ops.h)."""
    n, heads, block_size, dim = keys.shape
    if keys.dtype == np.uint8:  # codes, then scales as they are
        dim -= 4
        flat = keys.reshape(n, heads, -1)
        codes, scales = np.split(flat, [block_size * dim], axis=2)
        panels = in_runs(codes.reshape(n, heads, block_size, dim), 4).reshape(codes.shape)
        return np.concatenate([panels, scales], axis=2).reshape(keys.shape)
    return in_runs(keys, 4 // keys.itemsize)


def in_runs(keys: np.ndarray, run: int) -> np.ndarray:
    """[N, K, P, D] as [N, K, P / 16, D / run, 16, run], of the shape that it had."""
    n, heads, block_size, dim = keys.shape
    tiles = keys.reshape(n, heads, block_size // 16, 16, dim // run, run)
    return np.ascontiguousarray(tiles.swapaxes(3, 4)).reshape(keys.shape)


class PagedCache:
    """A paged cache filled with the given sequences, in shuffled blocks; unused slots hold NaN.

    `sequences` are pairs of keys [n, K, D] and values [n, K, Dv] in float32. With
    `shares_prefixes`, full blocks with the same keys before and in them are one block.
    """

    def __init__(
        self,
        sequences,
        block_size,
        dtype="float32",
        key_layout="rows",
        shares_prefixes=False,
        seed=0,
    ):
        rng = np.random.default_rng(seed)
        blocks = [-(-len(keys) // block_size) for keys, _ in sequences]
        num_blocks = sum(blocks) + 1
        heads = sequences[0][0].shape[1]
        order = rng.permutation(num_blocks).tolist()
        self.block_tables = np.zeros((len(sequences), max([1, *blocks])), np.int32)
        dims = [part.shape[2] for part in sequences[0]]
        parts = [np.full((num_blocks, heads, block_size, d), np.nan, np.float32) for d in dims]
        known: dict[tuple[int, bytes], int] = {}  # by the block before and the keys
        for b, pair in enumerate(sequences):
            block = -1
            for i in range(blocks[b]):
                keys = pair[0][i * block_size : (i + 1) * block_size]
                chain = block, keys.tobytes()
                is_known = shares_prefixes and len(keys) == block_size and chain in known
                block = known[chain] if is_known else order.pop()
                known[chain] = block
                self.block_tables[b, i] = block
                for part, source in zip(parts, pair, strict=True):
                    rows = source[i * block_size : (i + 1) * block_size].swapaxes(0, 1)
                    part[block, :, : rows.shape[1]] = rows
        # NaN survives the rounding: 0x7fc00000 has no low bits to carry.
        self.keys, self.values = (as_dtype(part, dtype) for part in parts)
        if key_layout == "panels":
            self.keys = to_panels(self.keys)


def run_attention(
    backend,
    sequences,
    queries,
    block_size=16,
    dtype="float32",
    key_layout="rows",
    shares_prefixes=False,
    values_in_keys=False,
    **options,
):
    """One call over all sequences; queries[b] [t, H, D] are the last tokens of sequence b. Values
    in the keys are their first elements, and are not kept."""
    cache = PagedCache(sequences, block_size, dtype, key_layout, shares_prefixes)
    starts = np.cumsum([0] + [len(q) for q in queries]).astype(np.int32)
    options.setdefault("scale", queries[0].shape[-1] ** -0.5)
    return backend.paged_attention(
        np.concatenate(queries),
        cache.keys,
        sequences[0][1].shape[2] if values_in_keys else cache.values,
        starts,
        np.array([len(keys) for keys, _ in sequences], np.int32),
        cache.block_tables,
        key_layout=key_layout,
        **options,
    )


def prepare_one_by_one(
    backend, qkv, heads, caches, slots, norms, angles, interleaved, layout="rows"
):
    """What `prepare_qkv` does, by the ops that it stands for; the queries."""
    kv_heads = caches[0].shape[1]
    dim = qkv.shape[1] // (heads + 2 * kv_heads)
    parts = np.split(qkv, [heads * dim, (heads + kv_heads) * dim], axis=1)
    q, k, v = (part.reshape(len(qkv), -1, dim).copy() for part in parts)
    if norms is not None:
        q, k = (backend.rms_norm(x, w, 1e-5, 1.0) for x, w in zip((q, k), norms, strict=True))
    if angles is not None:
        for x, table in zip((q, k), angles, strict=True):
            backend.rotary(x, table, interleaved)
    backend.store_kv(k, v, slots, *caches, layout)
    return q


def prepared_case(rng, lengths, shape, dtype, layout="rows"):
    """A step's last tokens of sequences (their length, how many tokens): their rows, what else the
    ops take, and a cache that has something else where their keys and values go."""
    heads, kv_heads, dim = shape

    def normal(*size):
        return rng.standard_normal(size, dtype=np.float32)

    pairs = [tuple(normal(n, kv_heads, dim) for _ in range(2)) for n, _ in lengths]
    cache = PagedCache(pairs, 16, dtype, layout)
    positions = [(b, n - t + i) for b, (n, t) in enumerate(lengths) for i in range(t)]
    slots = np.array([cache.block_tables[b, at // 16] * 16 + at % 16 for b, at in positions])
    starts = np.cumsum([0] + [t for _, t in lengths]).astype(np.int32)
    width = (heads + 2 * kv_heads) * dim
    qkv = normal(len(slots), width + 4)[:, :width] * 2
    lens = np.array([n for n, _ in lengths], np.int32)
    return qkv, cache, slots, (starts, lens, cache.block_tables, dim**-0.5)
