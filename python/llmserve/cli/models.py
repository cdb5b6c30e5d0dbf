"""`llmserve pull`, `list` and `rm`: the models of the Hub that are kept on this machine."""

import argparse
import json
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from llmserve.checkpoint.hub_cache import cached_models, remove_model
from llmserve.checkpoint.model_files import find_checkpoint
from llmserve.common.units import human_bytes
from llmserve.errors import InvalidArgument

_PULL_EXAMPLES = """examples:
  llmserve pull Qwen/Qwen3-0.6B
  llmserve pull Qwen/Qwen3-0.6B-GGUF:Q8_0
  llmserve pull hf.co/org/x-GGUF --hf-file x-Q4_K_M.gguf
"""


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the three commands to the parser."""
    pull = commands.add_parser(
        "pull",
        help="download a model",
        description="Downloads MODEL from the Hugging Face Hub, of which only what llmserve reads, "
        "and prints where it is. Interrupted, it goes on where it ended when it is run again. "
        "generate, chat and serve do the same by themselves.",
        epilog=_PULL_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    pull.set_defaults(run=run_pull)
    pull.add_argument("model", metavar="MODEL", help="Hub id, e.g. Qwen/Qwen3-0.6B")
    pull.add_argument("--hf-file", "-hff", metavar="FILE", help="of its GGUF files, that one")
    pull.add_argument("--revision", metavar="X", help="branch, tag or commit")
    listing = commands.add_parser(
        "list",
        help="list the models that are downloaded",
        description="Lists the models in the cache of the Hugging Face Hub, which other programs "
        "use, too (HF_HUB_CACHE).",
    )
    listing.set_defaults(run=run_list)
    listing.add_argument("--json", action="store_true", help="everything, as JSON")
    removing = commands.add_parser(
        "rm",
        help="remove a model that is downloaded",
        description="Removes all revisions of MODEL from the cache of the Hugging Face Hub.",
    )
    removing.set_defaults(run=run_rm)
    removing.add_argument("models", nargs="+", metavar="MODEL", help="as llmserve list shows it")


def run_pull(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    name = options.model if options.hf_file is None else f"{options.model}:{options.hf_file}"
    if os.path.exists(name):
        raise InvalidArgument(f"{name} is here already: pull is for models of the Hub")
    found = find_checkpoint(name, options.revision)
    files = [found] if found.is_file() else [path for path in found.rglob("*") if path.is_file()]
    total = sum(path.stat().st_size for path in files)
    print(f"{human_bytes(total)} in {len(files)} files", file=sys.stderr)
    print(found)
    return 0


def run_list(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    folder, models = cached_models()
    if options.json:
        print(json.dumps([_row(model) for model in models], indent=2))
        return 0
    width = max((len(model.model_id) for model in models), default=0)
    for model in models:
        used = datetime.fromtimestamp(model.last_used_s).isoformat(" ", "minutes")
        kinds = ", ".join(model.kinds) or "nothing that llmserve runs"
        print(f"{model.model_id:<{width}}  {human_bytes(model.num_bytes):>10}  {used}  {kinds}")
    total = human_bytes(sum(model.num_bytes for model in models))
    print(f"{len(models)} models, {total} in {folder}", file=sys.stderr)
    return 0


def _row(model: Any) -> dict[str, object]:
    names = ("model_id", "num_bytes", "last_used_s", "revisions", "kinds", "path")
    return {name: _plain(getattr(model, name)) for name in names}


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def run_rm(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    for model in options.models:
        print(f"removed {model}, {human_bytes(remove_model(model))}")
    return 0
