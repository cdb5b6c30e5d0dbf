"""How many spans of 256 positions a warp takes in decoding changes no bit."""

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


def test_another_number_of_spans_is_refused(monkeypatch):
    monkeypatch.setenv("LLMSERVE_CUDA_DECODE_SPANS", "3")
    with pytest.raises(InvalidArgument, match="expected one, two, enough or all, got 3"):
        _core_testing.make_backend("cuda")
