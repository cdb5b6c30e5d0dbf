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
it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from line_process import LineProcess

HERE = Path(__file__).resolve().parent
_BURST_S = 0.02  # of one op, so that its threads are awake

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


def compare(options: argparse.Namespace) -> None:
    for _ in range(options.processes):
        builds = [Build(spec, sys.argv[1:]) for spec in options.builds]
        for name, seconds in measured(builds, options.rounds):
            show(name, builds, seconds)
        for build in builds:
            build.close()


def measured(builds: list[Build], num_rounds: int) -> Iterator[tuple[str, list[list[float]]]]:
    """Of every case: its name, and the seconds of each build in each round."""
    while True:
        names = {build.ask("next") for build in builds}
        if len(names) > 1:
            raise SystemExit(f"the builds differ in what they run: {sorted(map(str, names))}")
        (name,) = names
        if name is None:
            return
        seconds: list[list[float]] = [[] for _ in builds]
        for round_idx in range(num_rounds):
            for turn in range(len(builds)):
                idx = (turn + round_idx) % len(builds)
                seconds[idx].append(builds[idx].ask("run"))
        yield name, seconds


def show(name: str, builds: list[Build], seconds: list[list[float]]) -> None:
    print(name)
    for build, own in zip(builds, seconds, strict=True):
        ratios = [first / mine for first, mine in zip(seconds[0], own, strict=True)]
        low, high = np.quantile(ratios, [0.25, 0.75])
        print(
            f"  {1e3 * statistics.median(own):10.3f} ms  "
            f"{statistics.median(ratios):6.3f} ({low:.3f} to {high:.3f})  {build.name}",
            flush=True,
        )


def work(options: argparse.Namespace) -> None:
    """Answers the questions of a Build."""
    runs = options.runs(options, json.loads(options.worker))
    run: Callable[[], float] | None = None
    for line in sys.stdin:
        if line.strip() == "next":
            run = None  # its memory goes before the next one's comes
            name, run = next(runs, (None, None))
            answer: Any = name
        else:
            assert run is not None
            answer = run()
        print(json.dumps(answer), flush=True)


def op_runs(options: argparse.Namespace, arguments: dict[str, Any]) -> Runs:
    import bench_ops
    from llmserve import _core

    if arguments:
        raise SystemExit(f"ops: expected environment variables alone, got {', '.join(arguments)}")
    backend = _core.testing.make_backend("cpu", options.threads, "")
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
