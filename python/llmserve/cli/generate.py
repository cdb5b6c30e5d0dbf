"""`llmserve generate`: continues one prompt and writes the text as it comes."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TextIO

from llmserve.cli.console import dim, printable
from llmserve.errors import InvalidArgument
from llmserve.generation_config import read_generation_config
from llmserve.llm import LLM
from llmserve.model_files import checkpoint_directory, demo_model_path
from llmserve.outputs import CompletionOutput, RequestOutput
from llmserve.sampling_params import RequestOutputKind, SamplingParams

_EXAMPLES = """examples:
  llmserve generate "Once upon a time"
  llmserve generate --temperature 0 --max-tokens 40 "Once upon a time"
  llmserve generate --n 3 --seed 7 --quiet "The fox"
  echo "Once upon a time" | llmserve generate --model ./Llama-3.2-1B --dtype bfloat16
"""

_MAX_TOKENS = 256

# The options that are sampling parameters: name, type, help.
_SAMPLING_OPTIONS = (
    ("temperature", float, "0 takes the most likely token; higher is more varied"),
    ("top_p", float, "keep the most likely tokens up to this share of the probability"),
    ("top_k", int, "keep this many most likely tokens; 0 keeps all"),
    ("min_p", float, "drop tokens less likely than this share of the most likely one"),
    ("seed", int, "makes the run repeatable"),
    ("n", int, "how many continuations (default 1)"),
)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continues PROMPT and writes the text to stdout as it comes, then a line of "
        "figures to stderr. Sampling parameters default to the model's generation_config.json.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="text; without it, stdin")
    parser.add_argument("--model", metavar="DIR", help="checkpoint directory (default: the demo)")
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"default: the model's own, at most {_MAX_TOKENS}",
    )
    for name, kind, text in _SAMPLING_OPTIONS:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, metavar="X" if kind is float else "N", help=text)
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="ends the text; may be given again"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="run on past the model's end")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--device", default="auto", help="auto, cpu or ref (slow reference)")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="prompt and output together")
    parser.add_argument("--threads", type=int, metavar="N", help="default: all cores")
    parser.add_argument("--quiet", action="store_true", help="no line of figures")


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    prompt = _prompt(options.prompt)
    model = checkpoint_directory(demo_model_path() if options.model is None else options.model)
    llm = LLM(
        model,
        dtype=options.dtype,
        device=options.device,
        max_model_len=options.max_model_len,
        num_threads=options.threads,
    )
    with llm:
        params = _params(options, model, llm.get_default_sampling_params())
        last = _stream(llm, prompt, params) if params.n == 1 else _sections(llm, prompt, params)
    if not options.quiet:
        dim(sys.stderr, _figures(last))
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


def _params(options: argparse.Namespace, model: Path, defaults: SamplingParams) -> SamplingParams:
    given = {name: getattr(options, name) for name, _, _ in _SAMPLING_OPTIONS}
    given["stop"] = options.stop
    max_tokens = options.max_tokens
    if max_tokens is None:
        own = read_generation_config(model).max_new_tokens
        max_tokens = _MAX_TOKENS if own is None else min(own, _MAX_TOKENS)
    return dataclasses.replace(
        defaults,
        max_tokens=max_tokens,
        ignore_eos=options.ignore_eos,
        output_kind=RequestOutputKind.DELTA,
        **{name: value for name, value in given.items() if value is not None},
    )


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


def _figures(output: RequestOutput) -> str:
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
