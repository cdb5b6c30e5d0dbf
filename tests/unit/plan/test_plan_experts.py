"""The arithmetic of experts: what is read, how even it is, how much room a share takes."""

import random

import pytest
from checkpoints import checkpoint
from llmserve import LLM
from llmserve.errors import InvalidArgument
from llmserve.plan import active_experts, expert_capacity, load_balance, replicas_needed


def test_active_experts_are_what_uniform_draws_give() -> None:
    rng = random.Random(0)
    n, k, tokens, trials = 16, 3, 5, 4000
    seen = sum(
        len({e for _ in range(tokens) for e in rng.sample(range(n), k)}) for _ in range(trials)
    )
    assert active_experts(n, k, tokens) == pytest.approx(seen / trials, rel=0.01)
    assert active_experts(n, k, 0) == 0
    assert active_experts(n, n, 1) == n


def test_capacity_and_replicas_leave_no_row_out() -> None:
    rng = random.Random(1)
    for _ in range(200):
        n, k, tokens = rng.randint(1, 64), 1, rng.randint(0, 300)
        loads = [0] * n
        for _ in range(tokens * k):
            loads[min(int(rng.expovariate(0.3)), n - 1)] += 1
        capacity = max(1, expert_capacity(n, k, tokens, 1.3))
        assert capacity * n >= tokens * k
        for load, copies in zip(loads, replicas_needed(loads, capacity), strict=True):
            assert copies * capacity >= load > (copies - 1) * capacity or load == copies == 0


def test_balance_is_the_busiest_over_the_mean() -> None:
    assert load_balance([5, 5, 5]) == 1
    assert load_balance([9, 0, 0]) == 3
    assert load_balance([0, 0]) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda: active_experts(4, 5, 1),
        lambda: active_experts(0, 1, 1),
        lambda: expert_capacity(4, 2, 10, 0.9),
        lambda: expert_capacity(4, 2, -1),
        lambda: replicas_needed([1], 0),
        lambda: replicas_needed([-1], 1),
    ],
)
def test_what_no_router_gives_is_refused(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises((InvalidArgument, ValueError)):
        call()


def test_the_plan_counts_the_experts_that_a_token_is_given() -> None:
    path = checkpoint("olmoe", num_experts=16, num_experts_per_tok=4)
    plan = LLM.plan(path, num_gpu_blocks_override=64, contexts=[32], bandwidth=1e9, max_num_seqs=8)
    size = {group.name: group.num_bytes for group in plan.weights}
    others = sum(size[name] for name in ("attention", "mlp", "norm", "lm_head"))
    kv = 32 * plan.kv_bytes_per_token
    (row,) = plan.speed
    assert row.one_user_tokens_per_s == pytest.approx(1e9 / (others + size["experts"] / 4 + kv))
    read = others + size["experts"] * active_experts(16, 4, row.batch) / 16
    assert row.all_users_tokens_per_s == pytest.approx(row.batch * 1e9 / (read + row.batch * kv))
