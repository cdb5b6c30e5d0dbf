"""Calls of the tokenizers library. It raises errors of no class of its own, and its panics, which a
file of a stranger can bring about, are no Exception."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from llmserve.errors import NotSupported

Result = TypeVar("Result")


def library_call(
    path: Path, purpose: str, function: Callable[..., Result], *args: Any, **kwargs: Any
) -> Result:
    """What a call of the library gives, on the tokenizer of `path`, which has been loaded. Raises
    NotSupported for all that the library throws: one text cannot be served, others can."""
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        if not is_library_error(error):
            raise
        raise NotSupported(f"{path}: the tokenizer cannot {purpose}: {error}") from error


def is_library_error(error: BaseException) -> bool:
    """Whether the library threw it, and not the interpreter (KeyboardInterrupt ...)."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
