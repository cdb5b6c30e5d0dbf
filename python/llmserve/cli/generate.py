"""`llmserve generate`: continues one prompt and writes the text as it comes."""

import argparse
import dataclasses
import sys
from typing import TextIO

from llmserve.checkpoint.model_files import demo_model_path
from llmserve.cli.console import dim, printable
from llmserve.cli.options import (
    add_engine_options,
    add_sampling_options,
    draw_seed,
    figures,
    load_model,
    sampling_params,
)
from llmserve.errors import InvalidArgument
from llmserve.llm import LLM
from llmserve.outputs import CompletionOutput, RequestOutput
from llmserve.requests.generation_config import own_max_tokens
from llmserve.sampling_params import RequestOutputKind, SamplingParams

_EXAMPLES = """examples:
  llmserve generate "Once upon a time"
  llmserve generate --temperature 0 --max-tokens 40 "Once upon a time"
  llmserve generate --n 3 --seed 7 --quiet "The fox"
  echo "Once upon a time" | llmserve generate --model ./Llama-3.2-1B --dtype bfloat16
"""

_MAX_TOKENS = 256


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continues PROMPT and writes the text to stdout as it comes, then a line of "
        "figures to stderr. Sampling parameters default to the model's generation_config.json, and "
        "the seed is drawn at each start.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="text; without it, stdin")
    parser.add_argument(
        "--model", metavar="DIR", help="checkpoint directory, or Hub id (default: the demo)"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"default: the model's own, at most {_MAX_TOKENS}",
    )
    add_sampling_options(parser)
    parser.add_argument("--n", type=int, metavar="N", help="how many continuations (default 1)")
    parser.add_argument("--ignore-eos", action="store_true", help="run on past the model's end")
    add_engine_options(parser)
    parser.add_argument("--quiet", action="store_true", help="no line of figures")


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    prompt = _prompt(options.prompt)
    model = demo_model_path() if options.model is None else options.model
    draw_seed(options)
    with load_model(options, model) as llm:
        params = _params(options, llm.get_default_sampling_params())
        last = _stream(llm, prompt, params) if params.n == 1 else _sections(llm, prompt, params)
    if not options.quiet:
        dim(sys.stderr, figures(last))
    for completion in last.outputs:
        if completion.error is not None:
            print(f"llmserve: {completion.error}", file=sys.stderr)
    return 1 if any(c.error is not None for c in last.outputs) else 0


def _prompt(argument: str | None) -> str:
    if argument is not None:
        return argument
    if sys.stdin.isatty():
        raise InvalidArgument('generate needs a prompt: llmserve generate "Once upon a time"')
    return sys.stdin.read().removesuffix("\n")


def _params(options: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    max_tokens = options.max_tokens
    if max_tokens is None:
        max_tokens = min(own_max_tokens(defaults) or _MAX_TOKENS, _MAX_TOKENS)
    more = {"n": options.n, "ignore_eos": options.ignore_eos}
    return sampling_params(options, defaults, max_tokens, **more)


def _stream(llm: LLM, prompt: str, params: SamplingParams) -> RequestOutput:
    """Writes one continuation as it comes, after the prompt where a person is reading."""
    out = sys.stdout
    if out.isatty():
        dim(out, printable(prompt), end="")
    last = None
    try:
        for last in llm.stream(prompt, params):
            _write(out, last.outputs[0])
    finally:
        print(file=out, flush=True)
    assert last is not None  # a stream ends with a finished output
    return last


def _sections(llm: LLM, prompt: str, params: SamplingParams) -> RequestOutput:
    """Writes several continuations one after another."""
    final = dataclasses.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
    (last,) = llm.stream(prompt, final)
    for completion in last.outputs:
        print(f"--- {completion.index + 1} of {params.n}")
        _write(sys.stdout, completion)
        print()
    return last


def _write(out: TextIO, completion: CompletionOutput) -> None:
    out.write(printable(completion.text) if out.isatty() else completion.text)
    out.flush()
