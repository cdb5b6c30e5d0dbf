"""MODEL, as every command that runs or looks at a model takes it: by place, by -m, by llama.cpp's
names, and the demo where nothing is given."""

import argparse
import os
from pathlib import Path

from llmserve.checkpoint.model_files import demo_model_path
from llmserve.errors import InvalidArgument

MODEL_HELP = (
    "checkpoint directory, .gguf file, or Hub id such as Qwen/Qwen3-0.6B or "
    "org/x-GGUF:Q4_K_M (default: the demo)"
)


def add_model_argument(parser: argparse.ArgumentParser, *, by_place: bool = True) -> None:
    """MODEL and --model; by_place=False where the command reads its words itself."""
    if by_place:
        parser.add_argument("word", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--model", "-m", "--hf-repo", "-hf", metavar="MODEL",
        help="the same" if by_place else MODEL_HELP,
    )  # fmt: skip
    parser.add_argument(
        "--hf-file", "-hff", metavar="FILE", help="of a GGUF repository's files, that one"
    )


def model_of(options: argparse.Namespace) -> str | Path:
    """The model that the options name. Raises InvalidArgument for two."""
    word = getattr(options, "word", None)
    if word is not None and options.model is not None:
        raise InvalidArgument(f"MODEL is given twice, as {word!r} and as {options.model!r}")
    model = word if word is not None else options.model
    if options.hf_file is None:
        return demo_model_path() if model is None else str(model)
    if model is None or ":" in model or os.path.exists(model):
        raise InvalidArgument("--hf-file is of a repository on the Hub: pass its id as MODEL, too")
    return f"{model}:{options.hf_file}"
