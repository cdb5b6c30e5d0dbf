"""Each file of tests has a name of its own: one process of pytest takes no two alike."""

from __future__ import annotations

import collections
from pathlib import Path

TESTS = Path(__file__).parents[2]


def test_no_two_files_of_tests_are_called_alike() -> None:
    counts = collections.Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in counts.items() if count > 1] == []
