"""What the evaluations have in common: the text, and a bar on stderr."""

import sys
from pathlib import Path
from typing import Any

from llmserve.checkpoint.model_files import demo_model_path, demo_text_path
from llmserve.errors import InvalidArgument


def read_eval_text(given: str | None, model: str | Path) -> str:
    """Of --text, or the demo's held-out stories for the demo. Raises InvalidArgument."""
    if given is None and model != demo_model_path():
        raise InvalidArgument("MODEL needs a text of its own: pass --text FILE")
    path = demo_text_path() if given is None else Path(given)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"--text {path}: expected UTF-8 text, got {error}") from error


class ProgressBar:
    """A bar on stderr that counts, where that is a terminal."""

    def __init__(self, name: str, total: int, is_disabled: bool, unit: str = "tok") -> None:
        self._bar: Any = None  # tqdm has no types
        if not is_disabled and sys.stderr.isatty():
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, desc=name, unit=unit, dynamic_ncols=True)

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, count: int) -> None:
        """So many more are done."""
        if self._bar is not None:
            self._bar.update(count)
