"""Linear layers over every form of weight: packed, in rows, rounded, in blocks, and fused."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from core_testing import testing
from llmserve import _core
from op_case import Case, as_dtype, as_float, empty, normal
from random_models import SHAPES

N, K = 32_000, 2048  # TinyLlama's head: more than the last cache holds
ROWS = (1, 4, 8, 32, 128, 512)
FEW_ROWS = (1, 8, 32, 512)  # where a form differs from another in little
STEP_ROWS = (1, 2, 4, 8, 16)  # of steps that decode
COLUMNS = np.s_[:: N // 8]  # that are checked
# Of the outputs' deviation. Activations are rounded to 8 bits in groups: half a step is 0.5% of
# their deviation; 4 times that.
BLOCK_ERROR = 0.02


def linear_cases(backend, rng) -> Iterator[Case]:
    for dtype in ("bfloat16", "float32"):
        w = as_dtype(normal(rng, N, K), dtype)
        weight = backend.pack_linear([w], dtype)
        yield Case(
            f"pack_linear {dtype} {N}x{K}",
            lambda w=w, dtype=dtype: backend.pack_linear([w], dtype),
            2 * w.nbytes,
            fills_new_memory=True,
        )
        for m in ROWS:
            x, out = normal(rng, m, K), empty(m, N)

            def check(x=x, out=out, w=w, dtype=dtype):
                # Some instruction sets round x to bfloat16 beside such weights: 2^-9 a term.
                atol = 1e-3 if dtype == "float32" else 4 * 2**-9 * K**0.5
                return np.allclose(out[:, COLUMNS], x @ as_float(w[COLUMNS]).T, atol=atol)

            yield linear_case(backend, f"linear {dtype}", x, weight, out, dtype, check, w.nbytes)
        in_rows = backend.defer_linear([w], dtype)
        for m in FEW_ROWS:
            x, out = normal(rng, m, K), empty(m, N)

            def is_same(x=x, out=out, weight=weight):
                return np.array_equal(out, backend.linear(x, weight))

            yield linear_case(
                backend, f"linear {dtype} in rows", x, in_rows, out, dtype, is_same, w.nbytes
            )


def quantized_cases(backend, rng) -> Iterator[Case]:
    w = normal(rng, N, K)
    for name, _ in _core.supported_quantizations():
        weight = backend.pack_quantized(w, name)
        yield Case(
            f"pack_quantized {name} {N}x{K}",
            lambda name=name: backend.pack_quantized(w, name),
            w.nbytes + weight.num_bytes,
        )
        for m in ROWS:
            x, out = normal(rng, m, K), empty(m, N)

            def check(x=x, out=out):  # within the rounding of 4 bits
                return np.abs(out[:, COLUMNS] - x @ w[COLUMNS].T).std() < 0.15 * K**0.5

            yield linear_case(backend, f"linear {name}", x, weight, out, name, check)


def block_cases(backend, rng) -> Iterator[Case]:
    """Blocks of GGUF files: packing each kind, and multiplying with each layout that they get."""
    timed = set()
    for name, elements, num_bytes, layout in testing.kept_formats():
        # Any two such bytes are a half in [0, 1), so that scales are.
        blocks = rng.integers(0, 0x3C, (N, K // elements * num_bytes), np.uint8)
        if name == "MXFP4":  # an exponent: nothing subnormal
            blocks.reshape(-1, num_bytes)[:, 0] += 64
        weight = backend.pack_blocks(blocks, name)
        w = testing.dequantize(name, blocks[COLUMNS].tobytes()).reshape(-1, K)

        def is_near(x, out, w=w):
            expected = x @ w.T
            return (out[:, COLUMNS] - expected).std() < BLOCK_ERROR * expected.std()

        x = normal(rng, 4, K)
        yield Case(
            f"pack_blocks {name} {N}x{K}",
            lambda blocks=blocks, name=name: backend.pack_blocks(blocks, name),
            blocks.nbytes + weight.num_bytes,
            check=lambda x=x, weight=weight, is_near=is_near: is_near(x, backend.linear(x, weight)),
        )
        for m in FEW_ROWS if layout not in timed else ():
            x, out = normal(rng, m, K), empty(m, N)

            def check(x=x, out=out, is_near=is_near):
                return is_near(x, out)

            yield linear_case(backend, f"linear {name}", x, weight, out, name, check)
        timed.add(layout)


# Of quantized checkpoints, with their traits (testing.make_format).
E2M1_DOUBLED = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]
FORMATS = {
    "GPTQ, AWQ int4 g128": {
        "bits": 4,
        "group_size": 128,
        "scale_type": "float16",
        "has_zero": True,
    },
    "compressed-tensors int4": {"bits": 4, "group_size": 128, "scale_type": "bfloat16"},
    "NVFP4": {
        "bits": 4,
        "group_size": 16,
        "scale_type": "fp8",
        "table": E2M1_DOUBLED,
        "has_row_scale": True,
    },
    "FP8 of rows": {"is_fp8": True},
    "FP8 in blocks of 128": {"is_fp8": True, "group_size": 128},
    "NF4": {"bits": 4, "group_size": 64, "values": [(i - 7.5) / 7.5 for i in range(16)]},
}


def format_cases(backend, rng) -> Iterator[Case]:
    """Formats of quantized checkpoints that no `quantization` makes."""
    if backend.name == "cuda":
        return
    for name, traits in FORMATS.items():
        numbers = rng.integers(0, 16 if traits.get("bits") == 4 else 0x70, (N, K)).astype(np.int8)
        groups = -(-K // (traits.get("group_size", 0) or K))
        form = "bfloat16" if "is_fp8" in traits or "values" in traits else name
        scales = np.full((N, groups), 2.0**-6, np.float32)
        weight = backend.pack_numbers(
            testing.make_format(**traits),
            numbers,
            scales,
            zeros=np.full((N, groups), 8, np.int16),
            row_scales=np.ones(N, np.float32),
        )
        for m in FEW_ROWS:
            x, out = normal(rng, m, K), empty(m, N)

            def is_same(x=x, out=out, weight=weight):
                return np.array_equal(out[-1:], backend.linear(x[-1:], weight))

            yield linear_case(backend, f"linear {name}", x, weight, out, form, is_same)


def linear_case(backend, label, x, weight, out, form, check, weight_bytes=None) -> Case:
    (m, k), n = x.shape, out.shape[1]
    return Case(
        f"{label} M={m} {n}x{k}",
        lambda: backend.linear(x, weight, out=out),
        (weight_bytes or weight.num_bytes) + x.nbytes + out.nbytes,
        2 * m * n * k,
        form,
        check=check,
    )


def layer_cases(backend, rng) -> Iterator[Case]:
    """The products of all of a model's layers, one after another, as a step that decodes runs them:
    Qwen3-0.6B's, whose weights are of 1 to 13 MB each."""
    name = "qwen3-0.6b"
    shape = SHAPES[name]
    hidden, ffn, head_dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries = shape["num_attention_heads"] * head_dim
    keys = shape["num_key_value_heads"] * head_dim
    sizes = [(queries + 2 * keys, hidden), (hidden, queries), (2 * ffn, hidden), (hidden, ffn)]
    num_layers = shape["num_hidden_layers"]
    w = {size: normal(rng, *size) for size in sizes}
    for form in ("bfloat16", "int8", "int4"):
        layers = [pack(backend, w[size], form) for size in sizes * num_layers]
        num_bytes = sum(weight.num_bytes for weight in layers)
        flops = 2 * num_layers * sum(n * k for n, k in sizes)
        for m in STEP_ROWS:
            x = {k: normal(rng, m, k) for _, k in sizes}
            out = {n: empty(m, n) for n, _ in sizes}

            def run(layers=layers, x=x, out=out):
                for (n, k), weight in zip(sizes * num_layers, layers, strict=True):
                    backend.linear(x[k], weight, out=out[n])

            def check(x=x, out=out):  # the last one, within the rounding of 4 bits
                n, k = sizes[-1]
                return np.abs(out[n] - x[k] @ w[n, k].T).std() < 0.15 * k**0.5

            yield Case(
                f"layers {form} M={m} of {name}", run, num_bytes, m * flops, form, check=check
            )


def pack(backend, w: np.ndarray, form: str):
    if form.startswith("int"):
        return backend.pack_quantized(w, form)
    return backend.pack_linear([as_dtype(w, form)], form)


def fused_cases(backend, rng) -> Iterator[Case]:
    """Norm, gate and up projections, and activation as one op: TinyLlama's MLP."""
    ffn = 5632
    w, norm = normal(rng, 2 * ffn, K), normal(rng, K)
    for form in ("bfloat16", "float32", "int8", "int4"):
        weight = pack(backend, w, form)
        for m in FEW_ROWS:
            x, out = normal(rng, m, K), empty(m, ffn)
            work = {
                "normed": empty(m, K),
                "gate_up": empty(m, 2 * ffn),
            }

            def run(x=x, out=out, weight=weight, work=work):
                backend.fused_linear(
                    x, weight, norm_weight=norm, activation="silu", out=out, **work
                )

            def check(x=x, out=out, weight=weight):
                gate_up = backend.linear(backend.rms_norm(x, norm), weight)
                return np.array_equal(out, backend.gated_activation(gate_up, "silu"))

            yield Case(
                f"fused_linear norm silu {form} M={m} {2 * ffn}x{K}",
                run,
                weight.num_bytes + x.nbytes + out.nbytes,
                2 * m * 2 * ffn * K,
                form,
                check=check,
            )
