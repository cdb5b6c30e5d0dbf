"""Checks of what callers pass in, with messages that name the argument, the rule and the value."""

import difflib
import math
import numbers
import operator
import sys
from collections.abc import Iterable, Sized

from llmserve.errors import InvalidArgument, NotSupported

INT32_MIN = -(2**31)
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
_REAL = (float, int, numbers.Real)  # the last, which NumPy's numbers are, takes Python to look up


def integer(name: str, value: object, minimum: int, maximum: int = INT32_MAX) -> int:
    """`value` as an int in [minimum, maximum]; NumPy integers are integers, bools are not."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidArgument(f"{name} must be an integer, got {describe(value)}")
    result = operator.index(value)
    if not minimum <= result <= maximum:
        raise InvalidArgument(f"{name} must be between {minimum} and {maximum}, got {result}")
    return result


def optional_integer(
    name: str, value: object, minimum: int, maximum: int = INT32_MAX
) -> int | None:
    """As `integer`, with None passed through."""
    return None if value is None else integer(name, value, minimum, maximum)


def truncation(name: str, value: object) -> int | None:
    """`value` as a number of tokens that a prompt keeps: None all, -1 what fits."""
    result = optional_integer(name, value, -1)
    if result == 0:
        raise InvalidArgument(f"{name} must be at least 1, or -1 for what fits, got 0")
    return result


def number(name: str, value: object) -> float:
    """`value` as a finite float; bools are not numbers."""
    if isinstance(value, bool) or not isinstance(value, _REAL):
        raise InvalidArgument(f"{name} must be a number, got {describe(value)}")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise InvalidArgument(f"{name} must be finite, got {describe(value)}")
    return result


def boolean(name: str, value: object) -> bool:
    """`value`, which must be True or False; NumPy's are, too."""
    if isinstance(value, bool):
        return value
    numpy = sys.modules.get("numpy")  # not imported yet: then it is none of its
    if numpy is not None and isinstance(value, numpy.bool_):
        return bool(value)
    raise InvalidArgument(f"{name} must be True or False, got {describe(value)}")


def text(name: str, value: object) -> str:
    """`value`, which must be a string."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} must be a string, got {describe(value)}")
    return value


def unicode_text(name: str, value: object) -> str:
    """Likewise, of characters that UTF-8 has."""
    result = text(name, value)
    try:
        result.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidArgument(f"{name} has a lone surrogate, which is not Unicode") from None
    return result


def refuse_unknown(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises InvalidArgument that names the first unknown argument and the nearest known one."""
    names = dict.fromkeys(known)
    for name in given:
        if name in names:
            continue
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(names)}"
        raise InvalidArgument(f"{what} has no argument {name!r}; {hint}")


def refuse_unless_default(
    what: str, name: str, value: object, *defaults: object, reason: str = ""
) -> None:
    """Raises NotSupported, with the reason, if an argument whose feature is not there is set to
    anything else. Without a reason it is not there yet."""
    if any(is_default(value, default) for default in defaults):
        return
    why = f": {reason}" if reason else " yet"
    raise NotSupported(
        f"{what}: {name}={describe(value)} is not supported{why}; leave it at {defaults[0]!r}"
    )


def is_default(value: object, default: object) -> bool:
    """Whether an argument is at a default; an empty list or dict is none."""
    is_empty = default is None and isinstance(value, Sized) and len(value) == 0
    is_plain = isinstance(value, float | int | str | list) and not isinstance(value, bool)
    return value is default or is_empty or (is_plain and value == default)


def describe(value: object) -> str:
    """A short repr for messages."""
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
