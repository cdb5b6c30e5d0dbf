"""The simulator of speculation: known figures, trees against chains, formula against draws."""

from __future__ import annotations

import pytest
from llmserve.errors import InvalidArgument
from llmserve.sim.speculation import Speculation

PAIR = Speculation(acceptance=0.75, draft_ms=10, target_ms=40)


def test_chains_give_the_known_tokens_a_second() -> None:
    rates = [PAIR.chain(k).tokens_per_s for k in range(1, 7)]
    assert [round(rate, 2) for rate in rates] == [35.0, 38.54, 39.06, 38.13, 36.53, 34.66]
    assert PAIR.chain(0).tokens_per_s == 25
    assert PAIR.best_chain().num_drafted == 3
    assert PAIR.chain(3).tokens == pytest.approx((1 - 0.75**4) / (1 - 0.75))


def test_a_tree_of_two_branches_and_three_levels_has_eight_leaves() -> None:
    tree = Speculation((0.7, 0.2), draft_ms=10, target_ms=40).tree(2, 3)
    leaves = set(range(tree.num_drafted)) - set(tree.parents)
    assert (tree.num_drafted, len(leaves), tree.num_draft_passes) == (14, 8, 3)
    # A level is reached with 0.9 a level: one of two drafts is right.
    assert tree.num_accepted == pytest.approx(0.9 + 0.9**2 + 0.9**3)


def test_a_tree_accepts_more_a_round_than_a_chain_and_a_chosen_one_the_most() -> None:
    pair = Speculation((0.7, 0.2), draft_ms=10, target_ms=40)
    chain, tree = pair.chain(3), pair.tree(2, 3)
    chosen = pair.dynamic_tree(8, 3)
    assert chain.num_accepted < chosen.num_accepted < tree.num_accepted
    assert chosen.num_accepted / tree.num_accepted > 0.9  # with 8 drafts of 14
    assert pair.dynamic_tree(14, 3).num_accepted == pytest.approx(tree.num_accepted)
    assert pair.dynamic_tree(3, 3).num_accepted >= chain.num_accepted


@pytest.mark.parametrize("shape", ["chain", "tree", "dynamic"])
def test_drawn_rounds_give_what_the_formula_says(shape: str) -> None:
    pair = Speculation((0.6, 0.25), draft_ms=1, target_ms=4)
    drafted = {"chain": pair.chain(5), "tree": pair.tree(2, 3), "dynamic": pair.dynamic_tree(9, 4)}
    assert pair.simulate(drafted[shape], 50_000) == pytest.approx(drafted[shape].tokens, rel=0.01)


def test_rows_that_cost_time_make_trees_lose() -> None:
    cheap = Speculation((0.7, 0.2), draft_ms=2, target_ms=40)
    dear = Speculation((0.7, 0.2), draft_ms=2, target_ms=40, row_ms=6)
    assert cheap.tree().tokens_per_s > cheap.chain(3).tokens_per_s
    assert dear.tree().tokens_per_s < dear.chain(3).tokens_per_s


def test_a_drafter_that_is_never_right_is_best_left_out() -> None:
    assert Speculation(0.0, draft_ms=1, target_ms=10).best_chain().num_drafted == 0


def test_the_plot_has_a_curve_a_kind_and_the_plain_rate() -> None:
    pytest.importorskip("matplotlib")
    axes = Speculation((0.75, 0.1), draft_ms=10, target_ms=40).plot(6)
    chain, tree, plain = axes.get_lines()
    assert [round(y, 2) for y in chain.get_ydata()] == [35.0, 38.54, 39.06, 38.13, 36.53, 34.66]
    assert len(tree.get_ydata()) == 6
    assert list(plain.get_ydata()) == [25, 25]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"acceptance": 1.5}, "acceptance"),
        ({"acceptance": (0.8, 0.3)}, "acceptance"),
        ({"acceptance": ()}, "acceptance"),
        ({"draft_ms": -1}, "draft_ms"),
        ({"target_ms": 0}, "target_ms"),
        ({"row_ms": float("nan")}, "row_ms"),
    ],
)
def test_nonsense_is_refused_by_name(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        Speculation(**{"acceptance": 0.5, "draft_ms": 1, "target_ms": 2, **arguments})  # type: ignore[arg-type]


def test_shapes_that_cannot_be_are_refused_by_name() -> None:
    for call, named in (
        (lambda: PAIR.chain(-1), "num_tokens"),
        (lambda: PAIR.tree(0, 3), "num_branches"),
        (lambda: PAIR.tree(2, 40), "num_levels"),
        (lambda: PAIR.dynamic_tree(0), "num_tokens"),
    ):
        with pytest.raises(InvalidArgument, match=named):
            call()


@pytest.mark.parametrize(
    ("acceptance", "draft_ms", "target_ms", "row_ms", "most"),
    [
        ((0.83, 0.07, 0.02), 6.7, 67, 5.2, 1.001),  # 1.1 billion weights in bf16, two cores
        ((0.83, 0.07, 0.02), 2.7, 27, 4.4, 1.001),  # in int4
        ((0.83, 0.07, 0.02), 6.7, 67, 1.0, 1.03),
        ((0.6, 0.12, 0.05), 2, 67, 2.0, 1.045),
    ],
)
def test_the_best_tree_hardly_gains_over_the_best_chain_where_noise_is_shared(
    acceptance: tuple[float, ...], draft_ms: float, target_ms: float, row_ms: float, most: float
) -> None:
    """Why chains are the default: docs/decisions/trees-of-guesses.md."""
    pair = Speculation(acceptance, draft_ms=draft_ms, target_ms=target_ms, row_ms=row_ms)
    chain = pair.best_chain()
    trees = [pair.dynamic_tree(count, depth) for count in range(1, 33) for depth in range(1, 9)]
    gain = max(tree.tokens_per_s for tree in trees) / chain.tokens_per_s
    assert 1 <= gain <= most
    assert pair.tree(2, 3).tokens_per_s < chain.tokens_per_s
