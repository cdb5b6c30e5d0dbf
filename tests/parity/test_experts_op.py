"""Routers, and the sums of what experts give: every instruction set has the bits of ref."""

import numpy as np
import op_formulas as formulas
import pytest
from llmserve.errors import InvalidArgument
from test_grouped_linear import FORMATS, normal, pack

# Of exp, of a division, and of a sum of at most 70 numbers below 1.
WEIGHT_TOLERANCE = 1e-5

ROUTERS = {
    "softmax": {},
    "softmax-normalised": {"normalises": True},
    "softmax-groups": {"num_groups": 5, "top_groups": 2, "scale": 16.0},
    "softmax-floor": {"normalises": True, "sum_floor": 0.9},
    "sigmoid": {"score": "sigmoid", "normalises": True, "sum_eps": 1e-6},
    "sigmoid-groups": {
        "score": "sigmoid",
        "num_groups": 5,
        "top_groups": 3,
        "group_top": 2,
        "normalises": True,
        "sum_eps": 1e-20,
        "scale": 2.5,
    },
    "softmax_of_chosen": {"score": "softmax_of_chosen"},
    "sigmoid_of_chosen": {"score": "sigmoid_of_chosen"},
    "sparsemixer": {"score": "sparsemixer", "jitter": 0.3},
}


def route(backend, logits, k, **options):
    ids = np.full((len(logits), k), -7, np.int32)
    weights = np.full((len(logits), k), np.nan, np.float32)
    backend.route_experts(logits, ids, weights, **options)
    return ids, weights


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def best(x, k):
    """The k largest, ties to the lower index."""
    return np.argsort(-x, kind="stable")[:k]


def routed(logits, k, options, bias, scales):
    """One token in float64, as ops.h has it."""
    x = logits.astype(np.float64)
    score = options.get("score", "softmax")
    if score == "sparsemixer":
        left, ids, weights = x.copy(), [], []
        for _ in range(k):
            top = left.max()
            is_far = (top - x) / np.maximum(np.abs(x), top) > 2 * options["jitter"]
            ids.append(int(np.argmax(left)))
            weights.append(softmax(np.where(is_far, -np.inf, left))[ids[-1]])
            left[ids[-1]] = -np.inf
        ids, weights = np.array(ids), np.array(weights)
    else:
        scores = {"softmax": softmax, "sigmoid": sigmoid}.get(score, lambda x: x)(x)
        choice = scores + (0 if bias is None else bias)
        num_groups = options.get("num_groups", 1)
        groups = choice.reshape(num_groups, -1)
        of_group = np.sort(groups, axis=1)[:, -options.get("group_top", 1) :].sum(axis=1)
        for g in set(range(num_groups)) - set(best(of_group, options.get("top_groups", 1))):
            groups[g] = -np.inf
        ids = best(choice, k)
        weights = scores[ids]
        if score.endswith("of_chosen"):
            weights = softmax(weights) if score.startswith("softmax") else sigmoid(weights)
    if options.get("normalises"):
        total = max(weights.sum(), options.get("sum_floor", 0))
        weights = weights / (total + options.get("sum_eps", 0))
    weights = weights * options.get("scale", 1.0)
    return ids, weights * (1 if scales is None else scales[ids])


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 10, 3), (70, 65, 6), (3, 5, 2)])
@pytest.mark.parametrize("has_extras", [False, True])
def test_routers_agree_with_their_formula_and_with_ref(
    ref, fast, rng, name, tokens, experts, k, has_extras
):
    options = dict(ROUTERS[name])
    if experts // options.get("num_groups", 1) < options.get("group_top", 1):
        options["group_top"] = 1
    logits = normal(rng, tokens, experts + 3)[:, :experts]
    bias = 3 * normal(rng, experts) if has_extras and name != "sparsemixer" else None
    scales = normal(rng, experts) if has_extras else None
    extras = {"choice_bias": bias, "expert_scales": scales}
    ids, weights = route(fast, logits, k, **options, **extras)
    ref_ids, ref_weights = route(ref, logits, k, **options, **extras)
    np.testing.assert_array_equal(ids, ref_ids)
    # Without fused multiply-adds an exponential may be off by one in its last place.
    rtol = WEIGHT_TOLERANCE if formulas.isa_of(fast) == "generic" else 0
    np.testing.assert_allclose(weights, ref_weights, rtol=rtol, atol=0)
    for t in range(tokens):
        own_ids, own_weights = routed(logits[t], k, options, bias, scales)
        np.testing.assert_array_equal(ids[t], own_ids)
        np.testing.assert_allclose(weights[t], own_weights, rtol=WEIGHT_TOLERANCE)
        alone = route(fast, logits[t : t + 1], k, **options, **extras)
        np.testing.assert_array_equal(alone[1][0], weights[t])


@pytest.mark.parametrize("name", ROUTERS)
def test_ties_go_to_the_lower_expert_and_what_is_not_finite_to_valid_ones(fast, name):
    options = ROUTERS[name]
    ids, _ = route(fast, np.zeros((1, 20), np.float32), 4, **options)
    np.testing.assert_array_equal(ids, [[0, 1, 2, 3]])
    logits = np.zeros((3, 20), np.float32)
    logits[0, 3], logits[1], logits[2, 5] = np.nan, np.nan, np.inf
    ids, weights = route(fast, logits, 4, **options)
    assert ((ids >= 0) & (ids < 20)).all()
    assert np.isnan(weights[1]).any()


def test_what_is_wrong_with_a_router_is_named(fast):
    logits = np.zeros((2, 6), np.float32)
    for k, options, match in [
        (7, {}, r"route_experts\.ids: expected 1 to 6"),
        (3, {"num_groups": 3, "top_groups": 1}, r"route_experts\.ids: expected 1 to 2"),
        (2, {"num_groups": 4}, r"num_groups: expected a divisor of X=6"),
        (2, {"num_groups": 2, "top_groups": 3}, r"top_groups: expected 1 to 2"),
        (2, {"num_groups": 6, "group_top": 2, "top_groups": 6}, r"group_top: "),
        (2, {"scale": np.inf}, r"scale: expected a finite number"),
        (2, {"choice_bias": np.zeros(5, np.float32)}, r"choice_bias"),
    ]:
        with pytest.raises(InvalidArgument, match=match):
            route(fast, logits, k, **options)


@pytest.mark.parametrize("width", [1, 33, 256])
@pytest.mark.parametrize("k", [1, 3])
def test_outputs_add_up_in_order_of_slots(ref, fast, rng, width, k):
    x = normal(rng, 5 * k, width + 2)[:, :width]
    weights = normal(rng, 5, k)
    if k > 1:
        weights[2, 1] = 0
        x[2 * k + 1] = np.nan  # which nobody reads
    out = fast.combine_experts(x, weights)
    atol = formulas.sum_tolerance(k) * 8
    expected = ref.combine_experts(x, weights)
    if formulas.isa_of(fast) == "generic":  # without fused multiply-adds
        np.testing.assert_allclose(out, expected, atol=atol)
    else:
        np.testing.assert_array_equal(out, expected)
    rows = np.nan_to_num(x.astype(np.float64)).reshape(5, k, width)
    expected = (rows * weights[:, :, None]).sum(axis=1)
    np.testing.assert_allclose(out, expected, atol=atol)
    old = normal(rng, 5, width)
    added = fast.combine_experts(x, weights, old.copy(), accumulate=True)
    np.testing.assert_array_equal(added, old + out)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 40])
def test_fused_experts_have_the_bits_of_the_ops(fast, rng, name, tokens):
    hidden, width, experts, k = 256, 256, 6, 3
    up = [pack(fast, normal(rng, 2 * width, hidden) / 16, name) for _ in range(experts)]
    down = [pack(fast, normal(rng, hidden, width) / 16, name) for _ in range(experts)]
    up_bias, down_bias = normal(rng, experts, 2 * width), normal(rng, experts, hidden)
    x = normal(rng, tokens, hidden)
    ids, weights = route(fast, normal(rng, tokens, experts), k)
    if tokens > 1:
        ids[7, 1], weights[7, 1] = -1, 0
    rows = ids.reshape(-1)
    old = normal(rng, tokens, hidden)
    gate_up = fast.grouped_linear(
        x, up, rows, up_bias, np.zeros((len(rows), 2 * width), np.float32)
    )
    activated = fast.gated_activation(gate_up, "swiglu_oai")
    given = fast.grouped_linear(
        activated, down, rows, down_bias, np.zeros((len(rows), hidden), np.float32)
    )
    expected = fast.combine_experts(given, weights, old.copy(), accumulate=True)
    out = fast.fused_experts(
        x, up, down, rows, weights, up_bias, down_bias, "swiglu_oai", old.copy()
    )
    np.testing.assert_array_equal(out, expected)
