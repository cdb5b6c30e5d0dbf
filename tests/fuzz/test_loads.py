"""Mutated files of every kind, loaded in a process of their own: each is taken or refused by a
typed error, in bounded time and memory, and what is nonsense is not taken."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz.kinds import KINDS, write_seeds
from fuzz.run_loads import LoadWorker, run_loads

CASES = 1000
LONG_CASES = 1_000_000


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("seeds")
    write_seeds(directory)
    return directory


def cases(count: int, begin: int) -> list[tuple[str, int]]:
    return [(kind, begin + i) for i in range(count // len(KINDS) + 1) for kind in KINDS]


@pytest.mark.parametrize("kind", KINDS)
def test_the_good_file_that_is_mutated_is_taken(kind: str, seeds: Path) -> None:
    KINDS[kind].load(seeds / kind)


def test_mutated_files_are_taken_or_refused(seeds: Path) -> None:
    figures = run_loads(seeds, cases(CASES, 0), num_workers=2)
    assert figures.findings == []
    # The mutations are neither too mild nor too wild; of a vocabulary few changes are good ones.
    for outcome, never in (("loaded", {"vocab"}), ("refused", set())):
        met = {kind for kind in KINDS if figures.outcomes[f"{kind} {outcome}"]}
        assert met >= KINDS.keys() - never, figures


@pytest.mark.long
def test_a_million_mutated_files_are_taken_or_refused(seeds: Path) -> None:
    figures = run_loads(seeds, cases(LONG_CASES, CASES), num_workers=2)
    assert figures.findings == [], figures


def test_a_case_that_ends_its_process_is_a_finding(seeds: Path, tmp_path: Path) -> None:
    worker = LoadWorker(seeds, tmp_path / "errors")
    try:
        answer = worker.run("no-such-kind", 0)
        assert "the process ended with" in str(answer["finding"])
        assert "KeyError: 'no-such-kind'" in str(answer["finding"])
        assert worker.run("tiktoken", 0)["finding"] is None
    finally:
        worker.close()
