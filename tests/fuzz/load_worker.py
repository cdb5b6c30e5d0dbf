"""Loads mutated files, a case a line of its input: the kind and the seed. It answers with a line of
JSON a case; what it does not answer has ended or hung it.

By hand, to see one case again: python tests/fuzz/load_worker.py SEEDS KIND SEED [FILE]
writes the mutated file to FILE and loads it.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

_ADDRESS_BYTES = 24 * 2**30  # an allocation beyond what any file may ask for fails
_RENDER_S = 0.5  # of a template: the limit as shipped, 5 s, is tested by itself


def peak_bytes() -> int:
    """The most memory since the last call, in bytes."""
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return int(peak.split()[1]) * 1024


class Loader:
    """Writes the case's files over those of a good checkpoint."""

    def __init__(self, seeds: Path, directory: Path) -> None:
        self._seeds = seeds
        self._directory = directory

    def mutated(self, kind_name: str, seed: int) -> tuple[bytes, bool]:
        """The file of a case, and whether it must be refused."""
        from fuzz.kinds import KINDS

        kind = KINDS[kind_name]
        rng = random.Random(f"{kind_name} {seed}")
        good = (self._seeds / kind_name / kind.file).read_bytes()
        if kind.nonsense is not None and rng.random() < 0.1:
            return kind.nonsense(rng, good), True
        return kind.mutate(rng, good), False

    def run(self, kind_name: str, seed: int) -> dict[str, object]:
        """What came of a case."""
        from fuzz.kinds import KINDS, Refused
        from llmserve.errors import InternalError, LLMServeError

        kind = KINDS[kind_name]
        data, must_refuse = self.mutated(kind_name, seed)
        directory = self._directory / kind_name
        if not directory.exists():
            shutil.copytree(self._seeds / kind_name, directory)
        (directory / kind.file).unlink()  # a model that is still mapped keeps its file
        (directory / kind.file).write_bytes(data)
        peak_bytes()
        before = peak_bytes()
        begin = time.monotonic()
        finding = None
        outcome = "loaded"
        try:
            kind.load(directory)
            if must_refuse:
                finding = "nonsense was accepted"
        except Refused:
            outcome = "refused"
        except LLMServeError as error:
            outcome = "refused"
            if isinstance(error, InternalError):
                finding = f"internal error: {error}"
        except BaseException:
            finding = "raw exception: " + traceback.format_exc()[-1500:]
        return {
            "outcome": outcome,
            "finding": finding,
            "seconds": time.monotonic() - begin,
            "bytes": max(0, peak_bytes() - before),
        }


def main() -> None:
    """Answers until its input ends."""
    seeds = Path(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if len(sys.argv) > 2:
        kind, seed = sys.argv[2], int(sys.argv[3])
        with tempfile.TemporaryDirectory() as directory:
            loader = Loader(seeds, Path(directory))
            if len(sys.argv) > 4:
                Path(sys.argv[4]).write_bytes(loader.mutated(kind, seed)[0])
            print(json.dumps(loader.run(kind, seed), indent=2))
        return
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_BYTES, _ADDRESS_BYTES))
    from llmserve.chat import template_meter

    template_meter.RENDER_S = _RENDER_S
    with tempfile.TemporaryDirectory() as directory:
        loader = Loader(seeds, Path(directory))
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print is no answer
        for line in sys.stdin:
            kind, seed = line.split()
            print(json.dumps(loader.run(kind, int(seed))), file=answers, flush=True)


if __name__ == "__main__":
    main()
