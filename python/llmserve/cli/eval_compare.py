"""`llmserve eval compare`: formats and models beside a base, in one table."""

import argparse
import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from llmserve import _core
from llmserve.checkpoint.model_files import demo_model_path
from llmserve.cli.eval_text import ProgressBar, read_eval_text
from llmserve.cli.model_argument import MODEL_HELP
from llmserve.cli.options import add_engine_options, add_short_flags, engine_arguments
from llmserve.errors import InvalidArgument

_EXAMPLES = """examples:
  llmserve eval compare
  llmserve eval compare int8 int4
  llmserve eval compare ./Qwen3-0.6B int8 int4 --text book.txt
  llmserve eval compare ./Qwen3-0.6B ./Qwen3-0.6B-int4 --text book.txt --json
  llmserve eval compare ./Qwen3-0.6B gptq:int4 awq:int4 --calibration chats.jsonl --text book.txt

The first is the base, MODEL: left out it is the demo. Beside it stand others: a format of
--quantization, a model, or METHOD:SCHEME of `llmserve quantize`, which is made in a temporary
folder, or in --keep. Without any: int8, gptq:int4 and awq:int4. KL is of the base's predictions
from theirs, same top the share of tokens where both would choose the same.
"""
_DEFAULT = ("int8", "gptq:int4", "awq:int4")


def add_parser(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the evaluation to the parser."""
    parser = kinds.add_parser(
        "compare",
        help="formats and models side by side: perplexity, KL, memory, speed",
        description="Sets quantized models beside a base: perplexity, KL divergence, the share of "
        "equal first choices, bytes of weights, and speed alone.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("words", nargs="*", metavar="MODEL OTHER", help=MODEL_HELP)
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text to measure with")
    parser.add_argument(
        "--calibration", metavar="FILE", help="of METHOD:SCHEME: another text, to calibrate with"
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of the text (default: all)")
    parser.add_argument("--context", type=int, metavar="N", help="tokens a window (default: 512)")
    parser.add_argument("--keep", metavar="FOLDER", help="where what is quantized stays")
    add_engine_options(parser)
    add_short_flags(parser)
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def run(options: argparse.Namespace) -> int:
    """Runs the evaluation; returns the exit code."""
    from llmserve.bench.comparison import compare_models

    if options.quantization is not None:
        raise InvalidArgument("name formats as words behind MODEL, without --quantization")
    words = list(options.words)
    names_model = words and not _is_format(words[0])
    model: str | Path = words.pop(0) if names_model else demo_model_path()
    text = read_eval_text(options.text, model)
    for name in ("max_tokens", "context"):
        value = getattr(options, name)
        if value is not None and value < 2:
            raise InvalidArgument(f"--{name.replace('_', '-')} must be 2 or more, got {value}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.keep or scratch)
        candidates = _candidates(options, model, words or list(_DEFAULT), folder)
        with ProgressBar("compare", 0, options.disable_tqdm) as bar:
            rows = compare_models(
                candidates,
                text,
                max_tokens=options.max_tokens,
                context=options.context,
                on_tokens=lambda _, count: bar.advance(count),
            )
    if options.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    else:
        _print(rows)
    return 0


def _is_format(word: str) -> bool:
    """Whether it is a format or METHOD:SCHEME rather than a model."""
    from llmserve.quantization.schemes import METHODS

    formats = [name for name, _ in _core.supported_quantizations()]
    method, separator, _ = word.partition(":")
    return not os.path.exists(word) and (word in formats or (bool(separator) and method in METHODS))


def _candidates(
    options: argparse.Namespace, model: str | Path, others: list[str], folder: Path
) -> list[Any]:
    from llmserve.bench.comparison import Candidate
    from llmserve.quantization.schemes import find_scheme

    arguments = engine_arguments(options)
    out = [Candidate("base", model, {**arguments, "quantization": "none"})]
    for other in others:
        method, separator, scheme = other.partition(":")
        if _is_format(other) and not separator:
            out.append(Candidate(other, model, {**arguments, "quantization": other}))
        elif _is_format(other):
            find_scheme(scheme)
            made = _quantize(options, model, method, scheme, folder)
            out.append(Candidate(other, made, arguments))
        else:
            out.append(Candidate(Path(other).name or other, other, arguments))
    return out


def _quantize(
    options: argparse.Namespace, model: str | Path, method: str, scheme: str, folder: Path
) -> Path:
    from llmserve.quantization import quantize

    out = folder / f"{method.replace('+', '-')}-{scheme}"
    quantize(
        model,
        out,
        scheme=scheme,
        method=method,
        calibration=options.calibration,
        num_threads=options.num_threads,
        use_tqdm=False,
    )
    return out


def _print(rows: list[Any]) -> None:
    print(
        f"{'':<22} {'perplexity':>10} {'change':>9} {'KL':>9} {'same top':>9} {'weights':>11} "
        f"{'prompt':>11} {'decode':>10}"
    )
    for row in rows:
        change = "base" if row.change is None else f"{row.change:+.2%}"
        kl = "" if row.mean_kl is None else f"{row.mean_kl:.5f}"
        same = "" if row.same_top is None else f"{row.same_top:.2%}"
        print(
            f"{row.name:<22} {row.perplexity:>10.4f} {change:>9} {kl:>9} {same:>9} "
            f"{row.weight_bytes / 2**20:>7.1f} MiB {row.prefill_per_s:>7.0f} t/s "
            f"{row.decode_per_s:>6.1f} t/s"
        )
