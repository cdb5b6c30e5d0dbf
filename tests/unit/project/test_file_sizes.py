"""A file of more than 600 lines is in this list, with the reason why it is not several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = ("csrc", "python", "tests", "benchmarks", "tools", "docs")
SUFFIXES = {".h", ".cpp", ".inc", ".cu", ".cuh", ".py", ".pyi", ".md", ".txt", ".sh"}
MAX_LINES = 600

REASONS = {
    "python/llmserve/_core.pyi": "one extension module has one stub",
    "python/llmserve/demo/calibration.txt": "texts of the demo model, one a line",
    "python/llmserve/demo/held_out.txt": "texts of the demo model, one a line",
    "tests/golden/outputs.py": "a script that is taken to another tree as one file",
}


def long_files() -> Iterator[str]:
    paths = [*ROOT.glob("*.md"), *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*"))]
    for path in paths:
        if path.suffix in SUFFIXES and path.read_bytes().count(b"\n") > MAX_LINES:
            yield path.relative_to(ROOT).as_posix()


def test_long_files_are_those_with_a_reason() -> None:
    assert set(long_files()) == set(REASONS)
