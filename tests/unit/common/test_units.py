"""Sizes and rates, as people write them."""

from __future__ import annotations

import pytest
from llmserve import InvalidArgument
from llmserve.common.units import human_bytes, parse_bandwidth, parse_bytes, parse_flops


def test_sizes_are_written_for_people() -> None:
    sizes = [0, 1023, 1024, 1536 * 1024, 3 * 2**30, 2**42]
    shown = [human_bytes(size) for size in sizes]
    assert shown == ["0 B", "1023 B", "1.0 KiB", "1.5 MiB", "3.0 GiB", "4.0 TiB"]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("123", 123),
        ("140GB", 140 * 10**9),
        ("80GiB", 80 * 2**30),
        ("4x80GiB", 4 * 80 * 2**30),
        ("1.5 MiB", 3 * 2**19),
        ("2k", 2000),
        ("7b", 7),
    ],
)
def test_a_size_is_read(text: str, want: int) -> None:
    assert parse_bytes("memory", text) == want


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e9", "4x", "0GB", "1iB", "3.35TB/s", "x80GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^memory must be a size such as"):
        parse_bytes("memory", text)


def test_rates_are_read() -> None:
    assert parse_bandwidth("bandwidth", "3.35TB/s") == 3.35e12
    assert parse_flops("flops", "312 TFLOP/s") == parse_flops("flops", "312T") == 312e12
    with pytest.raises(InvalidArgument, match=r"bandwidth such as 3\.35TB/s, got '5 mph'"):
        parse_bandwidth("bandwidth", "5 mph")
    with pytest.raises(InvalidArgument, match="rate such as 312TFLOP/s"):
        parse_flops("flops", "fast")
