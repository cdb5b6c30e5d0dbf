"""Runs the benchmarks: `pytest benchmarks`, each row printed as it is measured and kept as JSON.

Every figure stands beside what this machine can do, measured in the same run between the
measurements, so that whatever else the machine does slows both alike. Nothing asserts a speed;
results are checked for being right before they are timed.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from llmserve.bench.machine import describe_machine


def pytest_addoption(parser):
    group = parser.getgroup("benchmarks")
    group.addoption("--threads", type=int, default=2, help="threads of the CPU (default 2)")
    group.addoption("--isa", default="", help="as LLMSERVE_CPU_ISA, or all (default: the best)")
    group.addoption("--repeats", type=int, default=5, help="measurements a row (default 5)")
    group.addoption("--cases", default="", metavar="TEXT", help="only rows whose name has TEXT")
    group.addoption("--model", help="checkpoint directory of bench_engine (default: the demo)")
    group.addoption("--results", metavar="FILE", help="write every row to FILE as JSON")


class Board:
    """The rows measured so far; shows each as it comes."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._rows: list[dict[str, object]] = []
        self._shown: tuple[str, ...] = ()

    def add(
        self, name: str, figures: Mapping[str, float], details: Mapping[str, object] | None = None
    ) -> None:
        """One row: figures by name, in the units that the names end in; shares as fractions.

        Details are written and not shown.
        """
        self._rows.append({"name": name, **figures, **(details or {})})
        if tuple(figures) != self._shown:
            self._shown = tuple(figures)
            self._say(" " * 58 + "".join(f"{key:>{_width(key)}}" for key in figures))
        cells = (f"{_cell(key, value):>{_width(key)}}" for key, value in figures.items())
        self._say(f"{name:<58}" + "".join(cells))

    def write(self) -> None:
        """The JSON that --results asked for."""
        path = self._config.getoption("--results")
        if path and self._rows:
            report = {
                "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
                "machine": describe_machine(),
                "repeats": self._config.getoption("--repeats"),
                "rows": self._rows,
            }
            Path(path).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    def _say(self, line: str) -> None:
        capture = self._config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            print("\n" + line, end="", flush=True)


def _width(key: str) -> int:
    return max(len(key) + 2, 10)


def _cell(key: str, value: float) -> str:
    if key.startswith("share"):
        return f"{value:.0%}" if value >= 0.1 else f"{value:.2%}"
    return f"{value:,.4g}"


@pytest.fixture(scope="session")
def board(request):
    board = Board(request.config)
    yield board
    board.write()


@pytest.fixture(scope="session")
def threads(request):
    return request.config.getoption("--threads")


@pytest.fixture(scope="session")
def repeats(request):
    return request.config.getoption("--repeats")
