"""Options that commands have in common: which model, how it samples, and the line of figures."""

import argparse
import dataclasses
from typing import Any

from llmserve import _core
from llmserve.cli.command_parser import take_llm_arguments
from llmserve.common.units import size
from llmserve.llm import LLM
from llmserve.outputs import RequestOutput
from llmserve.sampling_params import SAMPLING_FIELDS, RequestOutputKind, SamplingParams

# The sampling parameters that are options.
_SAMPLING_OPTIONS = {
    name: (known.body, known.option)
    for name, known in SAMPLING_FIELDS.items()
    if known.body is not None and known.option
}


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """How the model is loaded."""
    take_llm_arguments(parser)
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit on the Hub")
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="another folder with a tokenizer, or the file of one"
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    add_quantization(parser)
    parser.add_argument(
        "--kv-cache-dtype", default="auto", metavar="NAME", help="auto, float32, bfloat16 or fp8"
    )
    parser.add_argument("--device", default="auto", help="auto, cuda, cpu or ref (slow reference)")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="prompt and output together")
    parser.add_argument(
        "--num-threads", "--threads", type=int, metavar="N", help="default: all cores"
    )
    parser.add_argument(
        "--packed-cache-bytes",
        "--packed-cache",
        type=size,
        metavar="SIZE",
        help="keep packed weights for a quicker next start, e.g. 20GiB for all models; "
        "see llmserve cache",
    )


def add_quantization(parser: argparse.ArgumentParser) -> None:
    """What linear layers are rounded to."""
    names = ", ".join(name for name, _ in _core.supported_quantizations())
    parser.add_argument(
        "--quantization", metavar="NAME", help=f"round weights to {names}; none: floats"
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen; what is not given is the model's own."""
    for name, (kind, text) in _SAMPLING_OPTIONS.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, metavar="X" if kind is float else "N", help=text)
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="ends the text; may be given again"
    )


def engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of LLM, and of LLM.plan, that these options are."""
    return {
        "revision": options.revision,
        "tokenizer": options.tokenizer,
        "dtype": options.dtype,
        "quantization": options.quantization,
        "kv_cache_dtype": options.kv_cache_dtype,
        "device": options.device,
        "max_model_len": options.max_model_len,
        "num_threads": options.num_threads,
        "packed_cache_bytes": options.packed_cache_bytes,
    }


def load_model(options: argparse.Namespace, model: object, **arguments: object) -> LLM:
    """The LLM that the options ask for."""
    return LLM(
        model,  # type: ignore[arg-type]  # LLM checks it
        **engine_arguments(options),
        **arguments,  # type: ignore[arg-type]
    )


def sampling_params(
    options: argparse.Namespace, defaults: SamplingParams, max_tokens: int | None, **more: object
) -> SamplingParams:
    """Those of the options over those of the model, in deltas."""
    given = {name: getattr(options, name) for name in _SAMPLING_OPTIONS}
    given = {**given, "stop": options.stop, **more}
    return dataclasses.replace(
        defaults,
        max_tokens=max_tokens,
        output_kind=RequestOutputKind.DELTA,
        **{name: value for name, value in given.items() if value is not None},
    )


def figures(output: RequestOutput) -> str:
    """'[5 prompt tokens, 9 new tokens in 0.10 s (90.0 tok/s), ...]'."""
    metrics = output.metrics
    num_tokens = metrics.num_generation_tokens
    first_ms = (metrics.first_token_ts - metrics.queued_ts) * 1e3
    total_s = metrics.last_token_ts - metrics.queued_ts
    rate = f"{num_tokens / total_s:.1f} tok/s" if total_s > 0 else "- tok/s"
    reasons = ", ".join(sorted({c.finish_reason or "-" for c in output.outputs}))
    return (
        f"[{len(output.prompt_token_ids)} prompt tokens, {num_tokens} new tokens in {total_s:.2f} s"
        f" ({rate}), first after {first_ms:.1f} ms, finished by {reasons}]"
    )
