"""What changes a row before its draw: biases, masks, bans, penalties, another row, a token."""

import numpy as np
import op_formulas as formulas
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llmserve import InvalidArgument
from transformers import RepetitionPenaltyLogitsProcessor

VOCABULARY = 131  # not a multiple of any vector's lanes, nor of a mask's word


def mask_of(token_ids, vocabulary=VOCABULARY):
    words = [0] * -(-vocabulary // 32)
    for token_id in token_ids:
        words[token_id // 32] |= 1 << (token_id % 32)
    return words


def draws(backend, logits, count, **row):
    """`count` tokens drawn at consecutive positions."""
    batch = np.ascontiguousarray(np.broadcast_to(logits, (count, logits.size)))
    rows = [{"seed": 5, "position": i, **row} for i in range(count)]
    return [drawn["token_id"] for drawn in backend.sample(batch, rows)]


def greedy(backend, logits, **row):
    (drawn,) = backend.sample(logits[None], [{"temperature": 0.0, "num_top": 1, **row}])
    return drawn


@st.composite
def edits(draw):
    """Random edits of a row, every one absent at times."""
    token = st.integers(0, VOCABULARY - 1)
    tokens = st.lists(token, max_size=40, unique=True)
    penalty = st.floats(-2, 2, width=32)
    row = {
        "temperature": draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        "top_k": draw(st.sampled_from([0, 1, 5, 50])),
        "top_p": draw(st.sampled_from([1.0, 0.9, 0.3])),
        "min_p": draw(st.sampled_from([0.0, 0.05])),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "position": draw(st.integers(0, 2**40)),
    }
    if draw(st.booleans()):
        row["biases"] = [(i, draw(st.floats(-100, 100, width=32))) for i in draw(tokens)]
    if draw(st.booleans()):
        row["allowed"] = mask_of(draw(st.lists(token, min_size=1, max_size=100, unique=True)))
    if draw(st.booleans()):
        row["banned_token_ids"] = draw(tokens)
    if draw(st.booleans()):
        row["counts"] = [(i, draw(st.integers(0, 9)), draw(st.booleans())) for i in draw(tokens)]
        row["repetition_penalty"] = draw(st.sampled_from([1.0, 0.5, 1.3, 4.0]))
        row["frequency_penalty"] = draw(penalty)
        row["presence_penalty"] = draw(penalty)
    return row


@given(row=edits(), data_seed=st.integers(0, 2**32 - 1))
@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_combination_draws_what_a_plain_model_of_the_sampler_draws(any_backend, row, data_seed):
    """The model decides in float64, so a draw is compared where its lead exceeds rounding."""
    logits = np.random.default_rng(data_seed).standard_normal(VOCABULARY, dtype=np.float32) * 3
    (drawn,) = any_backend.sample(logits[None], [row])
    x = formulas.edited_logits(logits, **row)
    assert drawn["is_valid"] == bool(np.isfinite(x).any())
    if not drawn["is_valid"]:
        assert drawn["is_raw_valid"]
        return
    assert np.isfinite(x[drawn["token_id"]])
    scores = formulas.draw_scores(x, **row)
    best, second = np.sort(scores)[::-1][:2]
    if best - second > 1e-4:
        assert drawn["token_id"] == int(scores.argmax())


@given(row=edits(), data_seed=st.integers(0, 2**32 - 1))
@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_row_with_edits_agrees_with_ref_and_leaves_its_neighbours_alone(
    fast, ref, row, data_seed
):
    rng = np.random.default_rng(data_seed)
    logits = rng.standard_normal((3, VOCABULARY), dtype=np.float32) * 3
    plain = {"temperature": 1.0, "seed": 3, "position": 8, "num_top": 4}
    reported = {"num_top": 2, "reported_token_ids": [130, 0, 77]}
    batch = fast.sample(logits, [plain, {**row, **reported}, plain])
    (alone,) = fast.sample(logits[1:2], [{**row, **reported}])
    assert batch[1] == alone
    assert [batch[0], batch[2]] == fast.sample(logits[[0, 2]], [plain, plain])
    (expected,) = ref.sample(logits[1:2], [{**row, **reported}])
    assert [alone[key] for key in ("is_valid", "rank")] == [
        expected[key] for key in ("is_valid", "rank")
    ]
    assert not expected["is_valid"] or alone["token_id"] == expected["token_id"]
    for key in ("top", "reported"):
        assert [(i, rank) for i, _, rank in alone[key]] == [(i, r) for i, _, r in expected[key]]


# The sum of 1037 exponentials in float32 or float64, a logarithm near 10, two subtractions.
LOGPROB_TOLERANCE = 1037**0.5 * 2**-24 + 4 * 2**-21


def test_a_batch_of_all_kinds_of_rows_draws_and_reports_what_ref_does(fast, ref, rng):
    """Every list and figure of a row, side by side with rows that have none."""
    vocabulary = 1037
    logits = rng.standard_normal((9, vocabulary), dtype=np.float32) * 3
    logits[3, 40:60] = 4.5  # ties across the end of the best 8
    logits[4, ::3] = -0.0
    logits[4, 1::3] = 0.0
    logits[7, 5] = np.nan
    mask = mask_of(range(0, vocabulary, 3), vocabulary)
    counts = [(i, i % 4, i % 3 == 0) for i in range(0, 200, 2)]
    rows = [
        {"num_top": 5, "reported_token_ids": [7, 1000, 3]},
        {"biases": [(3, 9.5), (1036, -2.0)], "allowed": mask, "num_top": 0},
        {"counts": counts, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "top_k": 20},
        {"temperature": 0.0, "num_top": 8, "counts": counts, "presence_penalty": -1.5},
        {"temperature": 0.0, "num_top": 12, "banned_token_ids": [0, 3, -1, 4000]},
        {"draw_logits": logits[0, ::-1].copy(), "biases": [(5, 1.0)], "num_top": 3, "top_p": 0.8},
        {"forced_token_id": 17, "num_top": 2, "allowed": mask},
        {"num_top": 4, "reported_token_ids": [1]},  # not a number among its logits
        {"min_p": 0.02},
    ]
    rows = [{"seed": 3, "position": i, **row} for i, row in enumerate(rows)]
    got, expected = fast.sample(logits, rows), ref.sample(logits, rows)
    for a, b in zip(got, expected, strict=True):
        for field in ("is_valid", "is_raw_valid", "rank"):
            assert a[field] == b[field]
        assert not b["is_valid"] or a["token_id"] == b["token_id"]
        assert abs(a["logprob"] - b["logprob"]) <= LOGPROB_TOLERANCE
        for name in ("top", "reported"):
            assert [(i, r) for i, _, r in a[name]] == [(i, r) for i, _, r in b[name]]
            for (_, x, _), (_, y, _) in zip(a[name], b[name], strict=True):
                assert abs(x - y) <= LOGPROB_TOLERANCE
    assert fast.sample(logits[4:6], rows[4:6]) == got[4:6]


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_repetition_penalty_is_that_of_transformers(any_backend, rng, penalty):
    logits = rng.standard_normal((40, VOCABULARY), dtype=np.float32) * 2
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    for row in logits:
        seen = rng.integers(0, VOCABULARY, 30).tolist()
        expected = processor(torch.tensor([seen]), torch.from_numpy(row[None].copy()))[0]
        counts = [(token_id, 0, True) for token_id in sorted(set(seen))]
        drawn = greedy(any_backend, row, counts=counts, repetition_penalty=penalty)
        assert drawn["token_id"] == int(expected.argmax())


def test_logprobs_and_ranks_are_of_the_raw_row(any_backend, rng):
    logits = rng.standard_normal(VOCABULARY, dtype=np.float32)
    best = np.argsort(-logits)
    drawn = greedy(
        any_backend,
        logits,
        biases=[(int(best[5]), 50.0)],
        counts=[(int(best[5]), 3, True)],
        presence_penalty=0.5,
        reported_token_ids=[int(best[9]), int(best[3])],
    )
    expected = formulas.log_softmax(logits)
    assert drawn["token_id"] == best[5]
    assert drawn["rank"] == 6
    assert drawn["logprob"] == pytest.approx(expected[best[5]], abs=2e-6)
    assert [(i, rank) for i, _, rank in drawn["reported"]] == [(best[3], 4), (best[9], 10)]
    assert drawn["reported"][1][1] == pytest.approx(expected[best[9]], abs=2e-6)


def test_ranks_of_reported_tokens_count_ties_as_equals(any_backend):
    logits = np.array([1, 3, 3, 0, 3, 2], np.float32)
    drawn = greedy(any_backend, logits, reported_token_ids=[3, 4, 5, 1])
    assert [(i, rank) for i, _, rank in drawn["reported"]] == [(1, 1), (4, 1), (5, 4), (3, 6)]


def test_reporting_the_whole_vocabulary_gives_every_token_its_rank(any_backend, rng):
    logits = rng.standard_normal(VOCABULARY, dtype=np.float32)
    drawn = greedy(any_backend, logits, num_top=VOCABULARY)
    assert [i for i, _, _ in drawn["top"]] == np.argsort(-logits, kind="stable").tolist()
    assert [rank for _, _, rank in drawn["top"]] == list(range(1, VOCABULARY + 1))
    total = sum(np.exp(np.float64(logprob)) for _, logprob, _ in drawn["top"])
    assert total == pytest.approx(1.0, abs=1e-5)


def test_only_allowed_tokens_are_drawn(any_backend, rng):
    logits = rng.standard_normal(VOCABULARY, dtype=np.float32)
    allowed = [0, 31, 32, 63, 64, 130]
    tokens = draws(any_backend, logits, 400, allowed=mask_of(allowed))
    assert set(tokens) == set(allowed)
    assert set(draws(any_backend, logits, 20, allowed=mask_of([130]))) == {130}


def test_the_draw_may_be_from_another_row(any_backend, rng):
    logits, other = rng.standard_normal((2, VOCABULARY), dtype=np.float32)
    assert draws(any_backend, logits, 50, draw_logits=other) == draws(any_backend, other, 50)
    drawn = greedy(any_backend, logits, draw_logits=other)
    assert drawn["top"][0][0] == logits.argmax()
    other[7] = np.nan
    invalid = greedy(any_backend, logits, draw_logits=other)
    assert not invalid["is_valid"]
    assert invalid["is_raw_valid"]


def test_a_forced_token_is_taken_whatever_else_says(any_backend, rng):
    logits = rng.standard_normal(VOCABULARY, dtype=np.float32)
    row = {"banned_token_ids": [9], "allowed": mask_of([3]), "forced_token_id": 9}
    drawn = greedy(any_backend, logits, **row)
    assert drawn["token_id"] == 9
    assert drawn["logprob"] == pytest.approx(formulas.log_softmax(logits)[9], abs=2e-6)
    logits[0] = np.nan
    assert not greedy(any_backend, logits, **row)["is_valid"]


def test_a_penalty_that_leaves_no_number_makes_the_row_invalid(any_backend):
    logits = np.array([3e38, 1.0], np.float32)
    drawn = greedy(any_backend, logits, counts=[(0, 1, True)], repetition_penalty=1e-30)
    assert not drawn["is_valid"]
    assert drawn["is_raw_valid"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"biases": [(131, 1.0)]},
            r"sample.rows.biases: expected token ids in \[0, 131\), got 131",
        ),
        ({"counts": [(-1, 1, False)]}, "sample.rows.counts: expected token ids"),
        ({"allowed": [1]}, "sample.rows.allowed: expected 5 entries, got 1"),
        ({"reported_token_ids": [131]}, "sample.rows.reported_token_ids: expected indices"),
        ({"forced_token_id": 131}, "sample.rows.forced_token_id: expected token ids"),
        ({"repetition_penalty": 0.0}, "sample.rows.repetition_penalty: expected a finite number"),
        ({"draw_logits": np.zeros(3, np.float32)}, "sample.rows.draw_logits"),
    ],
)
def test_a_bad_row_is_refused_by_field(any_backend, row, message):
    with pytest.raises(InvalidArgument, match=message):
        any_backend.sample(np.zeros((1, VOCABULARY), np.float32), [row])
