"""`llmserve generate`: continues one prompt and writes the text as it comes."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from llmserve.checkpoint.model_files import MAX_CONFIG_BYTES
from llmserve.checkpoint.model_name import parse_model_name
from llmserve.cli.command_parser import CommandParser
from llmserve.cli.console import dim, printable
from llmserve.cli.model_argument import add_model_argument, model_of
from llmserve.cli.options import (
    add_draft_option,
    add_engine_options,
    add_sampling_options,
    add_short_flags,
    draw_seed,
    figures,
    load_model,
    sampling_params,
)
from llmserve.errors import InvalidArgument
from llmserve.llm import LLM
from llmserve.outputs import CompletionOutput, RequestOutput
from llmserve.requests.generation_config import own_max_tokens
from llmserve.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

_EXAMPLES = """examples:
  llmserve generate "Once upon a time"
  llmserve generate "Once upon a time" --temperature 0 -n 40
  llmserve generate --n 3 --seed 7 --quiet "Once there was a fox"
  llmserve generate ./Qwen3-0.6B -f article.txt "In one sentence, this says that"
  llmserve generate Qwen/Qwen3-0.6B --system "Answer briefly." "Why is the sky blue?"
  llmserve generate "A good name for a fox is" --json-schema '{"type": "string"}' -n 20
  echo "Once upon a time" | llmserve generate -m ./Llama-3.2-1B --dtype bfloat16

One word alone is the PROMPT; where it names a model (a folder, a .gguf file, org/name), MODEL, and
the prompt comes from --prompt, --file or stdin.
"""

_MAX_TOKENS = 256
_MAX_FILE_BYTES = 64 * 2**20  # of a prompt; a million tokens are a few megabytes


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
    assert isinstance(parser, CommandParser)
    parser.gathers_words = True
    parser.set_defaults(run=run)
    parser.add_argument("words", nargs="*", metavar="[MODEL] PROMPT", help="without PROMPT, stdin")
    add_model_argument(parser, by_place=False)
    parser.add_argument("--prompt", metavar="TEXT", help="the PROMPT, by name")
    parser.add_argument(
        "--file", action="append", metavar="FILE",
        help="text before the PROMPT, and a line between; - is stdin; may be given again",
    )  # fmt: skip
    parser.add_argument(
        "--system", metavar="TEXT", help="by the chat template, with this system message"
    )
    parser.add_argument(
        "--chat", action="store_true", help="by the chat template: PROMPT is a user's message"
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
    shapes = parser.add_argument_group("what the text must match (llmserve[structured])")
    for flag, text in (
        ("--json-schema", "a JSON schema, or the file of one"),
        ("--grammar", "a grammar in GBNF or Lark, or the file of one"),
    ):
        shapes.add_argument(flag, metavar="X", help=text)
    shapes.add_argument("--regex", metavar="X", help="a regular expression for all of it")
    shapes.add_argument(
        "--choice", action="append", metavar="TEXT", help="one of these; may be given again"
    )
    add_draft_option(parser)
    add_engine_options(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--logprobs", type=int, metavar="N",
        help="a line a token: its log-probability, and those of the N most likely",
    )  # fmt: skip
    output.add_argument("--json", action="store_true", help="everything, as JSON")
    output.add_argument("--quiet", action="store_true", help="no line of figures")
    add_short_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    text = _read_words(options)
    model = model_of(options)
    prompt = _prompt(options, text)
    shape = _shape(options)
    draw_seed(options)
    with load_model(options, model) as llm:
        params = _params(options, llm.get_default_sampling_params(), shape)
        given: Any = prompt if not _is_chat(options) else _chat_prompt(llm, options.system, prompt)
        if params.n == 1 and not options.json:
            last = _stream(llm, given, params, "" if _is_chat(options) else prompt)
        else:
            last = _whole(llm, given, params, options.json)
    if options.json:
        print(json.dumps(_as_json(last), ensure_ascii=False, indent=2))
    if not options.quiet:
        dim(sys.stderr, figures(last))
    for completion in last.outputs:
        if completion.error is not None:
            print(f"llmserve: {completion.error}", file=sys.stderr)
    return 1 if any(c.error is not None for c in last.outputs) else 0


def _read_words(options: argparse.Namespace) -> str | None:
    """The PROMPT; MODEL goes where -m would have put it."""
    words: list[str] = list(options.words)
    text: str | None = options.prompt
    if len(words) > 2:
        raise InvalidArgument(
            f"generate takes MODEL and PROMPT, got {len(words)} words; quote a prompt of several: "
            f'llmserve generate "Once upon a time"'
        )
    is_model = len(words) == 2 or (len(words) == 1 and (text is not None or names_model(words[0])))
    if is_model:
        if options.model is not None:
            raise InvalidArgument(f"MODEL is given twice, as {words[0]!r} and as {options.model!r}")
        options.model = words.pop(0)
    if words and text is not None:
        raise InvalidArgument(f"PROMPT is given twice, as {words[0]!r} and as {text!r}")
    return words[0] if words else text


def names_model(word: str) -> bool:
    """Whether a word by itself is a model rather than a prompt."""
    name = parse_model_name(word)
    if name is not None and ("/" in name.model_id or name.is_address):
        return True
    path = Path(word)
    try:
        if path.is_dir():
            return "/" in word or (path / "config.json").exists()
        return path.suffix in (".gguf", ".safetensors") and path.is_file()
    except OSError:  # a prompt may be longer than any path
        return False


def _prompt(options: argparse.Namespace, text: str | None) -> str:
    """What is continued: the files, and after them the PROMPT."""
    parts = [_read_file(name) for name in options.file or []]
    if text is None and not parts:
        if sys.stdin.isatty():
            taken = f"; {options.model!r} is the MODEL" if options.words else ""
            raise InvalidArgument(
                f'generate needs a prompt{taken}: llmserve generate [MODEL] "Once upon a time"'
            )
        return sys.stdin.read().removesuffix("\n")
    return "\n\n".join(parts + ([] if text is None else [text]))


def _read_file(name: str) -> str:
    if name == "-":
        return sys.stdin.read().removesuffix("\n")
    return _read_text("--file", name, _MAX_FILE_BYTES).removesuffix("\n")


def _read_text(flag: str, name: str, max_bytes: int) -> str:
    try:
        with open(name, "rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise InvalidArgument(f"{flag} {name}: more than {max_bytes / 2**20:.0f} MiB")
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, InvalidArgument):
            raise
        reason = getattr(error, "strerror", None) or error
        raise InvalidArgument(f"{flag} {name}: expected UTF-8 text, got {reason}") from error


def _shape(options: argparse.Namespace) -> StructuredOutputsParams | None:
    """What the text must match. Raises InvalidArgument for two of them."""
    given = {
        "json": _text_or_file("--json-schema", options.json_schema, "{"),
        "grammar": _text_or_file("--grammar", options.grammar, ""),
        "regex": options.regex,
        "choice": options.choice,
    }
    given = {name: value for name, value in given.items() if value is not None}
    return StructuredOutputsParams(**given) if given else None


def _text_or_file(flag: str, value: str | None, begin: str) -> str | None:
    """`value`, or what the file of that name holds; a text that begins so is no name."""
    if value is None or "\n" in value or (begin and value.lstrip().startswith(begin)):
        return value
    try:
        is_file = Path(value).is_file()
    except OSError:
        is_file = False
    if is_file:
        return _read_text(flag, value, MAX_CONFIG_BYTES)
    if begin:
        raise InvalidArgument(f"{flag} must be a JSON schema or the file of one, got {value!r}")
    return value


def _is_chat(options: argparse.Namespace) -> bool:
    return bool(options.chat) or options.system is not None


def _chat_prompt(llm: LLM, system: str | None, text: str) -> object:
    """The tokens of a conversation that begins. Raises InvalidArgument without a template."""
    tokenizer = llm.get_tokenizer()
    if not tokenizer.chat_template_names:
        raise InvalidArgument("the model has no chat template; leave --system and --chat out")
    first = [] if system is None else [{"role": "system", "content": system}]
    messages = [*first, {"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)


def _params(
    options: argparse.Namespace, defaults: SamplingParams, shape: StructuredOutputsParams | None
) -> SamplingParams:
    max_tokens = options.max_tokens
    if max_tokens is None:
        max_tokens = min(own_max_tokens(defaults) or _MAX_TOKENS, _MAX_TOKENS)
    more: dict[str, object] = {"n": options.n, "ignore_eos": options.ignore_eos}
    more |= {"logprobs": options.logprobs, "structured_outputs": shape}
    return sampling_params(options, defaults, max_tokens, **more)


def _stream(llm: LLM, prompt: Any, params: SamplingParams, shown: str) -> RequestOutput:
    """Writes one continuation as it comes, after the prompt where a person is reading."""
    out = sys.stdout
    if out.isatty():
        dim(out, printable(shown), end="")
    last = None
    rows: list[str] = []
    try:
        for last in llm.stream(prompt, params):
            _write(out, last.outputs[0])
            rows += _token_lines(last.outputs[0])
    finally:
        print(file=out, flush=True)
    if rows:
        print("\n".join(rows), file=out)
    assert last is not None  # a stream ends with a finished output
    return last


def _whole(llm: LLM, prompt: Any, params: SamplingParams, is_json: bool) -> RequestOutput:
    """Writes several continuations one after another; JSON is written by the caller."""
    final = dataclasses.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
    (last,) = llm.stream(prompt, final)
    for completion in [] if is_json else last.outputs:
        print(f"--- {completion.index + 1} of {params.n}")
        _write(sys.stdout, completion)
        print()
        for line in _token_lines(completion):
            print(line)
    return last


def _token_lines(completion: CompletionOutput) -> list[str]:
    """A line a token: the token, its log-probability, and the most likely ones."""
    lines = []
    for token_id, entries in (
        zip(completion.token_ids, completion.logprobs or [], strict=True)
        if completion.logprobs
        else ()
    ):
        own = entries[token_id]
        ranked = sorted(entries.values(), key=lambda entry: entry.rank or 0)
        others = "  ".join(f"{entry.decoded_token!r} {entry.logprob:.3f}" for entry in ranked)
        lines.append(f"{own.logprob:9.3f}  {own.decoded_token!r:<16}  {others}".rstrip())
    return lines


def _as_json(output: RequestOutput) -> dict[str, object]:
    return {
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "outputs": [
            {
                "index": completion.index,
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                "seed": completion.seed,
                "logprobs": _logprobs_json(completion.logprobs),
            }
            for completion in output.outputs
        ],
    }


def _logprobs_json(logprobs: Sequence[Any] | None) -> object:
    """A list of entries a token, the most likely first."""
    if logprobs is None:
        return None
    return [
        [
            {"token_id": i, "token": e.decoded_token, "logprob": e.logprob, "rank": e.rank}
            for i, e in sorted(entries.items(), key=lambda item: item[1].rank or 0)
        ]
        for entries in logprobs
    ]


def _write(out: TextIO, completion: CompletionOutput) -> None:
    out.write(printable(completion.text) if out.isatty() else completion.text)
    out.flush()
