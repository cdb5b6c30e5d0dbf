"""What one rendering of a chat template may take, and the checks that hold it to that.

No value, written out in full, is larger than MAX_VALUE characters, and what is made in one
rendering takes no more than MAX_TOTAL bytes and RENDER_S seconds. Where an operation could make a
large value at once (`*`, `%`, join, replace, ...) a check comes before it.
"""

import re
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

# Characters of the output, or of any value written out in full: four million tokens. An element
# of a list counts as _ELEMENT_SIZE: Python takes 60 bytes for a short string, and 0.1 us a visit.
MAX_VALUE = 2**24
_ELEMENT_SIZE = 32
# Bytes of all values made in one rendering, kept or not; an operation counts as STEP_BYTES, so
# that there are at most four million of them.
MAX_TOTAL = 2**28
STEP_BYTES = 64
# A rendering takes a few milliseconds.
RENDER_S = 5.0
_MAX_DEPTH = 100  # of containers in containers; Python hashes and prints them recursively
_MAX_INT_BITS = 1024
_MAX_WIDTH = 10_000  # of a padded number or text


class LimitReached(Exception):
    """Not an InvalidArgument: jinja2's filters catch ValueErrors."""


class Meter(threading.local):
    """What the rendering of this thread may still take."""

    def __init__(self) -> None:
        self.left_bytes = -1  # nothing runs outside a rendering
        self.deadline = 0.0

    def start(self) -> None:
        self.left_bytes = MAX_TOTAL
        self.deadline = time.monotonic() + RENDER_S

    def stop(self) -> None:
        self.left_bytes = -1

    def spend(self, num_bytes: int = STEP_BYTES) -> None:
        """One operation that made so many bytes."""
        self.left_bytes -= num_bytes
        if self.left_bytes < 0:
            raise LimitReached(f"it makes more than {MAX_TOTAL} bytes")
        if time.monotonic() > self.deadline:
            raise LimitReached(f"it takes more than {RENDER_S:.0f} s")

    def keep(self, value: Any) -> Any:
        """The result of an operation, if it is not too large."""
        if isinstance(value, str):
            check_size(len(value))
            self.spend(STEP_BYTES + value.__sizeof__())
        else:
            size = written_size(value)
            self.spend(STEP_BYTES + (8 * len(value) if size > 1 else 0))
        return value


meter = Meter()


def check_size(size: int) -> None:
    """Raises for what is too large to be made."""
    if size > MAX_VALUE:
        raise LimitReached(
            f"it makes a value of more than {MAX_VALUE} characters (an element of a list counts as "
            f"{_ELEMENT_SIZE})"
        )


def written_size(value: Any, depth: int = 0) -> int:
    """The size of a value with all that it holds, as often as it holds it. Visits no more elements
    than MAX_VALUE allows."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int):
        if value.bit_length() > _MAX_INT_BITS:
            raise LimitReached(f"it makes an integer of more than {_MAX_INT_BITS} bits")
        return 1
    if isinstance(value, dict):
        items: Iterable[Any] = (part for item in value.items() for part in item)
    elif isinstance(value, list | tuple | type({}.values()) | type({}.items())):
        items = value
    else:
        return 1
    if depth > _MAX_DEPTH:
        raise LimitReached(f"it nests lists or dicts deeper than {_MAX_DEPTH}")
    size = 1
    for item in items:
        size += _ELEMENT_SIZE + written_size(item, depth + 1)
        check_size(size)
    return size


# Checks before an operation. They take its arguments and raise LimitReached.


def check_add(left: Any, right: Any) -> None:
    if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        check_size(len(left) + len(right))


def check_multiply(left: Any, right: Any) -> None:
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(times, int):
            check_size(written_size(sequence) * max(times, 0))


def check_power(base: Any, exponent: Any) -> None:
    is_integer = isinstance(base, int) and isinstance(exponent, int)
    if is_integer and base.bit_length() * max(exponent, 0) > _MAX_INT_BITS:
        raise LimitReached(f"it makes an integer of more than {_MAX_INT_BITS} bits")


_PERCENT_WIDTH = re.compile(r"%(?:\([^)]*\))?[-+ #0-9.]*(?:\*|(?<!\d)\d{5,})")
_FORMAT_WIDTH = re.compile(r"\{[^{}]*:[^{}]*(?:\{|\d{5,})")


def check_percent(text: Any, arguments: Any) -> None:
    if isinstance(text, str):
        if _PERCENT_WIDTH.search(text):
            raise LimitReached("it pads with '%' to a width of five digits or of an argument")
        check_size(len(text) + text.count("%") * (written_size(arguments) + _MAX_WIDTH))


def check_format(text: str, arguments: Any) -> None:
    if _FORMAT_WIDTH.search(text):
        raise LimitReached("it pads with format() to a width of five digits or of an argument")
    check_size(len(text) + text.count("{") * (written_size(arguments) + _MAX_WIDTH))


def check_width(text: Any, width: Any = 80, *_: Any) -> None:
    check_size(abs(int(width)))


def check_indent(text: str, width: Any = 4, *_: Any, **__: Any) -> None:
    added = len(width) if isinstance(width, str) else abs(int(width))
    check_size(len(text) + (1 + len(text.splitlines())) * added)


def check_replace(text: Any, old: Any, new: Any, count: Any = None, **_: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    times = text.count(old)
    if isinstance(count, int) and 0 <= count < times:
        times = count
    check_size(len(text) + times * len(new))


def check_split(text: str, separator: Any = None, *_: Any, **__: Any) -> None:
    num_pieces = text.count(separator) if isinstance(separator, str) else len(text) // 2
    check_size(len(text) + _ELEMENT_SIZE * num_pieces)


def check_words(text: Any) -> None:
    check_size(_ELEMENT_SIZE * len(str(text)))


def check_elements(value: Any) -> None:
    """Of filters that take a text character by character."""
    if isinstance(value, str):
        check_words(value)


def check_round(value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    if abs(int(precision)) > 100:
        raise LimitReached("it rounds to more than 100 digits")


BINARY_CHECKS: dict[str, Callable[[Any, Any], None]] = {
    "+": check_add,
    "*": check_multiply,
    "**": check_power,
    "%": check_percent,
}
METHOD_CHECKS: dict[str, Callable[..., None]] = {
    "center": check_width,
    "ljust": check_width,
    "rjust": check_width,
    "zfill": check_width,
    "replace": check_replace,
    "join": lambda text, items: check_size(joined_size(items, text)),
    "split": check_split,
    "rsplit": check_split,
    "splitlines": lambda text, *_, **__: check_words(text),
}
FILTER_CHECKS: dict[str, Callable[..., None]] = {
    "center": check_width,
    "format": lambda text, *args, **kwargs: check_percent(text, (args, kwargs)),
    "indent": check_indent,
    "replace": lambda _, *args, **kwargs: check_replace(*args, **kwargs),
    "round": check_round,
    "title": check_words,
    "wordcount": check_words,
    "list": lambda _, value: check_elements(value),
    "sort": lambda _, value, *__, **___: check_elements(value),
    "unique": lambda _, value, *__, **___: check_elements(value),
    "groupby": lambda _, value, *__, **___: check_elements(value),
    "min": lambda _, value, *__, **___: check_elements(value),
    "max": lambda _, value, *__, **___: check_elements(value),
}


def joined_size(items: Any, separator: str) -> int:
    return written_size(items) + len(items) * len(separator)
