"""The sampling op: filters, draws and reports of every backend that can run here."""

import numpy as np
import op_formulas as formulas
import pytest

# Chi-square statistics above this come up once in 10^6 runs at 19 degrees of freedom; the seeds are
# fixed, so that the tests either always pass or never.
CHI_SQUARE_19 = 66.0
LOGPROB_TOLERANCE = 2e-6


def draws(backend, logits, count, **params):
    """`count` tokens drawn at consecutive positions."""
    batch = np.ascontiguousarray(np.broadcast_to(logits, (count, logits.size)))
    rows = [{"seed": 5, "position": i, **params} for i in range(count)]
    return np.array([row["token_id"] for row in backend.sample(batch, rows)])


def chi_square(tokens, probabilities):
    counts = np.bincount(tokens, minlength=probabilities.size)
    expected = probabilities * len(tokens)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    return (((counts - expected) ** 2)[kept] / expected[kept]).sum()


@pytest.mark.parametrize(
    "params",
    [
        *({}, {"temperature": 2.5}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1}),
        {"top_n_sigma": 1.0, "temperature": 2.5},
    ],
)
def test_draws_follow_the_filtered_distribution(any_backend, rng, params):
    logits = rng.standard_normal(20, dtype=np.float32)
    z = logits.astype(np.float64) / params.get("temperature", 1.0)
    p = np.exp(z - z.max())
    kept = sorted(formulas.kept_tokens(logits, **params))
    p[np.setdiff1d(np.arange(20), kept)] = 0
    assert chi_square(draws(any_backend, logits, 10_000, **params), p / p.sum()) < CHI_SQUARE_19


@pytest.mark.parametrize("vocabulary", [5, 129, 4099])
@pytest.mark.parametrize(
    "params",
    [
        *({"top_k": 3}, {"top_k": 50}, {"top_p": 0.5}, {"top_p": 0.97}, {"min_p": 0.2}),
        *({"top_k": 20, "top_p": 0.7, "min_p": 0.01, "temperature": 1.5}, {"top_p": 1e-9}),
        *({"top_n_sigma": 1.5}, {"top_n_sigma": 0.01}, {"top_n_sigma": 1.2, "top_p": 0.8}),
    ],
)
def test_every_token_drawn_passes_the_filters(fast, ref, rng, vocabulary, params):
    logits = rng.standard_normal(vocabulary, dtype=np.float32) * 2
    kept = formulas.kept_tokens(logits, **params)
    tokens = draws(fast, logits, 300, **params)
    assert set(tokens.tolist()) <= kept
    if len(kept) <= 3:
        assert set(tokens.tolist()) == kept
    np.testing.assert_array_equal(tokens[:50], draws(ref, logits, 50, **params))


def test_top_n_sigma_counts_finite_logits_alone_and_not_the_temperature(any_backend):
    # Of 0, 1, …, 9 the standard deviation is 2.872: one of them is 6.128 from 9.
    logits = np.array([-np.inf, *range(10), -np.inf], np.float32)
    for temperature in (0.5, 1.0, 1000.0):
        tokens = draws(any_backend, logits, 500, top_n_sigma=1.0, temperature=temperature)
        assert set(tokens.tolist()) <= {8, 9, 10}
    assert set(tokens.tolist()) == {8, 9, 10}
    # What is more than 1,024 below the largest counts as if it were that, so that sums have room.
    logits = np.array([0.0, -500.0, -1e30], np.float32)
    tokens = draws(any_backend, logits, 500, top_n_sigma=1.2, temperature=1000.0)
    assert set(tokens.tolist()) == {0, 1}  # 1.2 deviations are 502


def test_seeds_and_positions_draw_apart(any_backend, rng):
    logits = np.zeros((64, 1000), np.float32)
    rows = [{"seed": s, "position": p} for s in (1, 2**40 + 1) for p in range(32)]
    tokens = [row["token_id"] for row in any_backend.sample(logits, rows)]
    assert len(set(tokens)) > 58  # 64 draws of 1,000: two collisions are expected


def test_ties_go_to_the_lowest_id_and_stay_in_top_k(any_backend):
    logits = np.array([1, 3, 3, 0, 3], np.float32)
    (greedy,) = any_backend.sample(logits[None], [{"temperature": 0.0, "num_top": 4}])
    assert greedy["token_id"] == 1
    assert [(token, rank) for token, _, rank in greedy["top"]] == [(1, 1), (2, 1), (4, 1), (0, 4)]
    assert set(draws(any_backend, logits, 200, top_k=2).tolist()) == {1, 2, 4}
    assert set(draws(any_backend, logits, 200, top_p=0.01).tolist()) == {1, 2, 4}


def test_banned_tokens_are_never_drawn_but_keep_their_logprobs(any_backend, rng):
    logits = rng.standard_normal(40, dtype=np.float32)
    best = np.argsort(-logits)
    row = {"temperature": 0.0, "banned_token_ids": [int(best[0]), 99, -3], "num_top": 1}
    (drawn,) = any_backend.sample(logits[None], [row])
    assert drawn["token_id"] == best[1]
    assert drawn["rank"] == 2
    assert drawn["top"][0][0] == best[0]
    assert drawn["logprob"] == pytest.approx(
        formulas.log_softmax(logits)[best[1]], abs=LOGPROB_TOLERANCE
    )
    tokens = draws(any_backend, logits, 300, banned_token_ids=best[:38].tolist(), top_k=1)
    assert set(tokens.tolist()) == {int(best[38])}


@pytest.mark.parametrize("place", [0, 100, 129])
def test_logits_that_are_not_numbers_make_the_row_invalid(any_backend, rng, place):
    logits = rng.standard_normal((4, 130), dtype=np.float32)
    logits[0, place] = np.nan
    logits[1, place] = np.inf
    logits[2] = -np.inf
    logits[3, place] = -np.inf  # masked: fine
    rows = [{"num_top": 2, "temperature": t} for t in (0.0, 1.0, 1.0, 1.0)]
    assert [row["is_valid"] for row in any_backend.sample(logits, rows)] == [
        False,
        False,
        False,
        True,
    ]
    banned = {"banned_token_ids": list(range(130))}
    assert not any_backend.sample(logits[3:], [banned])[0]["is_valid"]


def test_extreme_logits_and_temperatures_draw_the_best(any_backend):
    logits = np.array([[-3e38, 3e38, 0.0], [0.0, 1e-3, -1e30]], np.float32)
    rows = [{"temperature": 1e-5, "position": 1}, {"temperature": 1e-5, "top_p": 0.5}]
    assert [row["token_id"] for row in any_backend.sample(logits, rows)] == [1, 1]


def test_logprobs_match_a_float64_log_softmax_of_a_large_vocabulary(any_backend, rng):
    logits = rng.standard_normal((1, 70_001), dtype=np.float32) * 4
    (row,) = any_backend.sample(logits, [{"num_top": 20, "temperature": 0.0}])
    expected = formulas.log_softmax(logits)[0]
    order = np.argsort(-logits[0], kind="stable")[:20]
    assert [token for token, _, _ in row["top"]] == order.tolist()
    got = [logprob for _, logprob, _ in row["top"]]
    np.testing.assert_allclose(got, expected[order], atol=LOGPROB_TOLERANCE)


def test_top_is_capped_by_the_vocabulary(any_backend):
    (row,) = any_backend.sample(np.zeros((1, 3), np.float32), [{"num_top": 9, "temperature": 0.0}])
    assert [token for token, _, _ in row["top"]] == [0, 1, 2]
    (row,) = any_backend.sample(np.zeros((1, 3), np.float32), [{"num_top": 0, "temperature": 0.0}])
    assert row["top"] == []
    assert row["logprob"] == pytest.approx(-np.log(3))
