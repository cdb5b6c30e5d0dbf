"""Rows that several blocks share, and rows with more candidates than a block can list."""

import numpy as np
import pytest
from llmserve import _core_testing

REASON = _core_testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]

LISTED = 4096  # tokens that a block can list
LOGPROB_TOLERANCE = 2e-6  # as in test_sampling_op.py


@pytest.fixture(scope="module")
def cuda():
    return _core_testing.make_backend("cuda")


@pytest.fixture(scope="module")
def ref():
    return _core_testing.make_backend("ref")


def rows_of(kind, vocabulary):
    rng = np.random.default_rng(7)
    logits = rng.standard_normal((2, vocabulary), dtype=np.float32)
    if kind == "peaked":  # most weights are 0, most noise cannot win
        logits *= 12
    if kind == "flat":  # a bucket of weights holds more than a list does
        logits *= 1e-3
    if kind == "equal":
        logits[:] = 1.5
    if kind == "ties":  # at the threshold of any filter
        logits = np.floor(logits * 2) / 2
    if kind == "few":  # as a grammar leaves them
        logits[0, rng.permutation(vocabulary)[7:]] = -np.inf
        logits[1, rng.permutation(vocabulary)[900:]] = -np.inf
    if kind == "zeros":  # of both signs
        logits = np.where(logits > 0, np.float32(0.0), np.float32(-0.0))
    return logits


FILTERS = [
    *({"temperature": 0.0}, {}, {"temperature": 0.7}, {"min_p": 0.05}, {"top_p": 0.9}),
    *({"top_k": 1}, {"top_k": 50}, {"top_k": 50, "top_p": 0.9}, {"top_k": 3000}, {"top_k": 5000}),
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 1.7},
    {"top_p": 0.3, "min_p": 0.01, "temperature": 0.6},
    {"top_n_sigma": 2.0},
    {"top_n_sigma": 1.5, "top_k": 50, "top_p": 0.9, "temperature": 1.7},
]
KINDS = ["normal", "peaked", "flat", "equal", "ties", "few", "zeros"]


@pytest.mark.parametrize("params", FILTERS, ids=lambda p: "-".join(f"{k}{v}" for k, v in p.items()))
@pytest.mark.parametrize("kind", KINDS)
def test_large_rows_draw_what_ref_draws(cuda, ref, kind, params):
    logits = rows_of(kind, 3 * LISTED + 5)
    rows = [{"seed": 2**40 + 3, "position": i, **params} for i in range(2)]
    got = cuda.sample(logits, rows)
    assert [row["token_id"] for row in got] == [row["token_id"] for row in ref.sample(logits, rows)]
    assert cuda.sample(logits, rows) == got
    assert cuda.sample(logits[1:], rows[1:]) == got[1:]


@pytest.mark.parametrize("vocabulary", [1, 4, LISTED, LISTED + 4, 2 * LISTED + 32, 5 * LISTED - 1])
def test_rows_of_every_alignment_are_read_to_their_end(cuda, ref, vocabulary):
    logits = np.random.default_rng(1).standard_normal((4, vocabulary), dtype=np.float32)
    logits[0, -1] = logits[1, 0] = 9
    logits[2, vocabulary // 2] = np.nan
    logits[3, -1] = np.inf
    for temperature in (0.0, 0.9):
        rows = [{"temperature": temperature, "position": i} for i in range(4)]
        got, expected = cuda.sample(logits, rows), ref.sample(logits, rows)
        assert [row["is_valid"] for row in got] == [True, True, False, False]
        assert [row["token_id"] for row in got[:2]] == [row["token_id"] for row in expected[:2]]


def test_edits_reach_the_blocks_that_have_their_tokens(cuda, ref):
    vocabulary = 3 * LISTED + 5
    logits = rows_of("normal", vocabulary).repeat(3, 0)
    ends = [0, LISTED - 1, LISTED, 2 * LISTED + 31, vocabulary - 1]
    counts = [(i, 1 + i % 3, i % 2 == 0) for i in [*ends, *range(5, vocabulary, 97)]]
    words = [0x0F0F0F0F] * (vocabulary // 32) + [0x1F]
    edits = [
        {"counts": counts, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"allowed": words, "biases": [(i, 3.0) for i in ends], "top_p": 0.9},
        {"banned_token_ids": [*ends, vocabulary, -1], "temperature": 0.0},
        {"biases": [(vocabulary - 1, 40.0)], "top_k": 5},
        {"draw_logits": logits[0, ::-1].copy(), "biases": [(LISTED, 9.0)]},
        {"forced_token_id": vocabulary - 1, "allowed": words, "num_top": 2},
    ]
    rows = [{"seed": 5, "position": i, **edit} for i, edit in enumerate(edits)]
    got, expected = cuda.sample(logits, rows), ref.sample(logits, rows)
    assert [row["token_id"] for row in got] == [row["token_id"] for row in expected]
    assert cuda.sample(logits, rows) == got
    for i in range(6):
        assert cuda.sample(logits[i : i + 1], rows[i : i + 1]) == got[i : i + 1]


@pytest.mark.parametrize("num_top", [0, 1, 20, 5000])
@pytest.mark.parametrize("kind", KINDS)
def test_large_rows_report_what_ref_reports(cuda, ref, kind, num_top):
    logits = rows_of(kind, 3 * LISTED + 5)
    last = logits.shape[1] - 1
    rows = [
        {"position": i, "num_top": num_top, "reported_token_ids": [last, 3, LISTED]}
        for i in range(2)
    ]
    got, expected = cuda.sample(logits, rows), ref.sample(logits, rows)
    assert cuda.sample(logits, rows) == got
    assert cuda.sample(logits[1:], rows[1:]) == got[1:]
    for a, b in zip(got, expected, strict=True):
        assert (a["token_id"], a["rank"]) == (b["token_id"], b["rank"])
        assert a["logprob"] == pytest.approx(b["logprob"], abs=LOGPROB_TOLERANCE)
        for name in ("top", "reported"):
            assert [(i, r) for i, _, r in a[name]] == [(i, r) for i, _, r in b[name]]
            np.testing.assert_allclose(
                [x for _, x, _ in a[name]], [x for _, x, _ in b[name]], atol=LOGPROB_TOLERANCE
            )
