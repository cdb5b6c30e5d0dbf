"""`llmserve cache`: the packed weights that are kept for the next start."""

import argparse
import json
import os
from datetime import datetime
from pathlib import Path

from llmserve import _core
from llmserve.checkpoint.packed_cache import packed_cache_folder
from llmserve.common.units import human_bytes
from llmserve.errors import LLMServeError

_EXAMPLES = """examples:
  llmserve generate --packed-cache-bytes 20GiB --model ./Qwen3-0.6B "Hello"   # keeps them
  llmserve cache list
  llmserve cache clear
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "cache",
        help="list or clear packed weights",
        description="Packed weights make a start quicker. They are kept where "
        "LLM(packed_cache_bytes=...) or --packed-cache-bytes asks for it, in llmserve/packed of "
        "XDG_CACHE_HOME or ~/.cache; those not used for longest go when the room is used up.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="what is kept, the least recently used first")
    listing.add_argument("--json", action="store_true", help="everything, as JSON")
    listing.set_defaults(run=run_list)
    clearing = actions.add_parser("clear", help="remove all of it; running engines are unharmed")
    clearing.set_defaults(run=run_clear)


def _entries(folder: Path) -> list[_core.PackedCacheEntry]:
    try:
        os.scandir(folder).close()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise LLMServeError(f"{folder} cannot be read: {error.strerror or error}") from error
    return _core.list_packed_cache(str(folder))


def run_list(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    folder = packed_cache_folder()
    entries = _entries(folder)
    if options.json:
        names = ("path", "model", "variant", "num_bytes", "last_used_ns")
        print(json.dumps([{name: getattr(e, name) for name in names} for e in entries], indent=2))
        return 0
    for entry in entries:
        used = datetime.fromtimestamp(entry.last_used_ns / 1e9).isoformat(" ", "seconds")
        what = entry.model or f"(unreadable) {entry.path}"
        print(f"{human_bytes(entry.num_bytes):>11}  {used}  {what}  {entry.variant}")
    total = sum(entry.num_bytes for entry in entries)
    print(f"{human_bytes(total):>11}  in {len(entries)} files of {folder}")
    return 0


def run_clear(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    folder = packed_cache_folder()
    before = {entry.path for entry in _entries(folder)}
    print(f"removed {human_bytes(_core.clear_packed_cache(str(folder)))}")
    kept = [e.path for e in _core.list_packed_cache(str(folder)) if e.path in before]
    if kept:
        raise LLMServeError(
            f"{len(kept)} of {len(before)} files cannot be removed, the first of them {kept[0]}; "
            f"do you have the right to write in {folder}?"
        )
    return 0
