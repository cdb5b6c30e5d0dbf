"""The same token ids through llmserve and its peers, interleaved, and one table of ratios.

    python benchmarks/peers/run.py prepare   # virtual environments; llama.cpp builds for minutes
    python benchmarks/peers/run.py measure --shape tinyllama-1.1b   # to benchmarks/results
    python benchmarks/peers/run.py report    # puts the results into docs/performance.md

Each system is a process that loads one checkpoint of random weights. A round runs each workload
once on every system, one after another, and measures the machine's read rate and rate of arithmetic
in between, so that whatever else the machine does hits all alike. A ratio is the median over rounds
of (peer's seconds / llmserve's seconds in the same format) of the same round: over 1, llmserve is
faster. Weights of 8 and 4 bits are llmserve's int8 and int4 and llama.cpp's Q8_0 and Q4_0.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
sys.path.insert(0, str(HERE.parent))

from llmserve.bench.machine import MachineProbe, Rates, describe_machine  # noqa: E402
from random_models import SHAPES, tensors_of, write_checkpoint  # noqa: E402  # in the folder above

# What each environment holds. llama-cpp-python has no wheel: pip compiles llama.cpp here.
PACKAGES = {
    "transformers": ["torch==2.13.0", "transformers==5.20.2"],
    "llama.cpp": ["llama-cpp-python==0.3.36", "gguf==0.19.0"],
}
SYSTEMS = ("llmserve", *PACKAGES)
# Bytes a weight; int4 has a float16 scale for 128 of them.
FORMATS = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5 + 2 / 128}


@dataclass(frozen=True)
class System:
    name: str
    form: str

    def __str__(self) -> str:
        return f"{self.name}, {self.form}"


@dataclass(frozen=True)
class Workload:
    """Prompts of these lengths, all there at the start, and tokens generated for each.

    The prompts share their first `num_shared` tokens. `is_decode`: timed from the first token on.
    """

    name: str
    prompt_lens: tuple[int, ...]
    max_tokens: tuple[int, ...]
    num_shared: int = 0
    is_decode: bool = False

    def job(self, vocab_size: int) -> str:
        draw = random.Random(0)
        shared = [draw.randrange(vocab_size) for _ in range(self.num_shared)]
        prompts = [
            shared + [draw.randrange(vocab_size) for _ in range(n - self.num_shared)]
            for n in self.prompt_lens
        ]
        return json.dumps({"prompts": prompts, "max_tokens": self.max_tokens})

    def seconds(self, answer: dict[str, Any]) -> float:
        elapsed_s: float = answer["elapsed_s"]
        return elapsed_s - answer["first_s"] if self.is_decode else elapsed_s

    @property
    def num_tokens(self) -> int:
        """Tokens that a rate counts: those generated; the prompt's where only one is generated."""
        if max(self.max_tokens) == 1:
            return sum(self.prompt_lens)
        return sum(self.max_tokens) - (1 if self.is_decode else 0)

    def bound_s(self, config: dict[str, Any], form: str, rates: Rates) -> float | None:
        """Seconds that no program beats: the larger of the bytes at the read rate and of the
        operations, two a multiply-add, at the rate of f32 arithmetic. None where that is of
        integers, whose rate is not known.

        The weights are read once a step, all prompts being one step, the cache once a token that is
        generated after the first; a shared prefix is computed once.
        """
        parts = {name: int(np.prod(dims)) for name, dims in tensors_of(config)}
        head = parts.pop("lm_head.weight", None) or parts["model.embed_tokens.weight"]
        body = sum(parts.values()) - parts["model.embed_tokens.weight"]
        layers, dim = config["num_hidden_layers"], config["head_dim"]
        requests = list(zip(self.prompt_lens, self.max_tokens, strict=True))
        # Positions that the tokens run in decode steps attend to, and those of the prompts.
        decoded = sum((n - 1) * p + n * (n - 1) // 2 for p, n in requests)
        prefilled = sum(p * (p + 1) // 2 for p in self.prompt_lens)
        prefilled -= (len(requests) - 1) * self.num_shared * (self.num_shared + 1) // 2
        tokens = sum(n - 1 for _, n in requests)
        prompts = sum(self.prompt_lens) - (len(requests) - 1) * self.num_shared
        heads = sum(self.max_tokens)
        steps = max(self.max_tokens)
        if self.is_decode:
            prompts, prefilled, heads, steps = 0, 0, heads - 1, steps - 1
        is_float = form in ("float32", "bfloat16")
        if not is_float and not self.is_decode:
            return None
        element = FORMATS[form] if is_float else 2
        kv_bytes = 2 * layers * config["num_key_value_heads"] * dim * element
        num_bytes = FORMATS[form] * (body + head) * steps + kv_bytes * decoded
        attention = 4 * layers * config["num_attention_heads"] * dim * (prefilled + decoded)
        return rates.bound_s(num_bytes, 2 * (body * (prompts + tokens) + head * heads) + attention)


def drawn(seed: int, count: int, low: int, high: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randint(low, high) for _ in range(count))


WORKLOADS = (
    Workload("prefill of 512", (512,), (1,)),
    Workload("prefill of 2,048", (2048,), (1,)),
    Workload("decode of 128 after 512", (512,), (128,), is_decode=True),
    Workload("32 requests, 64-256 in, 32-128 out", drawn(1, 32, 64, 256), drawn(2, 32, 32, 128)),
    Workload("16 requests, 512 shared + 32 in, 32 out", (544,) * 16, (32,) * 16, num_shared=512),
)


class Worker:
    """A system's process; one job at a time."""

    def __init__(self, system: System, python: str, model: Path, options: Any) -> None:
        threads = str(options.threads)
        environment = {**os.environ, "OMP_NUM_THREADS": threads}
        if system.name == "llmserve":
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [python, str(HERE / "worker.py"), system.name, str(model), system.form, threads],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._system = system
        ready = self._answer()
        self.version, self.load_s = ready["version"], ready["load_s"]

    def run(self, job: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(job + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._system} ended with status {self._process.wait()}; see above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def prepare(options: argparse.Namespace) -> None:
    for system, packages in PACKAGES.items():
        folder = options.folder / "environments" / system
        if not python_of(folder).exists():
            print(f"making {folder}", flush=True)
            venv.create(folder, with_pip=True)
        subprocess.run([python_of(folder), "-m", "pip", "install", *packages], check=True)


def measure(options: argparse.Namespace) -> None:
    folder = options.folder / "models" / options.shape
    print(f"checkpoint: {folder}", flush=True)
    write_checkpoint(folder, options.shape)
    probe = MachineProbe(options.threads)
    workers = dict(start_workers(options, folder))
    vocab_size = SHAPES[options.shape]["vocab_size"]
    rows = []
    try:
        for workload in chosen(options.work):
            job = workload.job(vocab_size)
            seconds: dict[System, list[float]] = {system: [] for system in workers}
            tokens: dict[System, list[list[int]]] = {}
            for system, worker in workers.items():  # not counted: first touches, buffers
                tokens[system] = worker.run(job)["tokens"]
            for round_idx in range(options.rounds):
                for system in rotated(list(workers), round_idx):
                    seconds[system].append(workload.seconds(workers[system].run(job)))
                    probe.measure()
            for system in workers:
                bound_s = workload.bound_s(SHAPES[options.shape], system.form, probe.rates())
                rows.append(row_of(workload, system, seconds, tokens, bound_s))
            show(rows[-len(workers) :])
    finally:
        for worker in workers.values():
            worker.close()
    rates = probe.rates()
    report = {
        "command": " ".join(sys.argv).replace(str(options.folder), "FOLDER"),
        "machine": describe_machine(),
        "shape": options.shape,
        "formats": options.formats,
        "threads": options.threads,
        "rounds": options.rounds,
        "read_bytes_per_s": rates.read_bytes_per_s,
        "f32_flops_per_s": rates.flops_per_s,
        "systems": {str(s): {"version": w.version, "load_s": w.load_s} for s, w in workers.items()},
        "rows": rows,
    }
    path = options.results or RESULTS / f"peers-{options.shape}-{options.formats[0]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}")


def chosen(parts: list[str]) -> list[Workload]:
    """The workloads whose names hold one of the parts."""
    found = [work for work in WORKLOADS if any(part in work.name for part in parts)]
    if not found:
        raise SystemExit(f"no work is named like {parts}; there is: {[w.name for w in WORKLOADS]}")
    return found


def start_workers(options: argparse.Namespace, folder: Path) -> Iterator[tuple[System, Worker]]:
    for form in options.formats:
        for name in options.systems:
            if name == "transformers" and form.startswith("int"):
                continue
            system, python, model = System(name, form), sys.executable, folder
            if name != "llmserve":
                python = str(python_of(options.folder / "environments" / name))
                if not Path(python).exists():
                    raise SystemExit(f"{name}: no {python}; run `prepare` first")
            if name == "llama.cpp":
                model = folder / f"model-{form}.gguf"
                if not model.exists():
                    script = str(HERE.parent / "random_models.py")
                    subprocess.run([python, script, folder, model, form], check=True)
            worker = Worker(system, python, model, options)
            print(f"{system}, {worker.version}: loaded in {worker.load_s:.1f} s", flush=True)
            yield system, worker


def row_of(
    workload: Workload,
    system: System,
    seconds: dict[System, list[float]],
    tokens: dict[System, list[list[int]]],
    bound_s: float | None,
) -> dict[str, Any]:
    own = System("llmserve", system.form)
    ratios = [peer / mine for peer, mine in zip(seconds[system], seconds[own], strict=True)]
    pairs = list(zip(tokens[system], tokens[own], strict=True))
    return {
        "workload": workload.name,
        "system": str(system),
        "seconds": seconds[system],
        "bound_s": bound_s,
        "tokens_per_s": workload.num_tokens / statistics.median(seconds[system]),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        # Systems round bf16 at different places, and random weights have close calls.
        "share_of_same_first_tokens": sum(a[0] == b[0] for a, b in pairs) / len(pairs),
    }


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(
            f"{row['workload']:<40} {row['system']:<22} {row['tokens_per_s']:9.1f} tokens/s  "
            f"{row['ratio']:6.2f} ({row['ratio_min']:.2f}-{row['ratio_max']:.2f})  "
            f"same first tokens {row['share_of_same_first_tokens']:.0%}",
            flush=True,
        )


def table_of(report: dict[str, Any]) -> str:
    """A report as Markdown."""
    machine = report["machine"]
    versions = {name.split(",")[0]: system["version"] for name, system in report["systems"].items()}
    systems = "; ".join(f"{name} {version}" for name, version in versions.items())
    lines = [
        f"### {report['shape']}, {', '.join(report['formats'])}, {report['threads']} threads",
        "",
        f"{machine['cpu']}, {machine['num_cpus']} cores; in the same run it reads "
        f"{report['read_bytes_per_s'] / 1e9:.1f} GB/s and does "
        f"{report['f32_flops_per_s'] / 1e9:.0f} GFLOP/s in f32. {report['rounds']} rounds; "
        f"commit {(machine['commit'] or 'unknown')[:10]}. "
        f"{systems}.",
        "",
        "| work | system | tokens/s | share of the bound | time / llmserve's (range over rounds) |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in report["rows"]:
        is_own = row["system"].startswith("llmserve")
        ratio = f"{row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})"
        bound_s = row["bound_s"]
        share = "-" if bound_s is None else f"{bound_s / statistics.median(row['seconds']):.0%}"
        lines.append(
            f"| {row['workload']} | {row['system']} | {row['tokens_per_s']:.1f} "
            f"| {share} | {1 if is_own else ratio} |"
        )
    return "\n".join(lines)


def report(options: argparse.Namespace) -> None:
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"written: {PAGE}")


def with_tables(page: str) -> str:
    """The page with every report of benchmarks/results between its two markers."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n{tables()}{END}{rest.partition(END)[2]}"


def tables() -> str:
    """Every report in benchmarks/results as Markdown."""
    reports = (
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(RESULTS.glob("peers-*.json"))
    )
    return "".join(f"\n{table_of(report)}\n" for report in reports)


def rotated(items: list[str], by: int) -> list[str]:
    return items[by % len(items) :] + items[: by % len(items)]


def python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "llmserve-peers"
    parser.add_argument("--folder", type=Path, default=default, help=f"default {default}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("prepare", help="make the peers' environments").set_defaults(run=prepare)
    measuring = commands.add_parser("measure", help="run every workload on every system")
    measuring.set_defaults(run=measure)
    measuring.add_argument("--shape", choices=SHAPES, default="tinyllama-1.1b")
    measuring.add_argument("--formats", nargs="+", choices=FORMATS, default=["bfloat16"])
    measuring.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    measuring.add_argument(
        "--work", nargs="+", default=[""], metavar="TEXT", help="only work whose name has it"
    )
    measuring.add_argument("--rounds", type=int, default=5)
    measuring.add_argument("--threads", type=int, default=2)
    measuring.add_argument("--results", type=Path, help="file to write")
    commands.add_parser("report", help="write docs/performance.md").set_defaults(run=report)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
