"""What `llmserve quantize` loses, takes and gains of a model, scheme by scheme.

    python -m tools.demo_model.corpus --documents 200 --seed 4000037 --out build/text.txt
    python benchmarks/bench_quantization.py quality demo --text build/text.txt --work build/quant
    python benchmarks/bench_quantization.py speed --work build/quant
    python benchmarks/bench_quantization.py report

`quality` makes each row's model in --work, once, and sets its predictions beside the model's own in
bfloat16, row by row into benchmarks/results/quantization-NAME.json, and goes on where it was
stopped. `speed` runs a shape of random weights in each scheme by turns, so that a ratio is of the
same seconds. `report` writes the tables of docs/quantization.md from these files.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from llmserve import LLM, demo_model_path, quantize
from llmserve.bench.comparison import CONTEXT
from llmserve.bench.divergence import measure_divergence
from llmserve.bench.machine import describe_machine
from llmserve.bench.perplexity import measure_perplexity
from llmserve.bench.speed import Speed, measure_speed
from llmserve.checkpoint.model_files import demo_calibration_path
from peers import page
from random_models import SHAPES, write_checkpoint

PAGE = page.ROOT / "docs" / "quantization.md"
SPEED = page.RESULTS / "quantize-speed.json"
ROWS = (
    "rtn:int8", "rtn:int4", "awq:int4", "gptq:int4", "gptq:int4-asym", "smoothquant+gptq:w8a8",
    "rtn:fp8", "rtn:fp8-block", "rtn:nvfp4", "rtn:mxfp4",
)  # fmt: skip
_CACHE = {"max_model_len": 1024, "num_gpu_blocks_override": 256}
_BASE = {"quantization": "none", **_CACHE}


def quality(args: argparse.Namespace, report: dict[str, Any], path: Path) -> None:
    text = args.text.read_text(encoding="utf-8")
    with LLM(args.model, **_BASE, num_threads=args.threads) as base:
        token_ids = base.get_tokenizer().encode(text)[: args.max_tokens]
        sizes = {"context": CONTEXT, "stride": CONTEXT // 2}
        own = measure_perplexity(base, token_ids, **sizes)
        report |= {
            "tokens": own.num_tokens,
            "perplexity": own.value,
            "weight_bytes": base.get_memory_use().weight_bytes,
            "calibration_tokens": 0,
        }
        for name in args.rows:
            row = report["rows"].setdefault(name, {})
            if "perplexity" in row:
                continue
            row |= make(args, name)
            report["calibration_tokens"] = max(
                report["calibration_tokens"], row.pop("calibration_tokens")
            )
            with LLM(args.work / name, num_threads=args.threads, **_CACHE) as llm:
                divergence = measure_divergence(base, llm, token_ids, **sizes)
                row |= {
                    "perplexity": divergence.other.value,
                    "change": divergence.change,
                    "change_error": divergence.change_error,
                    "mean_kl": divergence.mean_kl,
                    "kl_99": divergence.kl_99,
                    "same_top": divergence.same_top,
                    "weight_bytes": llm.get_memory_use().weight_bytes,
                    "runs": llm.description,
                }
            page.write_json(path, report)


def make(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Quantizes the row's model if it is not there yet; what it took."""
    folder = args.work / name
    kept = args.work / f"{name}.json"
    if not kept.exists():
        method, _, scheme = name.partition(":")
        result = quantize(
            args.model, folder, scheme=scheme, method=method, calibration=args.calibration,
            num_threads=args.threads, report=False, use_tqdm=False,
        )  # fmt: skip
        fields = dataclasses.asdict(result)
        taken = {
            "bits": fields["bits_per_weight"],
            "seconds": fields["seconds"],
            "calibration_tokens": fields["num_tokens"],
        }
        kept.write_text(json.dumps(taken), encoding="utf-8")
    return dict(json.loads(kept.read_text(encoding="utf-8")))


def speed(args: argparse.Namespace) -> None:
    """Of a shape with random weights: how fast a scheme is depends on no method."""
    folder = args.work / args.shape
    if not (folder / "none" / "config.json").exists():
        write_checkpoint(folder / "none", args.shape)
    args.model, args.work, args.calibration = folder / "none", folder, None
    names = list(dict.fromkeys(f"rtn:{name.partition(':')[2]}" for name in ROWS))
    taken = {name: make(args, name) for name in names}
    with ExitStack() as stack:
        threads = {"num_threads": args.threads}
        llms = {"none": stack.enter_context(LLM(folder / "none", **_BASE, **threads))}
        for name in names:
            llms[name] = stack.enter_context(LLM(folder / name, **_CACHE, **threads))
        runs: dict[str, list[Speed]] = {name: [] for name in llms}
        for _ in range(args.rounds):
            for name, llm in llms.items():
                runs[name].append(measure_speed(llm))
        bytes_of = {name: llm.get_memory_use().weight_bytes for name, llm in llms.items()}
    base = runs["none"]
    rows = {}
    for name in names:
        pairs = list(zip(base, runs[name], strict=True))
        rows[name.partition(":")[2]] = {
            "bits": taken[name]["bits"],
            "weight_bytes": bytes_of[name],
            "prefill": statistics.median(b.prefill_per_s / a.prefill_per_s for a, b in pairs),
            "decode": statistics.median(b.decode_per_s / a.decode_per_s for a, b in pairs),
        }
    report = {
        "machine": describe_machine(),
        "shape": args.shape,
        "rounds": args.rounds,
        "weight_bytes": bytes_of["none"],
        "prefill_per_s": statistics.median(run.prefill_per_s for run in base),
        "decode_per_s": statistics.median(run.decode_per_s for run in base),
        "rows": rows,
    }
    page.write_json(SPEED, report)


def table(report: dict[str, Any]) -> str:
    """A report as the page shows it, with the speeds of the shape that was measured."""
    speeds = json.loads(SPEED.read_text(encoding="utf-8")) if SPEED.exists() else {"rows": {}}
    beside = ""
    if speeds["rows"]:
        beside = (
            f" (speeds: {speeds['shape']} with random weights, {speeds['rounds']} rounds, beside "
            f"{speeds['prefill_per_s']:,.0f} and {speeds['decode_per_s']:,.0f} tokens/s in "
            f"bfloat16)"
        )
    lines = [
        f"{report['title']}, {report['tokens']:,} tokens{beside}:",
        "",
        "| method, scheme | bits | perplexity | KL, nats | same first choice | weights | prompt "
        "| decode |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        f"| none | 16 | {report['perplexity']:.4f} | 0 | 100% | "
        f"{report['weight_bytes'] / 2**20:.1f} MiB | 1 | 1 |",
    ]
    for name, row in report["rows"].items():
        if "perplexity" not in row:
            continue
        fast = speeds["rows"].get(name.partition(":")[2])
        cells = [
            ", ".join(f"`{word}`" for word in name.split(":")),
            f"{row['bits']:.2f}",
            f"{row['change']:+.2%} ± {row['change_error']:.2%}",
            f"{row['mean_kl']:.5f}",
            f"{row['same_top']:.2%}",
            f"{row['weight_bytes'] / 2**20:.1f} MiB",
            f"{fast['prefill']:.2f}x" if fast else "",
            f"{fast['decode']:.2f}x" if fast else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("quality")
    command.add_argument("model", help="demo, or a folder of safetensors")
    command.add_argument("--name", help="of the results (default: the model's)")
    command.add_argument("--title", help="of the table")
    command.add_argument("--rows", nargs="*", default=ROWS, metavar="METHOD:SCHEME")
    command.add_argument("--text", type=Path, required=True, help="to measure with")
    command.add_argument("--calibration", type=Path, default=demo_calibration_path())
    command.add_argument("--max-tokens", type=int, default=16000)
    timing = commands.add_parser("speed")
    timing.add_argument("--shape", choices=SHAPES, default="llama-110m")
    timing.add_argument("--rounds", type=int, default=5)
    for each in (command, timing):
        each.add_argument("--work", type=Path, required=True, help="where models are made")
        each.add_argument("--threads", type=int, default=2)
    writing = commands.add_parser("report")
    writing.add_argument("--check", action="store_true", help="only see whether it is written")
    args = parser.parse_args()
    if args.command == "report":
        page.update(
            PAGE, lambda text: page.with_tables(text, "quantization", table), check=args.check
        )
        return
    if args.command == "speed":
        speed(args)
        return
    name = args.name or Path(args.model).name
    if args.model == "demo":
        args.model = demo_model_path()
    path = page.RESULTS / f"quantization-{name}.json"
    report: dict[str, Any] = {"title": args.title or name, "rows": {}}
    if path.exists():
        report = json.loads(path.read_text(encoding="utf-8"))
    if args.title:
        report["title"] = args.title
    args.work = args.work / name
    args.work.mkdir(parents=True, exist_ok=True)
    report["machine"] = describe_machine()
    quality(args, report, path)


if __name__ == "__main__":
    main()
