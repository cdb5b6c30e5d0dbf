"""Writes down what a stage of run_on_gpu.sh did, merges the stages, and makes tables of them.

Example:
    python benchmarks/gpu_stages.py record --out build/gpu --stage build --status 0 --seconds 90
    cp build/gpu/results.json benchmarks/results/gpu-h200.json
    python benchmarks/gpu_stages.py report    # puts the results into docs/performance/gpu.md
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

OPS = ("attention", "ops")  # parts of bench_cuda.py
MODELS = ("qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b")
SERVED = ("qwen3-0.6b", "llama-3.1-8b")
FORMS = ("floats", "integers")
SERVERS = tuple(f"server-{model}" for model in SERVED)
BENCHES = (*OPS, "formats", *MODELS, *FORMS, *SERVERS, "ranks", "peers", "products")
STAGES = (
    "build",
    "test",
    "test-wgmma",
    "sanitize",
    "sanitize-more",
    *(f"bench-{part}" for part in BENCHES),
)


def output_of(*command: str) -> str:
    """What a command prints, or nothing where it is not there or fails."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine() -> dict[str, str]:
    query = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem"
    return {
        "gpu": output_of("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"),
        "nvcc": output_of("nvcc", "--version").splitlines()[-1:][0] if output_of("nvcc") else "",
        "python": platform.python_version(),
        "commit": output_of("git", "rev-parse", "--short", "HEAD"),
    }


def read_junit(path: Path) -> dict[str, Any]:
    """Counts, and the names of what failed with the first lines of why."""
    suite = ElementTree.parse(path).getroot().find("testsuite")
    if suite is None:
        return {}
    counts = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
    failed = [
        {"test": f"{case.get('classname')}.{case.get('name')}", "why": (bad.get("message") or "")}
        for case in suite.iter("testcase")
        for bad in [*case.findall("failure"), *case.findall("error")]
    ]
    return {**counts, "failed": failed}


def merge(out: Path) -> None:
    stages = {
        s: json.loads((out / f"{s}.json").read_text())
        for s in STAGES
        if (out / f"{s}.json").exists()
    }
    (out / "results.json").write_text(json.dumps(stages, indent=1) + "\n")


def record(args: argparse.Namespace) -> None:
    entry: dict[str, Any] = {"status": args.status, "seconds": args.seconds, **machine()}
    if args.junit and args.junit.exists():
        entry["tests"] = read_junit(args.junit)
    if args.rows and args.rows.exists():
        entry["bench"] = json.loads(args.rows.read_text())
    (args.out / f"{args.stage}.json").write_text(json.dumps(entry, indent=1) + "\n")
    merge(args.out)
    print(f"{args.stage}: {'ok' if args.status == 0 else 'FAILED'} in {args.seconds} s")


def is_done(args: argparse.Namespace) -> None:
    """Exits with 0 where the stage was recorded without a failure at this commit."""
    path = args.out / f"{args.stage}.json"
    entry = json.loads(path.read_text()) if path.exists() else {"status": 1}
    done = entry["status"] == 0 and entry["commit"] == machine()["commit"]
    if done:
        print(f"{args.stage}: is done")
    sys.exit(0 if done else 1)


def report(args: argparse.Namespace) -> None:
    import gpu_page  # which needs llmserve: a build that failed is recorded, too
    from peers import page

    page.update(page.GPU_PAGE, gpu_page.rendered, check=args.check)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="write STAGE.json and results.json")
    recording.set_defaults(run=record)
    recording.add_argument("--out", type=Path, required=True)
    recording.add_argument("--stage", choices=STAGES, required=True)
    recording.add_argument("--status", type=int, required=True)
    recording.add_argument("--seconds", type=int, required=True)
    recording.add_argument("--junit", type=Path)
    recording.add_argument("--rows", type=Path)
    asking = commands.add_parser("is-done", help="whether STAGE.json is of this commit and good")
    asking.set_defaults(run=is_done)
    asking.add_argument("--out", type=Path, required=True)
    asking.add_argument("--stage", choices=STAGES, required=True)
    reporting = commands.add_parser("report", help="write docs/performance/gpu.md")
    reporting.set_defaults(run=report)
    reporting.add_argument("--check", action="store_true", help="only say whether it is up to date")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
