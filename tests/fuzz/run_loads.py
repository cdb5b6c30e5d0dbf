"""Runs cases of load_worker.py and says what they found. A finding is a process that ends or takes
longer than HANG_S, a load that takes more than MAX_BYTES, an error of no class of llmserve's, or a
file that was taken and must not be.

By hand, in the long form: PYTHONPATH=python:tests python tests/fuzz/run_loads.py --cases 1000000
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fuzz.kinds import KINDS, write_seeds

HANG_S = 10.0
MAX_BYTES = 2**30
_START_S = 60.0  # of a worker, beside other load


class LoadWorker:
    """A process that loads; a new one after a case that ended the old one."""

    def __init__(self, seeds: Path, errors: Path) -> None:
        self._seeds = seeds
        self._errors = errors
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, kind: str, seed: int) -> dict[str, object]:
        """What came of a case; "finding" is None or text."""
        limit = HANG_S
        if self._process is None:
            self._process = self._start()
            limit += _START_S
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{kind} {seed}\n".encode())
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], limit)
        line = process.stdout.readline() if ready else b""
        if not line:
            self.close()
            code = process.returncode
            finding = f"the process ended with {code}" if ready else f"no end in {HANG_S:.0f} s"
            tail = self._errors.read_text(errors="replace")[-1500:]
            return {"outcome": "lost", "finding": f"{finding}: {tail}", "seconds": 0, "bytes": 0}
        answer: dict[str, object] = json.loads(line)
        num_bytes = answer["bytes"]
        assert isinstance(num_bytes, int)
        if answer["finding"] is None and num_bytes > MAX_BYTES:
            answer["finding"] = f"took {num_bytes} bytes"
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(Path(__file__).with_name("load_worker.py"))]
        with self._errors.open("wb") as errors:
            return subprocess.Popen(
                [*command, str(self._seeds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@dataclass
class Figures:
    """What came of many cases."""

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    findings: list[str] = field(default_factory=list)
    max_seconds: float = 0.0
    max_bytes: int = 0

    def add(self, kind: str, seed: int, answer: dict[str, object]) -> None:
        """One case."""
        self.outcomes[f"{kind} {answer['outcome']}"] += 1
        self.max_seconds = max(self.max_seconds, float(str(answer["seconds"])))
        self.max_bytes = max(self.max_bytes, int(str(answer["bytes"])))
        if answer["finding"] is not None:
            self.findings.append(f"{kind} {seed}: {answer['finding']}")

    def __str__(self) -> str:
        lines = [f"{name:34}{count:9}" for name, count in sorted(self.outcomes.items())]
        return "\n".join(
            [
                *lines,
                f"{self.outcomes.total()} loads, {len(self.findings)} findings, at most "
                f"{self.max_seconds:.1f} s and {self.max_bytes / 1e6:.0f} MB a load",
            ]
        )


def run_loads(seeds: Path, cases: Iterable[tuple[str, int]], num_workers: int = 1) -> Figures:
    """Runs the cases, each a kind and a seed."""
    figures, lock = Figures(), threading.Lock()
    rest: Iterator[tuple[str, int]] = iter(cases)

    def work(idx: int) -> None:
        worker = LoadWorker(seeds, seeds / f"errors {idx}")
        try:
            while True:
                with lock:
                    case = next(rest, None)
                if case is None:
                    return
                answer = worker.run(*case)
                with lock:
                    figures.add(*case, answer)
        finally:
            worker.close()

    threads = [threading.Thread(target=work, args=(idx,)) for idx in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return figures


def main() -> None:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--begin", type=int, default=0, help="the first seed")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="then it stops")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    count = arguments.cases // len(arguments.kinds)
    cases = (
        (kind, seed)
        for seed in range(arguments.begin, arguments.begin + count)
        for kind in arguments.kinds
        if time.monotonic() < deadline
    )
    with tempfile.TemporaryDirectory() as directory:
        seeds = Path(directory)
        write_seeds(seeds)
        figures = run_loads(seeds, cases, arguments.workers)
    print(*figures.findings, sep="\n")
    print(figures)
    sys.exit(1 if figures.findings else 0)


if __name__ == "__main__":
    main()
