"""What `llmserve quantize` loses, takes and gains of a model, scheme by scheme.

    python -m tools.demo_model.corpus --documents 200 --seed 4000037 --out build/text.txt
    python benchmarks/bench_quantization.py quality demo --text build/text.txt --work build/quant
    python benchmarks/bench_quantization.py speed demo --work build/quant
    python benchmarks/bench_quantization.py report

`quality` makes each row's model in --work, once, and sets its predictions beside the model's own in
bfloat16; `speed` runs all rows by turns, so that a ratio is of the same seconds. Both write into
benchmarks/results/quantization-NAME.json, row by row, and go on where they were stopped. `report`
writes the tables of docs/quantization.md from these files.
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
from llmserve.bench.speed import measure_speed
from llmserve.checkpoint.model_files import demo_calibration_path
from peers import page

PAGE = page.ROOT / "docs" / "quantization.md"
ROWS = (
    "rtn:int8", "rtn:int4", "awq:int4", "gptq:int4", "gptq:int4-asym", "smoothquant+gptq:w8a8",
    "rtn:fp8", "rtn:fp8-block", "rtn:nvfp4", "rtn:mxfp4",
)  # fmt: skip
_BASE = {"quantization": "none", "num_gpu_blocks_override": 256}


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
            with LLM(args.work / name, num_threads=args.threads, **_blocks()) as llm:
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


def _blocks() -> dict[str, Any]:
    return {"num_gpu_blocks_override": _BASE["num_gpu_blocks_override"]}


def speed(args: argparse.Namespace, report: dict[str, Any], path: Path) -> None:
    names = [name for name in args.rows if name in report["rows"]]
    with ExitStack() as stack:
        threads = {"num_threads": args.threads}
        llms = {"none": stack.enter_context(LLM(args.model, **_BASE, **threads))}
        for name in names:
            llms[name] = stack.enter_context(LLM(args.work / name, **_blocks(), **threads))
        runs = {name: [measure_speed(llm) for _ in range(1)] for name, llm in llms.items()}
        for _ in range(args.rounds - 1):
            for name, llm in llms.items():
                runs[name].append(measure_speed(llm))
    report["speed_machine"] = describe_machine()
    base = runs.pop("none")
    report["prefill_per_s"] = statistics.median(run.prefill_per_s for run in base)
    report["decode_per_s"] = statistics.median(run.decode_per_s for run in base)
    for name, own in runs.items():
        pairs = list(zip(base, own, strict=True))
        report["rows"][name] |= {
            "prefill": statistics.median(b.prefill_per_s / a.prefill_per_s for a, b in pairs),
            "decode": statistics.median(b.decode_per_s / a.decode_per_s for a, b in pairs),
        }
    page.write_json(path, report)


def table(report: dict[str, Any]) -> str:
    """A report as the page shows it."""
    has_speed = any("decode" in row for row in report["rows"].values())
    lines = [
        f"{report['title']}, {report['tokens']:,} tokens; the speeds beside bfloat16's "
        f"{report['prefill_per_s']:,.0f} and {report['decode_per_s']:,.0f} tokens/s:"
        if has_speed
        else f"{report['title']}, {report['tokens']:,} tokens:",
        "",
        "| method, scheme | bits | perplexity | KL, nats | same first choice | weights"
        + (" | prompt | decode |" if has_speed else " |"),
        "| --- | --- | --- | --- | --- | ---" + (" | --- | --- |" if has_speed else " |"),
        f"| none | 16 | {report['perplexity']:.4f} | 0 | 100% | "
        f"{report['weight_bytes'] / 2**20:.1f} MiB" + (" | 1 | 1 |" if has_speed else " |"),
    ]
    for name, row in report["rows"].items():
        cells = [
            ", ".join(f"`{word}`" for word in name.split(":")),
            f"{row['bits']:.2f}",
            f"{row['change']:+.2%} ± {row['change_error']:.2%}",
            f"{row['mean_kl']:.5f}",
            f"{row['same_top']:.2%}",
            f"{row['weight_bytes'] / 2**20:.1f} MiB",
        ]
        if has_speed:
            cells += (
                [f"{row['prefill']:.2f}x", f"{row['decode']:.2f}x"]
                if "decode" in row
                else [
                    "",
                    "",
                ]
            )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("quality", "speed"):
        command = commands.add_parser(name)
        command.add_argument("model", help="demo, or a folder of safetensors")
        command.add_argument("--name", help="of the results (default: the model's)")
        command.add_argument("--title", help="of the table")
        command.add_argument("--work", type=Path, required=True, help="where models are made")
        command.add_argument("--rows", nargs="*", default=ROWS, metavar="METHOD:SCHEME")
        command.add_argument("--threads", type=int, default=2)
        if name == "quality":
            command.add_argument("--text", type=Path, required=True, help="to measure with")
            command.add_argument("--calibration", type=Path, default=demo_calibration_path())
            command.add_argument("--max-tokens", type=int, default=16000)
        else:
            command.add_argument("--rounds", type=int, default=5)
    writing = commands.add_parser("report")
    writing.add_argument("--check", action="store_true", help="only see whether it is written")
    args = parser.parse_args()
    if args.command == "report":
        page.update(
            PAGE, lambda text: page.with_tables(text, "quantization", table), check=args.check
        )
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
    if args.command == "quality":
        report["machine"] = describe_machine()
        quality(args, report, path)
    else:
        speed(args, report, path)


if __name__ == "__main__":
    main()
