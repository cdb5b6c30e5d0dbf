"""The tables of docs/performance/gpu.md that say what a GPU did.

They are of benchmarks/results/gpu-*.json, each a results.json of run_on_gpu.sh; what a run has not
measured is left out. Where there is a gpu-NAME-first.json, it is an earlier run of the same GPU,
which gpu-NAME.json is compared with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_stages import BENCHES, FORMS, OPS, SERVED
from gpu_stages import MODELS as MODEL_PARTS
from peers import page

Stages = dict[str, dict[str, Any]]

FIRST = "-first"  # ends the name of a GPU's first run
LINEARS = (1, 8, 16, 64, 512)  # rows of x
# What is shown of a first run: the shapes of Qwen3-0.6B.
CHANGED = (
    r"attention decode 16/8x128 .*",
    r"attention prefill 16/8x128 .*",
    r"linear bfloat16 M=(1|2|4|8|16) (4096x1024|151936x1024)",
    r"norm, linear, gate as one op M=(1|8) 6144x1024",
    r"norms, rotary, cache T=2048 .*",
    r"(rms_norm|gated_activation) .*",
    r"sample .*",
    r"weights to the GPU.*",
)
# Rows of x of the products with weights of every format.
FORMAT_ROWS = (1, 8, 64, 256, 2048)
# Columns of the table of forms: what is shown, of which rows, and what of them.
FORM_COLUMNS = (
    ("decode of one request, tokens/s", "decode batch 1", "tokens"),
    ("prompt of 2,048, tokens/s", "prefill 2048", "tokens"),
    ("decode step of 256 sequences, µs", "decode batch 256, a step", "us"),
    ("the host's own part of it, µs", "the host's own time a step, batch 256", "host"),
)
PEER_COLUMNS = (
    ("decode of one request, tokens/s", "decode batch 1", "tokens"),
    ("prompt of 2,048, tokens/s", "prefill 2048", "tokens"),
    ("prompt of 8,191, tokens/s", "prefill 8191", "tokens"),
    ("nano-vllm's workload, tokens/s", "nano-vllm", "tokens"),
)
# Lines of the table of models: what is shown, of which row.
MODELS = (
    ("load, GB/s of weights", "load, weights in memory", "load"),
    ("decode of one request, tokens/s", "decode batch 1", "tokens"),
    ("the same, invariant", "invariant: decode batch 1", "tokens"),
    ("PyTorch with a CUDA graph", "torch with a CUDA graph: decode batch 1", "tokens"),
    ("prompt of 2,048, tokens/s", "prefill 2048", "tokens"),
    ("the same, invariant", "invariant: prefill 2048", "tokens"),
    ("PyTorch", "torch: prefill 2048", "tokens"),
    ("prompt of 8,191, tokens/s", "prefill 8191", "tokens"),
    ("the same, invariant", "invariant: prefill 8191", "tokens"),
    ("PyTorch", "torch: prefill 8191", "tokens"),
    ("decode step of 256 sequences, µs", "decode batch 256, a step", "us"),
    ("the same, invariant", "invariant: decode batch 256, a step", "us"),
    ("the host's own part of it, µs", "the host's own time a step, batch 256", "host"),
    ("the same, invariant", "invariant: the host's own time a step, batch 256", "host"),
    ("nano-vllm's workload, first run, tokens/s", "nano-vllm workload, first run", "tokens"),
    ("the same, second run", "nano-vllm workload, second run", "tokens"),
    ("the same, invariant", "invariant: nano-vllm workload, second run", "tokens"),
    ("PyTorch in batches of 64", "torch: nano-vllm workload in batches of 64", "tokens"),
)


@dataclass(frozen=True)
class Bench:
    """What one part of run_on_gpu.sh bench has left."""

    device: str
    gb_per_s: float
    gflop_per_s: float
    rows: dict[str, dict[str, Any]]  # by name

    @staticmethod
    def of(stages: Stages, part: str) -> Bench | None:
        bench = stages.get(f"bench-{part}", {}).get("bench")
        if bench is None:
            return None
        rows = {row["name"]: row for row in bench["rows"]}
        return Bench(bench["device"], **bench["limits"], rows=rows)

    @staticmethod
    def of_ops(stages: Stages) -> Bench | None:
        """What the parts of ops have left together; limits are those of the last."""
        parts = [bench for part in OPS if (bench := Bench.of(stages, part))]
        rows = {name: row for bench in parts for name, row in bench.rows.items()}
        return replace(parts[-1], rows=rows) if parts else None

    def matches(self, pattern: str) -> list[re.Match[str]]:
        return [match for name in self.rows if (match := re.fullmatch(pattern, name))]

    def us(self, name: str) -> str:
        return number(self.rows[name]["us"]) if name in self.rows else "-"


def rendered(text: str) -> str:
    """The page with every GPU's tables as benchmarks/results has them."""
    paths = [p for p in sorted(page.RESULTS.glob("gpu-*.json")) if not p.stem.endswith(FIRST)]
    parts = [part for path in paths for part in tables(read(path), read(first_of(path)))]
    return page.with_section(text, "gpu", "".join(f"\n{part}\n" for part in parts))


def first_of(path: Path) -> Path:
    return path.with_stem(path.stem + FIRST)


def read(path: Path) -> Stages:
    stages: Stages = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return stages


def tables(stages: Stages, first: Stages) -> list[str]:
    models = {
        stage.removeprefix("bench-"): bench
        for stage in stages
        if stage.removeprefix("bench-") in MODEL_PARTS
        if (bench := Bench.of(stages, stage.removeprefix("bench-")))
    }
    ops = Bench.of_ops(stages)
    benches = {part: Bench.of(stages, part) for part in BENCHES}
    parts = [heading(stages, [*([ops] if ops else []), *models.values()])]
    if ops:
        parts += [decode_attention(ops), other_decode(ops), prepared_attention(ops)]
        parts += [prompt_attention(ops, benches["products"]), latent_attention(ops)]
        parts += [products(ops), other_ops(ops)]
        before = Bench.of_ops(first)
        parts += [changes(before, ops)] if before else []
    parts += [model_table(models)] if models else []
    if by_kernel := benches["products"]:
        parts.append(products_by_kernel(by_kernel))
    if formats := benches["formats"]:
        parts.append(format_table(formats))
    forms = [bench for part in FORMS if (bench := benches[part])]
    parts += [form_table(forms), edit_table(forms)] if forms else []
    served = [bench for model in SERVED if (bench := benches[f"server-{model}"])]
    parts += [server_table(served)] if served else []
    if peers := benches["peers"]:
        parts.append(peer_table(peers))
    return [part for part in parts if part]


def heading(stages: Stages, benches: list[Bench]) -> str:
    entry = next((entry for entry in stages.values() if entry.get("gpu")), {})
    device = next((bench.device for bench in benches), "cuda")
    name = match[1] if (match := re.search(r"\((.*?), sm_\d+\)", device)) else device
    facts = [f"`{device}`"]
    if entry:
        facts.append(f"driver {entry['gpu'].splitlines()[0].split(', ')[1]}")
    if version := re.search(r"cuda_(\d+\.\d+)", entry.get("nvcc", "")):
        facts.append(f"nvcc {version[1]}")
    if entry.get("commit"):
        facts.append(f"commit {entry['commit']}")
    about = "; ".join(facts) + "."
    if benches:
        about += (
            f" Copies within its memory move {number(benches[0].gb_per_s)} GB/s, read and written;"
            f" a product of 8,192³ in bf16 does {number(benches[0].gflop_per_s / 1000)} TFLOP/s."
        )
    tests = stages.get("test", {}).get("tests")
    if tests:
        failed = tests["failures"] + tests["errors"]
        passed = tests["tests"] - tests["skipped"] - failed
        about += (
            f" `pytest -m cuda` there: {passed:,} passed, {failed:,} failed, "
            f"{tests['skipped']:,} skipped."
        )
    return f"### {name}\n\n{about}"


def decode_attention(ops: Bench) -> str:
    rows = []
    for match in ops.matches(r"attention decode (\S+) B=(\d+) context=(\d+)"):
        row = ops.rows[match[0]]
        share = row["gb_per_s"] / ops.gb_per_s
        cells = (number(row["us"]), f"{share:.0%}", ops.us(f"torch: {match[0]}"))
        rows.append((match[1], f"{match[2]} of {int(match[3]):,}", *cells))
    head = (
        "attention, decode",
        "sequences and context",
        "µs",
        "of the copies' rate",
        "PyTorch, µs",
    )
    return table(head, rows)


def other_decode(ops: Bench) -> str:
    """Decode attention by other kernels than the default's, in microseconds."""
    cells: dict[str, dict[str, str]] = {}
    columns: dict[str, None] = {"default": None}
    for match in ops.matches(r"(?!torch)(\w[^:]+): (attention decode (\S+) B=(\d+) context=(\d+))"):
        line = f"{match[3]}, {match[4]} of {int(match[5]):,}"
        cells.setdefault(line, {"default": ops.us(match[2])})[match[1]] = ops.us(match[0])
        columns[match[1]] = None
    rows = [(line, *(of.get(column, "-") for column in columns)) for line, of in cells.items()]
    return table(("attention, decode, µs", *columns), rows)


def prepared_attention(ops: Bench) -> str:
    """From queries, keys and values to the output layer's rows, by two kernels before it and by
    one, in microseconds."""
    cells: dict[str, dict[str, str]] = {}
    for match in ops.matches(r"prepared by (\w+): (\S+) B=(\d+) context=(\d+)"):
        line = cells.setdefault(f"{match[2]}, {match[3]} of {int(match[4]):,}", {})
        line[match[1]] = ops.us(match[0])
    rows = [(line, of.get("kernel", "-"), of.get("attention", "-")) for line, of in cells.items()]
    head = "norms, rotary, cache, attention, product, µs"
    return table((head, "a kernel in front", "within attention"), rows)


def prompt_attention(ops: Bench, by_kernel: Bench | None) -> str:
    """One line a kind of heads and kernel, one column a length."""
    cells: dict[str, dict[str, str]] = {}
    kinds = {match[1]: None for match in ops.matches(r"attention prefill (\S+) B=1 context=\d+")}
    for heads in kinds:
        for label, prefix, bench in (
            ("", "", ops),
            (", by wgmma", "fastest: ", by_kernel or ops),
            (", PyTorch", "torch: ", ops),
        ):
            for match in bench.matches(rf"{prefix}attention prefill {heads} B=1 context=(\d+)"):
                row = bench.rows[match[0]]
                rate = number(row["gflop_per_s"] / 1000)
                share = row["gflop_per_s"] / bench.gflop_per_s
                line = cells.setdefault(f"{heads}{label}", {})
                line[f"{int(match[1]):,}"] = f"{rate} ({share:.0%})"
    return pivot("attention, a prompt of, TFLOP/s", cells)


def latent_attention(ops: Bench) -> str:
    rows = []
    for match in ops.matches(r"latent attention (\S+) (\S+) B=(\d+) context=(\d+)"):
        row = ops.rows[match[0]]
        rates = f"{row['gb_per_s'] / ops.gb_per_s:.0%}, {row['gflop_per_s'] / ops.gflop_per_s:.0%}"
        others = (ops.us(f"{kind}: {match[0]}") for kind in ("whole stretches", "plain", "torch"))
        where = f"{match[1]}, {match[3]} of {int(match[4]):,}"
        rows.append((match[2], where, number(row["us"]), rates, *others))
    head = (
        "latent attention",
        "sequences and context",
        "µs",
        "of the copies' and the product's rate",
        "whole stretches",
        "plain kernel",
        "PyTorch",
    )
    return table(head, rows)


def products(ops: Bench) -> str:
    """One line a weight and one for the same in invariant mode, one column a number of rows."""
    cells: dict[str, dict[str, str]] = {}
    columns = "|".join(map(str, LINEARS))
    plain = rf"(?:invariant )?linear bfloat16 M=({columns}) (\S+)"
    fused = rf"norm, linear, gate as (one op|three ops) M=({columns}) (\S+)"
    shapes = {match[2]: None for match in ops.matches(plain)}
    for shape in shapes:
        for kind, prefix in (("", ""), (", invariant", "invariant ")):
            for m in LINEARS:
                add_product(
                    cells, f"{shape}{kind}", m, ops, f"{prefix}linear bfloat16 M={m} {shape}"
                )
    fused_shapes = {(match[3], match[1]): None for match in ops.matches(fused)}
    for shape, kind in fused_shapes:
        for m in LINEARS:
            name = f"norm, linear, gate as {kind} M={m} {shape}"
            add_product(cells, f"{shape} with norm and gate, {kind}", m, ops, name)
    return pivot("product in bf16, µs (share of the limit)", cells)


def products_by_kernel(bench: Bench) -> str:
    """One line a weight and kernel, one column a number of rows."""
    cells: dict[str, dict[str, str]] = {}
    for match in bench.matches(r"(?:(\S+): )?linear bfloat16 M=(\d+) (\S+)"):
        line = f"{match[3]}, {match[1] or 'as by default'}"
        add_product(cells, line, int(match[2]), bench, match[0])
    return pivot("product in bf16 by kernel, µs (share of the limit)", cells)


def add_product(cells: dict[str, dict[str, str]], line: str, m: int, ops: Bench, name: str) -> None:
    if name in ops.rows:
        share = ops.rows[name]["share_of_gpu"]
        cells.setdefault(line, {})[f"M={m}"] = f"{ops.us(name)} ({share:.0%})"


def other_ops(ops: Bench) -> str:
    wanted = (
        r"(rms_norm|gated_activation|norms, rotary, cache|sample|link|hand-over|weights to the GPU)"
        r" ?.*"
    )
    rows = []
    for match in ops.matches(wanted):
        row = ops.rows[match[0]]
        name = match[0].removesuffix(" (share of the link)")
        rows.append((name, number(row["us"]), number(row["gb_per_s"])))
    return table(("other ops", "µs", "GB/s"), rows)


def changes(before: Bench, now: Bench) -> str:
    rows = []
    for match in (match for pattern in CHANGED for match in before.matches(pattern)):
        name = match[0]
        if name not in now.rows:
            continue
        ratio = before.rows[name]["us"] / now.rows[name]["us"]
        rival = f"torch: {name}"
        torch = (now if rival in now.rows else before).us(rival)
        label = name.removesuffix(" (share of the link)")
        rows.append((label, before.us(name), now.us(name), f"{ratio:.1f}", torch))
    head = ("op of Qwen3-0.6B", "first run, µs", "now, µs", "times as fast", "PyTorch, µs")
    return table(head, rows)


def model_table(models: dict[str, Bench]) -> str:
    rows = []
    for label, name, kind in MODELS:
        cells = [model_cell(bench, f"{name}, {model}", kind) for model, bench in models.items()]
        if any(cell != "-" for cell in cells):
            rows.append((label, *cells))
    return table(("model in bf16 (share of the bound)", *models), rows)


def model_cell(bench: Bench, name: str, kind: str) -> str:
    row = bench.rows.get(name)
    if row is None:
        return "-"
    if kind == "host":
        return number(row["us"])
    if kind == "load":
        return number(row["gb_per_s"])
    value = row["tokens_per_s"] if kind == "tokens" else row["us"]
    return f"{number(value)} ({row['share_of_gpu']:.0%})"


def format_table(bench: Bench) -> str:
    """One line a weight and format, one column a number of rows."""
    cells: dict[str, dict[str, str]] = {}
    for match in bench.matches(r"quantized (.*) M=(\d+) (\S+)"):
        if int(match[2]) in FORMAT_ROWS:
            of_line = cells.setdefault(f"{match[3]}, {match[1]}", {})
            of_line[f"M={match[2]}"] = bench.us(match[0])
    return pivot("product by the weight's format, µs", cells)


def form_table(benches: list[Bench]) -> str:
    """One line a form of the weights or the cache."""
    rows, model = [], ""
    for bench in benches:
        for match in bench.matches(r"(.*): decode batch 1, (.*)"):
            form, model = match[1], match[2]
            cells = [
                model_cell(bench, f"{form}: {name}, {model}", kind)
                for _, name, kind in FORM_COLUMNS
            ]
            rows.append((form, *cells))
    head = (f"{model} by form (share of the bound)", *(label for label, _, _ in FORM_COLUMNS))
    return table(head, rows)


def edit_table(benches: list[Bench]) -> str:
    """Steps whose rows are edited, and the host's part."""
    rows = []
    for bench in benches:
        for match in bench.matches(r"a step of (\d+) with (.*), (.*)"):
            host = bench.us(f"the host's own time, {match[0]}")
            rows.append((f"{match[3]}, {match[1]} sequences, {match[2]}", bench.us(match[0]), host))
    return table(("a step with edits of logits", "µs", "the host's own part, µs"), rows)


def server_table(benches: list[Bench]) -> str:
    """The server beside its own engine."""
    rows = []
    for bench in benches:
        for match in bench.matches(r"(\d+) streams by the engine, (.*)"):
            streams, model = match[1], match[2]
            served = bench.rows.get(f"{streams} streams by the server, {model}")
            if served is None:
                continue
            rows.append(
                (
                    f"{model}, {streams} streams",
                    number(bench.rows[match[0]]["tokens_per_s"]),
                    number(served["tokens_per_s"]),
                    bench.us(f"the event loop's time a token of {streams} streams, {model}"),
                    bench.us(f"a step of {streams} streams, {model}"),
                    bench.us(f"the host's own time, a step of {streams} streams, {model}"),
                )
            )
    head = ("streams", "engine, tokens/s", "server, tokens/s", "event loop a token, µs")
    return table((*head, "step, µs", "the host's own part, µs"), rows)


def peer_table(bench: Bench) -> str:
    rows = []
    for match in bench.matches(r"(.*): decode batch 1, (.*)"):
        cells = [
            model_cell(bench, f"{match[1]}: {name}, {match[2]}", kind)
            for _, name, kind in PEER_COLUMNS
        ]
        rows.append((f"{match[1]}, {match[2]}", *cells))
    head = ("in one run (share of the bound)", *(label for label, _, _ in PEER_COLUMNS))
    return table(head, rows)


def pivot(label: str, cells: dict[str, dict[str, str]]) -> str:
    columns = list(dict.fromkeys(column for line in cells.values() for column in line))
    columns.sort(key=lambda column: int(re.sub(r"\D", "", column)))
    rows = [
        (line, *(of_column.get(column, "-") for column in columns))
        for line, of_column in cells.items()
    ]
    return table((label, *columns), rows)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Without the columns that nothing was measured of; nothing if there are no rows."""
    rows = list(rows)
    kept = [i for i in range(len(head)) if any(row[i] != "-" for row in rows)]
    lines = [head, ("---",) * len(head), *rows]
    if not rows:
        return ""
    return "\n".join("| " + " | ".join(line[i] for i in kept) + " |" for line in lines)


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
