"""Coverage-guided fuzzing of what is parsed in Python: `PYTHONPATH=python:tests python -m
fuzz.guided TARGET --seconds 600`.

An input that reaches a jump between two lines that no other has reached is kept and mutated
further, as libFuzzer does it with compiled code.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from fuzz.guided_targets import TARGETS, Target

_MAX_BYTES = 2048
# An input that takes longer is a finding: others take a few milliseconds. Processor time.
_MAX_S = 2.0


@dataclass
class Figures:
    """What a run did."""

    num_cases: int = 0
    num_kept: int = 0
    num_jumps: int = 0
    findings: list[str] = field(default_factory=list)


class Coverage:
    """Jumps between lines of some modules, of all runs so far."""

    def __init__(self, modules: Iterable[str]) -> None:
        self._modules = tuple(f"/{name.replace('.', '/')}" for name in modules)
        self._is_wanted: dict[CodeType, bool] = {}
        self.seen: set[tuple[CodeType, int, int]] = set()
        self._new = 0

    def run(self, call: Callable[[], object]) -> bool:
        """Whether the call has jumped where none has before."""
        self._new = 0
        sys.settrace(self._enter)
        try:
            call()
        finally:
            sys.settrace(None)
        return self._new > 0

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        wanted = self._is_wanted.get(code)
        if wanted is None:
            wanted = any(module in code.co_filename for module in self._modules)
            self._is_wanted[code] = wanted
        return self._tracer(code) if wanted else None

    def _tracer(self, code: CodeType) -> Any:
        last = 0

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal last
            if event == "line":
                jump = (code, last, frame.f_lineno)
                last = frame.f_lineno
                if jump not in self.seen:
                    self.seen.add(jump)
                    self._new += 1
            return trace

        return trace


def mutated(rng: random.Random, data: bytes, corpus: list[bytes], words: list[bytes]) -> bytes:
    """Another input: bytes changed, cut out or doubled, words of the target, parts of others."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1)
        end = min(at + rng.randrange(1, 17), len(out))
        kind = rng.randrange(7)
        if kind == 0 and out:
            out[at % len(out)] = rng.randrange(256)
        elif kind == 1:
            del out[at:end]
        elif kind == 2:
            out[at:at] = out[at:end] * rng.choice((1, 2, 8))
        elif kind == 3:
            out[at:at] = rng.choice(words)
        elif kind == 4:
            out[at:end] = rng.choice(words)
        else:
            other = rng.choice(corpus)
            begin = rng.randrange(len(other) + 1)
            out[at : at if kind == 5 else len(out)] = other[begin : begin + rng.randrange(1, 256)]
    return bytes(out[:_MAX_BYTES])


def fuzz(target: Target, num_cases: int, seconds: float, seed: int = 0) -> Figures:
    """Runs so many cases, or for so long, whichever ends first."""
    rng = random.Random(seed)
    corpus = list(target.seeds)
    words = [*target.words, *target.seeds]
    coverage = Coverage(target.modules)
    figures = Figures()
    end = time.monotonic() + seconds
    for data in _inputs(rng, corpus, words, num_cases):
        if time.monotonic() > end:
            break
        figures.num_cases += 1
        began = time.thread_time()
        try:
            is_new = coverage.run(lambda data=data: target.run(data))  # type: ignore[misc]
        except Exception as error:
            figures.findings.append(f"{target.name} {data!r}: {type(error).__name__}: {error}")
            continue
        took = time.thread_time() - began
        if took > _MAX_S:
            figures.findings.append(f"{target.name} {data!r}: takes {took:.1f} s")
        elif is_new:
            figures.num_kept += 1
            corpus.append(data)
    figures.num_jumps = len(coverage.seen)
    return figures


def _inputs(
    rng: random.Random, corpus: list[bytes], words: list[bytes], num_cases: int
) -> Iterator[bytes]:
    yield from list(corpus)
    for _ in range(num_cases):
        yield mutated(rng, rng.choice(corpus), corpus, words)


def main() -> int:
    """Prints the figures, and each finding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cases", type=int, default=2**62)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    figures = fuzz(TARGETS[options.target], options.cases, options.seconds, options.seed)
    print("\n".join(figures.findings[:20]))
    print(
        f"{options.target}, seed {options.seed}: {figures.num_cases} cases, {figures.num_kept} "
        f"kept, {figures.num_jumps} jumps, {len(figures.findings)} findings"
    )
    return bool(figures.findings)


if __name__ == "__main__":
    raise SystemExit(main())
