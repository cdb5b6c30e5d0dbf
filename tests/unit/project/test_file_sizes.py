"""A Python file of more than 600 lines says in its first docstring why it is longer than others."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = ("python", "tests", "benchmarks", "tools")
MAX_LINES = 600
REASON = "longer than"


def test_a_long_file_says_why_it_is_long() -> None:
    unexplained = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py*")):
            if path.suffix not in (".py", ".pyi"):
                continue
            text = path.read_text(encoding="utf-8")
            num_lines = text.count("\n")
            if num_lines > MAX_LINES and REASON not in (ast.get_docstring(ast.parse(text)) or ""):
                unexplained.append(f"{path.relative_to(ROOT)}: {num_lines} lines")
    assert unexplained == []
