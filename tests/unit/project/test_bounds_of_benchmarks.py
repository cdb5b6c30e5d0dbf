"""Bounds that benchmarks stand beside: sums worked out by hand, and measured rates."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from llmserve.bench.machine import ARITHMETICS, MachineProbe, Rates, arithmetic_of

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their modules, as benchmarks/peers/run.py finds them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))


# A server whose narrow arithmetic is faster, and one that has none.
FAST = Rates(
    40e9,
    {
        "float32": {"llmserve": 400e9, "oneDNN": 430e9},
        "bfloat16": {"llmserve": 650e9, "oneDNN": 850e9},
        "int8": {"llmserve": 1700e9, "oneDNN": 1600e9},
    },
)
WIDE = Rates(
    25e9,
    {
        "float32": {"llmserve": 180e9, "oneDNN": 190e9},
        "bfloat16": {"llmserve": 170e9, "oneDNN": 0.0},
    },
)


@pytest.mark.parametrize(
    ("rates", "form", "best"),
    [
        (FAST, "float32", (430e9, "float32", "oneDNN")),
        (FAST, "bfloat16", (850e9, "bfloat16", "oneDNN")),
        (FAST, "int8", (1700e9, "int8", "llmserve")),
        (FAST, "int4", (1700e9, "int8", "llmserve")),
        (WIDE, "bfloat16", (190e9, "float32", "oneDNN")),
    ],
)
def test_a_formats_rate_is_the_best_of_every_arithmetic_that_holds_its_values(
    rates: Rates, form: str, best: tuple[float, str, str]
) -> None:
    assert rates.best_gemm(form) == best


def test_the_larger_of_bytes_and_operations_bounds() -> None:
    assert FAST.bound_s(40e9, 850e9 * 0.5, "bfloat16") == 1
    assert FAST.bound_s(40e9, 850e9 * 3, "bfloat16") == 3
    assert FAST.bound_s(40e9, 1700e9 * 3, "int4") == 3


def test_a_bound_names_the_rate_that_it_comes_from() -> None:
    assert FAST.limit(40e9, 850e9 * 0.5, "bfloat16") == "40.0 GB/s"
    assert FAST.limit(40e9, 850e9 * 3, "bfloat16") == "850 GFLOP/s in bfloat16 (oneDNN)"
    assert FAST.limit(40e9, 1700e9 * 3, "int4") == "1,700 GOP/s in int8 (llmserve)"


def test_rates_name_each_arithmetic_once_and_whose_product_it_was() -> None:
    assert FAST.text(["bfloat16", "int8", "int4"]) == (
        "reads 40.0 GB/s and does 850 GFLOP/s in bfloat16 (oneDNN) "
        "and 1,700 GOP/s in int8 (llmserve)"
    )
    assert WIDE.text(["bfloat16"]) == (
        "reads 25.0 GB/s and does 190 GFLOP/s in bfloat16 (float32 of oneDNN)"
    )


def test_a_probe_measures_what_a_format_needs_and_whatever_is_wider() -> None:
    asked = []

    def other(arithmetic: str) -> float:
        asked.append(arithmetic)
        return 1.0

    probe = MachineProbe(1, ["float32", "bfloat16"], {"other": other})
    probe.measure()
    rates = probe.rates()
    assert asked == ["float32", "bfloat16"]
    assert list(rates.gemm_ops_per_s) == asked
    assert rates.read_bytes_per_s > 0
    for by_source in rates.gemm_ops_per_s.values():
        assert by_source["other"] == 1
        assert by_source["llmserve"] > 1


def test_formats_of_integers_share_an_arithmetic() -> None:
    assert [arithmetic_of(form) for form in (*ARITHMETICS, "int4", "int4-g32")] == [
        *ARITHMETICS,
        "int8",
        "int8",
    ]


# Linear parameters of a layer, of the head; attention operations a token and position, of the KV
# cache bytes a position in bfloat16.
TINYLLAMA = {
    "body": 22 * (2 * 2048 * 2048 + 2 * 2048 * 256 + 3 * 2048 * 5632) + 45 * 2048,
    "head": 2048 * 32_000,
    "attention": 4 * 22 * 32 * 64,
    "kv": 2 * 22 * 4 * 64 * 2,
}
SIZES = {"float32": 4, "bfloat16": 2, "int8": 1, "int4": 0.5 + 2 / 128}


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("form", SIZES)
def test_a_prompt_is_bound_by_operations_in_every_format(form: str) -> None:
    from random_models import SHAPES
    from workloads import Workload

    num_ops = 2 * (TINYLLAMA["body"] * 512 + TINYLLAMA["head"])
    num_ops += TINYLLAMA["attention"] * 512 * 513 // 2
    bound_s = Workload("prompt", (512,), (1,)).bound_s(SHAPES["tinyllama-1.1b"], form, FAST)
    assert bound_s == pytest.approx(num_ops / FAST.best_gemm(form)[0], rel=1e-12)


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("form", SIZES)
def test_decoding_is_bound_by_the_weights_and_the_cache_at_the_mean_context(form: str) -> None:
    from random_models import SHAPES
    from workloads import Workload

    kv = TINYLLAMA["kv"] * (2 if form == "float32" else 1)
    num_bytes = 127 * (SIZES[form] * (TINYLLAMA["body"] + TINYLLAMA["head"]) + kv * (512 + 64))
    work = Workload("decode", (512,), (128,), is_decode=True)
    bound_s = work.bound_s(SHAPES["tinyllama-1.1b"], form, FAST)
    assert bound_s == pytest.approx(num_bytes / 40e9, rel=1e-12)


@pytest.mark.usefixtures("peers")
def test_a_shared_prefix_is_computed_once() -> None:
    from random_models import SHAPES
    from workloads import Workload

    num_tokens = 512 + 16 * 32 + 16 * 31
    num_ops = 2 * (TINYLLAMA["body"] * num_tokens + TINYLLAMA["head"] * 16 * 32)
    positions = 512 * 513 // 2 + 16 * sum(range(513, 513 + 32 + 31))
    num_ops += TINYLLAMA["attention"] * positions
    work = Workload("shared", (544,) * 16, (32,) * 16, num_shared=512)
    bound_s = work.bound_s(SHAPES["tinyllama-1.1b"], "int8", FAST)
    assert bound_s == pytest.approx(num_ops / 1700e9, rel=1e-12)


@pytest.mark.usefixtures("peers")
def test_products_of_torch_answer_for_every_arithmetic() -> None:
    pytest.importorskip("torch")
    from torch_gemm import TorchGemm

    gemm = TorchGemm(sys.executable, 1, (16, 64, 32))
    try:
        rates = {name: gemm(name) for name in ARITHMETICS}
    finally:
        gemm.close()
    assert rates["float32"] > 0
    assert all(rate >= 0 for rate in rates.values())
