"""A layer of experts of OLMoE-1B-7B's shape: 64 experts of 2048 x 1024, 8 a token."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from op_case import Case, as_dtype, empty, normal

EXPERTS, TOP_K, WIDTH, INNER = 64, 8, 2048, 1024
ROWS = (1, 4, 16, 128, 512)
FORMS = ("bfloat16", "int8", "int4")


def expert_cases(backend, rng) -> Iterator[Case]:
    # Drawn once: experts differ by a rotation of it, so that they are no copies of each other.
    drawn = normal(rng, 3 * INNER, WIDTH) / WIDTH**0.5
    for form in FORMS:
        up, down = [], []
        for e in range(EXPERTS):
            turned = np.roll(drawn, 17 * e, axis=1)
            up.append(packed(backend, turned[: 2 * INNER], form))
            down.append(packed(backend, turned[2 * INNER :].reshape(WIDTH, INNER), form))
        each = up[0].num_bytes + down[0].num_bytes
        for tokens in ROWS:
            x, out = normal(rng, tokens, WIDTH), empty(tokens, WIDTH)
            ids = np.empty((tokens, TOP_K), np.int32)
            weights = empty(tokens, TOP_K)
            backend.route_experts(normal(rng, tokens, EXPERTS), ids, weights)
            rows = ids.reshape(-1)
            active = len(np.unique(rows))

            def run(x=x, up=up, down=down, rows=rows, weights=weights, out=out):
                out[:] = 0
                return backend.fused_experts(x, up, down, rows, weights, out=out)

            def is_same(x=x, up=up, down=down, rows=rows, weights=weights, out=out):
                """As the last token alone."""
                alone = backend.fused_experts(x[-1:], up, down, rows[-TOP_K:], weights[-1:])
                return np.array_equal(out[-1:], alone)

            yield Case(
                f"fused_experts {form} T={tokens}, {active} of {EXPERTS} experts",
                run,
                active * each + x.nbytes + out.nbytes,
                2 * tokens * TOP_K * 3 * WIDTH * INNER,
                form,
                check=is_same,
            )
        del up, down


def packed(backend, rows, form):
    rows = np.ascontiguousarray(rows)
    if form == "bfloat16":
        return backend.pack_linear([as_dtype(rows, form)], form)
    return backend.pack_quantized(rows, form)


def router_cases(backend, rng) -> Iterator[Case]:
    for experts in (64, 256):
        for tokens in (1, 512):
            logits = normal(rng, tokens, experts)
            ids, weights = np.empty((tokens, TOP_K), np.int32), empty(tokens, TOP_K)
            yield Case(
                f"route_experts T={tokens} X={experts}",
                lambda logits=logits, ids=ids, weights=weights: backend.route_experts(
                    logits, ids, weights
                ),
                logits.nbytes + ids.nbytes + weights.nbytes,
            )
