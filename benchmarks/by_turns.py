"""Builds of llmserve by turns: what a change gains or costs, on machines that are never quiet.

    python benchmarks/by_turns.py ops OLD/python python --group attention --cases "decode B=8"
    python benchmarks/by_turns.py engine OLD/python python --shape qwen3-0.6b --num-prompts 16
    python benchmarks/by_turns.py engine python python:quantization=int8 --output-len 1

A build is a folder that holds the package: the `python` of a worktree, or a copy of one. Behind a
colon it may have environment variables, as LLMSERVE_CPU_ISA=avx2, and for `engine` arguments of
LLM, whose names begin with a small letter; several are divided by commas. Each is a process of its
own, which sleeps while another works. A round runs each of them once, in changing order; the ratio
is the median over rounds of (the first one's seconds / this one's seconds): over 1, this one is
faster. Where in memory a process lies can count more than what it does: several --processes show
it. What memory reads before and after a round changes with the machine's other tenants: --reading
counts only the rounds in which it is such.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from line_process import LineProcess

HERE = Path(__file__).resolve().parent
_BURST_S = 0.02  # of one op, so that its threads are awake
# How long memory may read at another rate than is asked for, and how often that is looked at.
_PATIENCE_S = 120.0
_PAUSE_S = 1.0

Runs = Iterator[tuple[str, Callable[[], float]]]  # names, and what takes so many seconds


class Build(LineProcess):
    """A build's process: a line asks it for its next case, or to run the one it has."""

    def __init__(self, spec: str, command: list[str]) -> None:
        folder, _, settings = spec.partition(":")
        if not (Path(folder) / "llmserve").is_dir():
            raise SystemExit(f"{folder}: expected a folder that holds the package llmserve")
        pairs = dict(item.split("=", 1) for item in filter(None, settings.split(",")))
        arguments = {key: _value(text) for key, text in pairs.items() if key[0].islower()}
        variables = {key: text for key, text in pairs.items() if not key[0].islower()}
        super().__init__(
            spec,
            [sys.executable, __file__, *command, "--worker", json.dumps(arguments)],
            {**variables, "PYTHONPATH": str(Path(folder).resolve())},
        )


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


@dataclass
class Rounds:
    """Of a case: the seconds of each build, and bytes that memory read a second meanwhile."""

    seconds: list[list[float]]  # [builds][rounds]
    reads: list[float]


def compare(options: argparse.Namespace) -> None:
    for _ in range(options.processes):
        builds = [Build(spec, sys.argv[1:]) for spec in options.builds]
        for name in case_names(builds):
            show(name, builds, run_rounds(builds, options))
        for build in builds:
            build.close()


def case_names(builds: list[Build]) -> Iterator[str]:
    """Of one case after another, for which all builds are ready."""
    while True:
        names = {build.ask("next") for build in builds}
        if len(names) > 1:
            raise SystemExit(f"the builds differ in what they run: {sorted(map(str, names))}")
        (name,) = names
        if name is None:
            return
        yield name


def run_rounds(builds: list[Build], options: argparse.Namespace) -> Rounds:
    lowest, highest = (rate * 1e9 for rate in options.reading)
    rounds = Rounds([[] for _ in builds], [])
    patient_until = time.monotonic() + _PATIENCE_S
    read = builds[0].ask("read")
    while len(rounds.reads) < options.rounds and time.monotonic() < patient_until:
        if not lowest <= read <= highest:
            time.sleep(_PAUSE_S)
            read = builds[0].ask("read")
            continue
        seconds = {}
        for turn in range(len(builds)):
            idx = (turn + len(rounds.reads)) % len(builds)
            seconds[idx] = builds[idx].ask("run")
        before, read = read, builds[0].ask("read")
        if lowest <= read <= highest:
            rounds.reads.append((before + read) / 2)
            for idx, own in enumerate(rounds.seconds):
                own.append(seconds[idx])
            patient_until = time.monotonic() + _PATIENCE_S
    return rounds


def show(name: str, builds: list[Build], rounds: Rounds) -> None:
    if not rounds.reads:
        print(f"{name}: memory did not read at such a rate within {_PATIENCE_S:.0f} s", flush=True)
        return
    low, mid, high = np.quantile(rounds.reads, [0.25, 0.5, 0.75]) / 1e9
    print(f"{name}: {len(rounds.reads)} rounds, memory at {mid:.1f} GB/s ({low:.1f} to {high:.1f})")
    for build, own in zip(builds, rounds.seconds, strict=True):
        ratios = [first / mine for first, mine in zip(rounds.seconds[0], own, strict=True)]
        low, high = np.quantile(ratios, [0.25, 0.75])
        print(
            f"  {1e3 * statistics.median(own):10.3f} ms  "
            f"{statistics.median(ratios):6.3f} ({low:.3f} to {high:.3f})  {build.name}",
            flush=True,
        )


def work(options: argparse.Namespace) -> None:
    """Answers the questions of a Build."""
    from llmserve.bench.machine import MachineProbe

    runs = options.runs(options, json.loads(options.worker))
    run: Callable[[], float] | None = None
    probe = None
    for line in sys.stdin:
        question = line.strip()
        if question == "next":
            run = None  # its memory goes before the next one's comes
            name, run = next(runs, (None, None))
            answer: Any = name
        elif question == "read":
            probe = probe or MachineProbe(options.threads, [])
            answer = probe.measure().read_bytes_per_s
        else:
            assert run is not None
            answer = run()
        print(json.dumps(answer), flush=True)


def op_runs(options: argparse.Namespace, arguments: dict[str, Any]) -> Runs:
    import bench_ops
    from core_testing import testing

    if arguments:
        raise SystemExit(f"ops: expected environment variables alone, got {', '.join(arguments)}")
    backend = testing.make_backend("cpu", options.threads, "")
    for case in bench_ops.GROUPS[options.group](backend, np.random.default_rng(0)):
        if options.cases not in case.name:
            continue
        case.run()
        assert case.check(), f"{case.name}: the result is wrong"

        def run(run_once: Callable[[], object] = case.run) -> float:
            run_once()
            num_runs, start = 0, time.perf_counter()
            while (elapsed_s := time.perf_counter() - start) < _BURST_S or num_runs == 0:
                run_once()
                num_runs += 1
            return elapsed_s / num_runs

        yield case.name, run
        del case, run


def engine_runs(options: argparse.Namespace, arguments: dict[str, Any]) -> Runs:
    from llmserve import LLM, SamplingParams
    from random_models import SHAPES

    settings = {"dtype": "bfloat16", "num_threads": options.threads, "defer_packing": False}
    llm = LLM(str(_checkpoint(options)), **{**settings, **arguments})
    rng = np.random.default_rng(0)
    params = SamplingParams(
        temperature=0.0, max_tokens=options.output_len, ignore_eos=True, detokenize=False
    )
    shared = rng.integers(1, SHAPES[options.shape]["vocab_size"], options.shared_len).tolist()

    def run() -> float:
        own = rng.integers(
            1, SHAPES[options.shape]["vocab_size"], (options.num_prompts, options.input_len)
        )
        prompts = [{"prompt_token_ids": shared + ids} for ids in own.tolist()]
        if shared:  # to be computed once in every run
            llm.reset_prefix_cache()
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    run()
    sizes = f"{options.shared_len} shared + {options.input_len} in, {options.output_len} out"
    yield f"{options.shape}: {options.num_prompts} x ({sizes})", run


def _checkpoint(options: argparse.Namespace) -> Path:
    from random_models import write_checkpoint

    folder: Path = options.folder / options.shape
    write_checkpoint(folder, options.shape)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    ops = commands.add_parser("ops", help="cases of bench_ops.py")
    ops.set_defaults(runs=op_runs)
    ops.add_argument("--group", required=True, help="of cases, as attention or linear")
    ops.add_argument("--cases", default="", metavar="TEXT", help="only those whose name has TEXT")
    engine = commands.add_parser("engine", help="requests to an LLM")
    engine.set_defaults(runs=engine_runs)
    engine.add_argument("--shape", default="tinyllama-1.1b")
    engine.add_argument("--num-prompts", type=int, default=1)
    engine.add_argument("--shared-len", type=int, default=0, help="tokens all prompts begin with")
    engine.add_argument("--input-len", type=int, default=512)
    engine.add_argument("--output-len", type=int, default=1)
    engine.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "llmserve-models"
    )
    for command in (ops, engine):
        command.add_argument("builds", nargs="+", metavar="BUILD")
        command.add_argument("--rounds", type=int, default=9)
        command.add_argument(
            "--reading",
            type=float,
            nargs=2,
            default=(0.0, math.inf),
            metavar=("LOWEST", "HIGHEST"),
            help="GB/s of memory in the rounds that count",
        )
        command.add_argument(
            "--processes", type=int, default=1, help="of each build, one after another"
        )
        command.add_argument("--threads", type=int, default=2)
        command.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        return work(options)
    if hasattr(options, "folder"):
        _checkpoint(options)
    compare(options)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main()
