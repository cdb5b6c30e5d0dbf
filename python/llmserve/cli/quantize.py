"""`llmserve quantize MODEL OUT`: a smaller model in a folder that others load, too."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmserve.checkpoint.model_files import demo_model_path
from llmserve.common.units import human_bytes, parse_bytes
from llmserve.errors import InvalidArgument
from llmserve.quantization.options import ACTIVATIONS, KV_CACHES, QuantizeOptions
from llmserve.quantization.resume import is_quantized
from llmserve.quantization.schemes import METHODS, OBSERVERS, SCHEMES

if TYPE_CHECKING:
    from llmserve.quantization.report import Report
    from llmserve.quantization.result import QuantizeResult

_EXAMPLES = """examples:
  llmserve quantize demo-int4 --scheme int4
  llmserve quantize ./Qwen3-0.6B ./Qwen3-0.6B-int4 --calibration chats.jsonl
  llmserve quantize ./Qwen3-0.6B ./Qwen3-0.6B-w8a8 --scheme w8a8 --calibration text.txt
  llmserve quantize ./Qwen3-0.6B ./Qwen3-0.6B-fp8 --scheme fp8 --kv-cache fp8 --calibration text.txt
  llmserve quantize ./Qwen3-0.6B qwen.gguf --scheme gguf:Q4_K_M
  llmserve quantize ./Qwen3-0.6B ./Qwen3-0.6B-rtn --scheme int8 --method rtn --ignore 're:.*down.*'

A run that was killed goes on where it stopped: give the same command again.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    lines = "\n".join(f"  {scheme.name:<10} {scheme.summary}" for scheme in SCHEMES)
    lines += "\n  gguf:TYPE  one file for llama.cpp: Q4_K_M, Q5_K_M, Q6_K, Q8_0 and others"
    parser = commands.add_parser(
        "quantize",
        help="make a model smaller: int8, int4, fp8, fp4",
        description="Rounds a model's linear layers, one decoder layer at a time.\n\nschemes:\n"
        + lines,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    defaults = {field.name: field.default for field in dataclasses.fields(QuantizeOptions)}
    parser.add_argument(
        "words", nargs="+", metavar="MODEL OUT", help="a folder of safetensors or a Hub id (left "
        "out: the demo), and the folder that is written",
    )  # fmt: skip
    parser.add_argument("--scheme", default=defaults["scheme"], metavar="NAME", help="see above")
    parser.add_argument(
        "--method", default="auto", choices=METHODS, help="how weights are rounded (default: auto)"
    )
    parser.add_argument(
        "--calibration", metavar="FILE", help="text, or JSONL with text, messages, or prompt and "
        "completion, of the model's use (default: the demo's own text for the demo)",
    )  # fmt: skip
    for name, text in (
        ("num-samples", "sequences of the text"),
        ("max-length", "tokens of a sequence"),
        ("group-size", "of integers: weights that share a scale; 0 is a whole row"),
        ("num-threads", "how many compute (default: all)"),
        ("seed", "draws documents of a JSONL file"),
    ):
        default = defaults[name.replace("-", "_")]
        said = "" if default is None or "default" in text else f" (default: {default})"
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text + said)
    for name, text in (
        ("alpha", "SmoothQuant's share of the activations"),
        ("damp", "GPTQ's share of the mean diagonal"),
        ("percentile", "of static int8 activations"),
    ):
        parser.add_argument(
            f"--{name}", type=float, default=defaults[name], metavar="X",
            help=f"{text} (default: {defaults[name]})",
        )  # fmt: skip
    parser.add_argument(
        "--ignore", action="append", metavar="NAME", help="a layer that stays as it is: its name, "
        "the end of it, a pattern with *, or re:REGEX; may be given again (default: lm_head)",
    )  # fmt: skip
    parser.add_argument(
        "--kv-cache", default="auto", choices=KV_CACHES, help="fp8: scales of keys and values"
    )
    parser.add_argument(
        "--activations", default="dynamic", choices=ACTIVATIONS,
        help="static: one scale a layer, of the text, instead of one a token",
    )  # fmt: skip
    parser.add_argument(
        "--observer", default=defaults["observer"], choices=OBSERVERS,
        help="where a static scale's range ends (default: percentile)",
    )  # fmt: skip
    parser.add_argument(
        "--target-bits", type=float, metavar="X", help="bits a weight on average: layers that need "
        "more than the scheme's get them",
    )  # fmt: skip
    parser.add_argument(
        "--target-size", metavar="SIZE", help="likewise, as bytes of all tensors: 700MB"
    )
    parser.add_argument(
        "--no-act-order", dest="act_order", action="store_false",
        help="GPTQ takes columns as they lie, not the largest inputs' first",
    )  # fmt: skip
    parser.add_argument(
        "--eval-text", metavar="FILE", help="another text, to measure with before and after "
        "(default: the demo's held-out stories for the demo)",
    )  # fmt: skip
    parser.add_argument(
        "--no-report", dest="report", action="store_false", help="measure and write no report"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what OUT has")
    parser.add_argument(
        "--no-resume", dest="resume", action="store_false", help="begin anew after a kill"
    )
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    from llmserve.quantization import make_pipeline, report_on  # NumPy: no other command's

    model, out = _words(options.words)
    names = {field.name for field in dataclasses.fields(QuantizeOptions)}
    given = {name: value for name, value in vars(options).items() if name in names}
    if options.target_size is not None:
        given["target_size"] = parse_bytes("--target-size", options.target_size)
    given["ignore"] = ("lm_head",) if options.ignore is None else tuple(options.ignore)

    def bar(total: int, done: int) -> Any:
        if options.disable_tqdm or not sys.stderr.isatty():
            return None
        from tqdm.auto import tqdm

        return tqdm(total=total, initial=done, unit="step", dynamic_ncols=True, desc="quantize")

    pipeline = make_pipeline(
        model,
        out,
        QuantizeOptions(**given),
        say=lambda text: print(text, file=sys.stderr),
        bar=bar,
    )
    settings = pipeline.options
    try:
        result = pipeline.run()
    except KeyboardInterrupt:
        print("the same command goes on after the last whole layer", file=sys.stderr)
        raise
    report = report_on(result, pipeline.model, settings) if settings.report else None
    if options.json:
        print(json.dumps(dataclasses.asdict(result), indent=2, default=str))
    else:
        _print(result)
        _print_report(report)
    return 0


def _words(words: list[str]) -> tuple[str | Path, str]:
    if len(words) > 2:
        raise InvalidArgument(f"expected MODEL and OUT, got {len(words)} words: {' '.join(words)}")
    is_model = (Path(words[0]) / "config.json").exists() and not is_quantized(Path(words[0]))
    if len(words) == 1 and is_model:
        raise InvalidArgument(
            f"{words[0]} is a model's folder; pass the folder to write behind it: MODEL OUT"
        )
    return (demo_model_path(), words[0]) if len(words) == 1 else (words[0], words[1])


def _print(result: "QuantizeResult") -> None:
    share = result.bytes_before / max(result.bytes_after, 1)
    print(
        f"{result.out}: {result.scheme} by {result.method}, {len(result.schemes)} linear layers of "
        f"{result.bits_per_weight:.2f} bits a weight"
    )
    print(
        f"tensors: {human_bytes(result.bytes_before)} -> {human_bytes(result.bytes_after)} "
        f"({share:.2f}x smaller), in {result.seconds:.0f} s"
    )
    if not result.errors:
        return
    errors = sorted(result.errors.items(), key=lambda item: -item[1])
    mean = sum(error for _, error in errors) / len(errors)
    name, worst = errors[0]
    print(f"relative error of outputs: {mean:.2e} on average, most {worst:.2e} in {name}")
    for note in result.notes:
        print(f"note: {note}")


def _print_report(report: "Report | None") -> None:
    if report is None:
        return
    for row in report.rows:
        change = "" if row.change is None else f", {row.change:+.2%}, KL {row.mean_kl:.5f}"
        print(f"perplexity {row.name}: {row.perplexity:.4f}{change}")
    if report.reason:
        print(report.reason)
    print(f"report: {report.folder / 'quantize-report.html'}")
