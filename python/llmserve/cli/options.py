"""Options that commands have in common: which model, how it samples, and the line of figures."""

import argparse
import dataclasses
import os
from typing import Any

from llmserve.cli.command_parser import CommandParser, take_llm_arguments
from llmserve.errors import InvalidArgument
from llmserve.llm import LLM
from llmserve.options.engine_options import options_of
from llmserve.options.flags import add_flags
from llmserve.outputs import RequestOutput
from llmserve.sampling_params import SAMPLING_FIELDS, RequestOutputKind, SamplingParams

# The sampling parameters that are options.
_SAMPLING_OPTIONS = {
    name: (known.body, known.option)
    for name, known in SAMPLING_FIELDS.items()
    if known.body is not None and known.option
}

_SHORT_FLAGS = {
    "--max-tokens": ("-n", "--n-predict"),
    "--temperature": ("--temp",),
    "--seed": ("-s",),
    "--num-threads": ("-t",),
    "--max-model-len": ("-c", "--ctx-size"),
    "--prompt": ("-p",),
    "--file": ("-f",),
    "--system": ("-sys", "--system-prompt"),
    "--stop": ("-r", "--reverse-prompt"),
    "--quiet": ("-q",),
    "--json-schema": ("-j",),
}


def add_engine_options(
    parser: argparse.ArgumentParser, command: str = "run", default: object = None
) -> None:
    """The arguments of LLM that a command has: "run" is those that run a model."""
    take_llm_arguments(parser)
    group = parser.add_argument_group("arguments of LLM")
    add_flags(group, options_of(command), default)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen; what is not given is the model's own."""
    for name, (kind, text) in _SAMPLING_OPTIONS.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, metavar="X" if kind is float else "N", help=text)
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="ends the text; may be given again"
    )


def add_short_flags(parser: argparse.ArgumentParser) -> None:
    """The names that users of llama.cpp know, of what the command has."""
    assert isinstance(parser, CommandParser)
    for flag, names in _SHORT_FLAGS.items():
        parser.also(flag, *names)


def engine_arguments(options: argparse.Namespace, command: str = "run") -> dict[str, Any]:
    """The arguments of LLM, and of LLM.plan, that were given."""
    given = {option.name: getattr(options, option.name) for option in options_of(command)}
    return {name: value for name, value in given.items() if value is not None}


def add_draft_option(parser: argparse.ArgumentParser) -> None:
    """A short form of --speculative-config."""
    parser.add_argument(
        "--draft",
        metavar="MODEL",
        help="guess tokens with this smaller model of the same vocabulary, or with this head; "
        "`demo` is the demo model's; or by `ngram` or `suffix`",
    )


def _take_draft(options: argparse.Namespace) -> None:
    draft = getattr(options, "draft", None)
    if draft is None:
        return
    if options.speculative_config is not None:
        raise InvalidArgument("--draft is a short form of --speculative-config; give one of them")
    if draft in ("ngram", "suffix"):
        options.speculative_config = {"method": draft}
    else:
        options.speculative_config = {"model": draft}
    options.draft = None


def load_model(options: argparse.Namespace, model: object, **arguments: object) -> LLM:
    """The LLM that the options ask for."""
    _take_draft(options)
    return LLM(
        model,  # type: ignore[arg-type]  # LLM checks it
        **engine_arguments(options),
        **arguments,  # type: ignore[arg-type]
    )


def draw_seed(options: argparse.Namespace) -> None:
    """Where no --seed was given: else each start would tell the same story. What is said of an
    output has it."""
    if options.seed is None:
        options.seed = int.from_bytes(os.urandom(4), "little")


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
    guesses = ""
    if metrics.num_draft_tokens > 0:
        guesses = f", {metrics.num_accepted_tokens} of {metrics.num_draft_tokens} guesses right"
    reasons = ", ".join(sorted({c.finish_reason or "-" for c in output.outputs}))
    return (
        f"[{len(output.prompt_token_ids)} prompt tokens, {num_tokens} new tokens in {total_s:.2f} s"
        f" ({rate}){guesses}, first after {first_ms:.1f} ms, finished by {reasons}, "
        f"seed {output.outputs[0].seed}]"
    )
