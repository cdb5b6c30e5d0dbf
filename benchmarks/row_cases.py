"""Ops that go over rows of activations, over the embedding, and over logits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from core_testing import testing
from op_case import Case, agree, aligned, as_dtype, empty, normal


def row_cases(backend, rng) -> Iterator[Case]:
    ref = testing.make_backend("ref")
    tokens, width, ffn = 512, 2048, 5632

    def case(name, op, num_bytes, *arrays):
        return Case(
            name,
            lambda: op(backend, *arrays),
            num_bytes,
            check=lambda: agree(op, backend, ref, *arrays),
        )

    x, weight = normal(rng, tokens, width), normal(rng, width)
    out, residual = empty(*x.shape), aligned(np.zeros_like(x))
    rows = rng.permutation(tokens)
    for name, op, copies, arrays in (
        ("rms_norm", lambda b, x, w, out: b.rms_norm(x, w, out=out), 2, (x, weight, out)),
        ("layer_norm", lambda b, x, w, out: b.layer_norm(x, w, w, out=out), 2, (x, weight, out)),
        (
            "add_rms_norm",
            lambda b, sum, x, w, out: b.add_rms_norm(sum, x, w, out=out),
            4,
            (residual, x, weight, out),
        ),
        ("add", lambda b, sum, x: b.add(sum, x), 3, (residual, x)),
        ("cap_logits", lambda b, x: b.cap_logits(x, 1.0, 30.0), 2, (residual,)),
        ("gather_rows", lambda b, x, rows, out: b.gather_rows(x, rows, out=out), 2, (x, rows, out)),
    ):
        yield case(f"{name} {tokens}x{width}", op, copies * x.nbytes, *arrays)
    ids = rng.integers(0, 32_000, tokens)
    for dtype in ("bfloat16", "float32"):
        table = as_dtype(normal(rng, 32_000, width), dtype)
        yield case(
            f"embedding {dtype} {tokens}x{width}",
            lambda b, table, ids, out: b.embedding(table, ids, out=out),
            tokens * width * (table.itemsize + 4),
            *(table, ids, out),
        )
    gate_up, activated = normal(rng, tokens, 2 * ffn), empty(tokens, ffn)
    for activation, is_gated in testing.activations():
        yield case(
            f"gated_activation {activation} {tokens}x{ffn}",
            lambda b, x, out, activation=activation: b.gated_activation(x, activation, out=out),
            gate_up.nbytes + activated.nbytes,
            *(gate_up, activated),
        )
        if is_gated:
            continue  # it takes two numbers
        yield case(
            f"activation {activation} {tokens}x{ffn}",
            lambda b, x, out, activation=activation: b.activation(x[:, :ffn], activation, out=out),
            2 * activated.nbytes,
            *(gate_up, activated),
        )
    heads = normal(rng, tokens, 32, 64)
    positions, inv_freq = np.arange(tokens), (1e4 ** (-np.arange(32) / 32)).astype(np.float32)
    table = backend.rotary_table(positions, inv_freq)
    yield case(
        f"rotary_table {tokens}x64",
        lambda b, positions, inv_freq: b.rotary_table(positions, inv_freq),
        table.nbytes,
        *(positions, inv_freq),
    )
    yield case(
        f"rotary {tokens}x32x64",
        lambda b, x, table: b.rotary(x, table),
        2 * heads.nbytes,
        heads,
        table,
    )
    for dtype in ("bfloat16", "float32"):
        big = as_dtype(np.ones(1 << 26, np.float32), dtype)
        yield Case(
            f"first_non_finite {dtype} {big.nbytes >> 20} MiB",
            lambda big=big: backend.first_non_finite(big),
            big.nbytes,
            check=lambda big=big: finds_the_last(backend, big),
        )


def finds_the_last(backend, big: np.ndarray) -> bool:
    """Nothing where all are finite, and an infinity in the last place."""
    if backend.first_non_finite(big) != -1:
        return False
    last = big[-1]
    big[-1] = np.inf if big.dtype == np.float32 else 0x7F80
    found = backend.first_non_finite(big)
    big[-1] = last
    return found == big.size - 1


def sample_cases(backend, rng) -> Iterator[Case]:
    for rows, vocabulary in ((1, 151_936), (32, 32_000)):
        logits = aligned(normal(rng, rows, vocabulary) * 3)
        generated = rng.choice(vocabulary, 1000, replace=False)
        for label, params in (
            ("greedy", {"temperature": 0.0}),
            ("plain", {}),
            ("top_k=50 top_p=0.9", {"top_k": 50, "top_p": 0.9}),
            ("top_p=0.9 logprobs=5", {"top_p": 0.9, "num_top": 5}),
            ("min_p=0.05", {"min_p": 0.05}),
            (
                "penalties of 1000 tokens",
                {
                    "min_p": 0.05,
                    "repetition_penalty": 1.3,
                    "frequency_penalty": 0.5,
                    "presence_penalty": 0.5,
                    "counts": [(int(i), 1 + int(i) % 3, False) for i in generated],
                },
            ),
        ):
            asked = [{"seed": 1, "position": i, **params} for i in range(rows)]
            yield Case(
                f"sample {rows}x{vocabulary} {label}",
                lambda logits=logits, asked=asked: backend.sample(logits, asked),
                logits.nbytes,
                check=lambda logits=logits, asked=asked: all(
                    is_kept(row, params, drawn["token_id"])
                    for row, params, drawn in zip(
                        logits, asked, backend.sample(logits, asked), strict=True
                    )
                ),
            )


def is_kept(logits: np.ndarray, params: dict, token_id: int) -> bool:
    """Whether a row's penalties, min-p, top-k and top-p leave the token, within rounding."""
    x = logits.astype(np.float64)
    if "counts" in params:
        ids, counts, _ = (np.array(column) for column in zip(*params["counts"], strict=True))
        penalty = params["repetition_penalty"]
        x[ids] = np.where(x[ids] > 0, x[ids] / penalty, x[ids] * penalty)
        x[ids] -= params["frequency_penalty"] * counts + params["presence_penalty"]
    z = np.exp(x - x.max())
    if params.get("temperature") == 0.0:
        return z[token_id] == 1.0
    is_likely = z[token_id] >= params.get("min_p", 0.0) - 1e-5
    ordered = np.sort(z)[::-1]
    in_top_k = z[token_id] >= ordered[params.get("top_k", len(z)) - 1]
    of_top_k = ordered[: params.get("top_k", len(z))]
    more_likely = of_top_k[of_top_k > z[token_id]].sum() / of_top_k.sum()
    return is_likely and in_top_k and more_likely <= params.get("top_p", 1.0) + 1e-5
