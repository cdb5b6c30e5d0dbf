"""How many spans of 256 positions a warp takes in decoding, and who merges them, changes no bit."""

import numpy as np
import pytest
from llmserve import InvalidArgument, _core_testing
from parity import op_formulas as formulas

REASON = _core_testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("options", [{}, {"window": 300}], ids=["plain", "window"])
@pytest.mark.parametrize(("heads", "dim"), [(4, 64), (2, 128)])
def test_spans_walked_by_one_warp_have_the_bits_of_spans_apart(monkeypatch, heads, dim, options):
    rng = np.random.default_rng(0)
    # So many that a warp each is taken, of up to four spans: a span's end, beyond it, two tokens.
    lengths = [(1000, 1), (513, 2), (512, 1), (300, 1), (256, 1)] + [(3, 1)] * 35
    pairs = [(normal(rng, n, 2, dim), normal(rng, n, 2, dim)) for n, _ in lengths]
    queries = [normal(rng, t, heads, dim) for _, t in lengths]
    options = options | {"sinks": normal(rng, heads)}

    def run(spans):
        monkeypatch.setenv("LLMSERVE_CUDA_DECODE_SPANS", spans)
        backend = _core_testing.make_backend("cuda")
        return formulas.run_attention(backend, pairs, queries, 16, "bfloat16", **options)

    apart = run("one")
    assert np.isfinite(apart).all()
    for spans in ("two", "enough", "all"):
        np.testing.assert_array_equal(run(spans), apart)


# By a warp a unit, whose blocks are few, and by a warp a span; several tokens of a sequence, too.
FEW = [(1300, 1), (513, 2), (257, 1), (256, 1), (3, 1)]
MANY = FEW + [(5, 1)] * 40


@pytest.mark.parametrize(
    ("lengths", "dim", "dtype", "options"),
    [
        (FEW, 64, "bfloat16", {}),
        (FEW, 128, "fp8", {"window": 300}),
        (FEW, 80, "bfloat16", {"soft_cap": 5.0, "window": 700}),
        (MANY, 64, "fp8", {"soft_cap": 5.0}),
        (MANY, 128, "bfloat16", {"window": 300}),
    ],
)
def test_spans_merged_by_the_last_block_have_the_bits_of_those_merged_by_a_kernel(
    monkeypatch, lengths, dim, dtype, options
):
    rng = np.random.default_rng(1)
    pairs = [(normal(rng, n, 2, dim), normal(rng, n, 2, dim)) for n, _ in lengths]
    queries = [normal(rng, t, 4, dim) for _, t in lengths]
    options = options | {"sinks": normal(rng, 4)}

    def run(merge, spans):
        monkeypatch.setenv("LLMSERVE_CUDA_MERGE", merge)
        monkeypatch.setenv("LLMSERVE_CUDA_DECODE_SPANS", spans)
        backend = _core_testing.make_backend("cuda")
        # Again, and for others in between: each run finds its counters at zero.
        for pairs_of, queries_of in ((pairs, queries), (pairs[::-1], queries[::-1])):
            formulas.run_attention(backend, pairs_of, queries_of, 16, dtype, **options)
        return formulas.run_attention(backend, pairs, queries, 16, dtype, **options)

    by_kernel = run("kernel", "one")
    assert np.isfinite(by_kernel).all()
    for merge, spans in (("last", "one"), ("last", "two"), ("auto", "one")):
        np.testing.assert_array_equal(run(merge, spans), by_kernel)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("lengths", [FEW, MANY, [(70, 4), (300, 2)]], ids=["few", "many", "more"])
def test_codes_widened_as_they_are_multiplied_have_the_bits_of_those_widened_before(
    monkeypatch, lengths, dim
):
    rng = np.random.default_rng(2)
    # Rows of all sizes: each has a scale of its own.
    pairs = [
        tuple(normal(rng, n, 2, dim) * 2.0 ** rng.integers(-9, 9, (n, 2, 1)) for _ in range(2))
        for n, _ in lengths
    ]
    queries = [normal(rng, t, 6, dim) for _, t in lengths]
    options = {"scale": 0.01, "window": 290, "sinks": normal(rng, 6)}

    def run(where):
        monkeypatch.setenv("LLMSERVE_CUDA_DECODE_F8", where)
        backend = _core_testing.make_backend("cuda")
        return formulas.run_attention(
            backend, [(k.astype(np.float32), v.astype(np.float32)) for k, v in pairs], queries,
            16, "fp8", **options,
        )  # fmt: skip

    before = run("shared")
    assert np.isfinite(before).all()
    np.testing.assert_array_equal(run("registers"), before)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("LLMSERVE_CUDA_DECODE_F8", "shared or registers"),
        ("LLMSERVE_CUDA_DECODE_SPANS", "one, two, enough or all"),
        ("LLMSERVE_CUDA_MERGE", "auto, last or kernel"),
    ],
)
def test_another_choice_is_refused(monkeypatch, name, expected):
    monkeypatch.setenv(name, "3")
    with pytest.raises(InvalidArgument, match=f"{name}: expected {expected}, got 3"):
        _core_testing.make_backend("cuda")
