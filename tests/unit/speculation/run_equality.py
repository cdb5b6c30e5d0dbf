"""Runs cases of the equality suites in parts, each by its own seed, and goes on where it ended.

    python tests/unit/speculation/run_equality.py oracle --cases 80000 --state cases.json
    python tests/unit/speculation/run_equality.py models --cases 20000 --state cases.json

A part that fails prints its smallest case and is tried again the next time. Suites: oracle, models,
heads.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
SUITES = {
    "oracle": "test_equality_on_an_oracle",
    "models": "test_equality",
    "heads": "test_trees_with_heads",
}


def run_part(module: object, seed: int, num_cases: int) -> bool:
    """Whether all cases of it passed."""
    from hypothesis import HealthCheck, given, settings
    from hypothesis import seed as seeded

    @seeded(seed)
    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(module.CASES)  # type: ignore[attr-defined]
    def run(case: object) -> None:
        module.check(case)  # type: ignore[attr-defined]

    try:
        run()
    except Exception:
        traceback.print_exc()
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description="equality of speculation, in parts")
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--part", type=int, default=250, help="cases of a part")
    parser.add_argument("--first", type=int, default=0, help="the first part's seed")
    parser.add_argument("--state", type=Path, help="file of the parts that have passed")
    args = parser.parse_args()
    for folder in (HERE, HERE.parent, HERE.parents[1], HERE.parents[2]):
        sys.path.insert(0, str(folder))
    module = importlib.import_module(SUITES[args.suite])
    passed: list[list[object]] = []
    if args.state and args.state.exists():
        passed = json.loads(args.state.read_text(encoding="utf-8"))
    failed = 0
    for seed in range(args.first, args.first + -(-args.cases // args.part)):
        key = [args.suite, args.part, seed]
        if key in passed:
            continue
        start = time.monotonic()
        if run_part(module, seed, args.part):
            passed.append(key)
        else:
            failed += 1
        seconds = time.monotonic() - start
        print(f"{args.suite} {seed}: {args.part} cases in {seconds:.0f} s", flush=True)
        if args.state:
            args.state.write_text(json.dumps(passed), encoding="utf-8")
    print(f"{args.suite}: {len(passed)} parts have passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
