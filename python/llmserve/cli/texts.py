"""`llmserve embed` and `llmserve tokenize`: what becomes of texts."""

import argparse
import json
import sys
from pathlib import Path

from llmserve.checkpoint.model_files import find_tokenizer_folder
from llmserve.cli.command_parser import CommandParser
from llmserve.cli.generate import names_model
from llmserve.cli.model_argument import add_model_argument, model_of
from llmserve.cli.options import add_engine_options, load_model
from llmserve.errors import InvalidArgument
from llmserve.pooling_params import PoolingParams
from llmserve.tokenization.tokenizer import Tokenizer

_EXAMPLES = {
    "embed": """examples:
  llmserve embed "Once upon a time" "The fox"
  llmserve embed ./Qwen3-0.6B -f lines.txt --dimensions 256
""",
    "tokenize": """examples:
  llmserve tokenize "Once upon a time"
  llmserve tokenize Qwen/Qwen3-0.6B -f story.txt --ids
""",
}


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the commands to the parser."""
    embed = _add(
        commands,
        "embed",
        "vectors of texts",
        "Writes the vector of each TEXT, as JSON, a line each.",
        "texts, a line each; - is stdin",
    )
    embed.add_argument("--dimensions", type=int, metavar="N", help="numbers of a vector")
    add_engine_options(embed)
    embed.set_defaults(run=run_embed)
    tokenize = _add(
        commands,
        "tokenize",
        "tokens of a text",
        "Writes a line a token of TEXT: its id and what it stands for. Weights are not read.",
        "text, as a whole; - is stdin",
    )
    tokenize.add_argument("--ids", action="store_true", help="the ids alone, as JSON")
    tokenize.add_argument(
        "--no-bos", action="store_true", help="without what the model wants around a text"
    )
    tokenize.set_defaults(run=run_tokenize)


def _add(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    help: str,
    description: str,
    of_file: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=help,
        description=f"{description} The first word is MODEL where it names one.",
        epilog=_EXAMPLES[name],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    assert isinstance(parser, CommandParser)
    parser.gathers_words = True
    parser.add_argument("words", nargs="*", metavar="[MODEL] TEXT", help="without TEXT, stdin")
    add_model_argument(parser, by_place=False)
    parser.add_argument("--prompt", "-p", metavar="TEXT", help="a TEXT, by name")
    parser.add_argument("--file", "-f", metavar="FILE", help=of_file)
    return parser


def run_embed(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    texts, file = _texts(options)
    texts += (file or "").splitlines()
    if not texts:
        raise InvalidArgument('embed needs a text: llmserve embed [MODEL] "Once upon a time"')
    params = PoolingParams(dimensions=options.dimensions)
    with load_model(options, model_of(options)) as llm:
        outputs = llm.embed(texts, params, use_tqdm=False)
    for output in outputs:
        if output.error is not None:
            print(f"llmserve: {output.error}", file=sys.stderr)
            return 1
        print(json.dumps([round(value, 8) for value in output.outputs.embedding]))
    return 0


def run_tokenize(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    texts, file = _texts(options)
    texts += [] if file is None else [file]
    if len(texts) != 1:
        raise InvalidArgument(
            f"tokenize takes one TEXT, got {len(texts)}; quote one of several words"
        )
    folder = find_tokenizer_folder(str(model_of(options)), None, None)
    tokenizer = Tokenizer.from_path(folder)
    if tokenizer is None:
        raise InvalidArgument(f"{folder} has no tokenizer")
    token_ids = tokenizer.encode(texts[0], add_special_tokens=not options.no_bos)
    if options.ids:
        print(json.dumps(token_ids))
        return 0
    for token_id in token_ids:
        print(f"{token_id:7} {tokenizer.token_text(token_id)!r}")
    return 0


def _texts(options: argparse.Namespace) -> tuple[list[str], str | None]:
    """Those of the command line, and what a file or stdin holds; MODEL goes where -m would have put
    it. Raises InvalidArgument."""
    words: list[str] = list(options.words)
    if words and options.model is None and names_model(words[0]):
        options.model = words.pop(0)
    if options.prompt is not None:
        words.append(options.prompt)
    if options.file is None and not words and not sys.stdin.isatty():
        return words, sys.stdin.read().removesuffix("\n")
    if options.file is None:
        return words, None
    if options.file == "-":
        return words, sys.stdin.read()
    try:
        return words, Path(options.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"--file {options.file}: {error}") from None
