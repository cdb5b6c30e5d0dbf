"""`llmserve eval perplexity`: how well a model foresees a text, and what quantization changes."""

import argparse
import json
import time
from typing import Any

from llmserve.bench.perplexity import measure_perplexity, windows_of
from llmserve.cli import eval_choices, eval_compare
from llmserve.cli.eval_text import ProgressBar, read_eval_text
from llmserve.cli.model_argument import add_model_argument, model_of
from llmserve.cli.options import (
    add_engine_options,
    add_short_flags,
    engine_arguments,
    load_model,
)
from llmserve.common.arguments import integer
from llmserve.errors import InvalidArgument
from llmserve.llm import LLM

_EXAMPLES = """examples:
  llmserve eval perplexity
  llmserve eval perplexity --quantization int8
  llmserve eval perplexity --quantization int8,int4,int4-g32 --text book.txt
  llmserve eval perplexity ./Qwen3-0.6B --text book.txt --max-tokens 20000 --json

The text is cut into windows of --context tokens, one every --stride; each token counts once, in the
first window that has it. With --quantization the model is measured without any as well, which is
the base of every change; of blocks in a GGUF file that is their values in floats.
"""
_BASE = "none"  # LLM(quantization=...)
_CONTEXT = 1024


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser("eval", help="measure what a model and its quantization are worth")
    kinds = parser.add_subparsers(title="evaluations", metavar="EVALUATION", required=True)
    eval_compare.add_parser(kinds)
    eval_choices.add_parser(kinds)
    perplexity = kinds.add_parser(
        "perplexity",
        help="of a text, with any quantization",
        description="Measures perplexity: exp of the mean negative log-probability a token.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    perplexity.set_defaults(run=run)
    add_model_argument(perplexity)
    perplexity.add_argument(
        "--text", metavar="FILE", help="UTF-8 text (default: the demo's held-out stories)"
    )
    for name, text in (
        ("context", f"tokens a window (default: {_CONTEXT}, or the model's maximum)"),
        ("stride", "tokens from window to window (default: half a window)"),
        ("max-tokens", "of the text (default: all)"),
    ):
        perplexity.add_argument(f"--{name}", type=int, metavar="N", help=text)
    add_engine_options(perplexity)
    add_short_flags(perplexity)
    perplexity.add_argument("--json", action="store_true", help="everything, as JSON")
    perplexity.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    model = model_of(options)
    text = read_eval_text(options.text, model)
    names = _names(options)
    for name in names:  # all that can be said before the first is measured
        options.quantization = name
        _sizes(options, LLM.plan(model, **engine_arguments(options)).max_model_len)
    rows = []
    for name in names:
        options.quantization = name
        rows.append(_measure(options, model, text))
    for row in rows:
        has_base = rows[0]["quantization"] == _BASE
        row["change"] = row["perplexity"] / rows[0]["perplexity"] - 1 if has_base else None
    if options.json:
        print(json.dumps({"text_bytes": len(text.encode()), "rows": rows}, indent=2))
    else:
        _print(rows)
    return 0


def _names(options: argparse.Namespace) -> list[str | None]:
    """What is measured, each once: the base and what is asked for, or the model as it is stored."""
    if options.quantization is None:
        return [None]
    return list(dict.fromkeys([_BASE, *options.quantization.split(",")]))


def _measure(options: argparse.Namespace, model: object, text: str) -> dict[str, Any]:
    name = options.quantization
    begin = time.monotonic()
    with load_model(options, model) as llm:
        load_s = time.monotonic() - begin
        token_ids = llm.get_tokenizer().encode(text)
        if options.max_tokens is not None:
            token_ids = token_ids[: integer("--max-tokens", options.max_tokens, 2)]
        context, stride = _sizes(options, llm.max_model_len)
        windows = windows_of(len(token_ids), context, stride)
        total = sum(window.end - window.scored for window in windows)
        with ProgressBar(name or "perplexity", total, options.disable_tqdm) as bar:
            result = measure_perplexity(
                llm, token_ids, context=context, stride=stride, on_window=bar.advance
            )
        return {
            "quantization": name,
            "dtype": llm._config.dtype,
            "kv_cache_dtype": options.kv_cache_dtype,
            "perplexity": result.value,
            "mean_nll": result.mean_nll,
            "standard_error": result.standard_error,
            "num_tokens": result.num_tokens,
            "context": context,
            "stride": stride,
            "weight_bytes": llm._open_engine().memory_use.weight_bytes,
            "load_s": load_s,
            "measure_s": time.monotonic() - begin - load_s,
        }


def _sizes(options: argparse.Namespace, max_model_len: int) -> tuple[int, int]:
    longest = max_model_len - 1  # a request also makes a token
    if longest < 2:
        raise InvalidArgument(
            f"a window takes 2 tokens and the one that a request makes, and max_model_len is "
            f"{max_model_len}; pass --max-model-len 3 or more"
        )
    context = min(_CONTEXT, longest)
    if options.context is not None:
        context = integer("--context", options.context, 2, longest)
    stride = context // 2
    if options.stride is not None:
        stride = integer("--stride", options.stride, 1, context - 1)
    return context, stride


def _print(rows: list[dict[str, Any]]) -> None:
    print(f"{'quantization':<14} {'perplexity':>11} {'change':>9} {'tokens':>8} {'weights':>12}")
    for row in rows:
        change = "-" if row["change"] is None else f"{row['change']:+.2%}"
        if row["quantization"] == _BASE:
            change = "base"
        print(
            f"{row['quantization'] or 'as stored':<14} {row['perplexity']:>11.4f} "
            f"{change:>9} {row['num_tokens']:>8} {row['weight_bytes'] / 2**20:>8.1f} MiB"
        )
    if rows[0]["quantization"] == _BASE:
        print(f"base: the same text with weights in {rows[0]['dtype']}")
