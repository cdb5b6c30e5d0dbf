"""Sizes and rates as people write them: "1.5 MiB", "4x80GiB", "3.35TB/s"."""

import re

from llmserve.errors import InvalidArgument

_PREFIXES = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_QUANTITY = re.compile(r"(?:(\d+)x)?(\d+(?:\.\d+)?)([KMGTP]?)(i?)", re.IGNORECASE)
_TOKENS = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")


def human_bytes(num_bytes: int) -> str:
    """'1.5 MiB'."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def parse_bytes(name: str, text: str) -> int:
    """Bytes of "140GB" (10^9), "80GiB" (2^30), "4x80GiB" or a bare number.

    >>> parse_bytes("memory", "4x80GiB") == 4 * 80 * 2**30
    True
    """
    value = _parse(text, ("B", ""))
    if value is None:
        raise InvalidArgument(f"{name} must be a size such as 140GB or 4x80GiB, got {text!r}")
    return round(value)


def parse_size(name: str, text: str) -> int:
    """As `parse_bytes`; 0 is a size, too.

    >>> parse_size("cache", "2KiB"), parse_size("cache", "0")
    (2048, 0)
    """
    return 0 if text == "0" else parse_bytes(name, text)


def size(text: str) -> int:
    """As `parse_size`, for argparse, whose error it raises.

    >>> size("2KiB")
    2048
    """
    try:
        return parse_size("it", text)
    except InvalidArgument as error:
        from argparse import ArgumentTypeError  # here: a table of options needs no argparse

        raise ArgumentTypeError(str(error)) from None


def parse_tokens(name: str, text: str) -> int:
    """Tokens of "4096", "1k" (1000), "1K" (1024) or "1.5M"; "auto" and "-1" are -1.

    >>> parse_tokens("it", "1k"), parse_tokens("it", "2K"), parse_tokens("it", "auto")
    (1000, 2048, -1)
    """
    if text in ("auto", "-1"):
        return -1
    match = _TOKENS.fullmatch(text)
    if match is None:
        raise InvalidArgument(
            f"{name} must be a number of tokens such as 4096, 1k (1000) or 1K (1024), or auto for "
            f"what fits, got {text!r}"
        )
    number, prefix = match.groups()
    base = 1000 if prefix.islower() else 1024
    return round(float(number) * float(base ** _PREFIXES[prefix.upper()]))


def token_count(text: str) -> int:
    """As `parse_tokens`, for argparse, whose error it raises."""
    try:
        return parse_tokens("it", text)
    except InvalidArgument as error:
        from argparse import ArgumentTypeError  # here: a table of options needs no argparse

        raise ArgumentTypeError(str(error)) from None


def json_object(text: str) -> dict[str, object]:
    """A JSON object, for argparse, whose error it raises."""
    import json  # here, as argparse below: a table of options needs neither
    from argparse import ArgumentTypeError

    try:
        value = json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ArgumentTypeError(f"it must be a JSON object, got {text!r}")
    return value


def parse_bandwidth(name: str, text: str) -> float:
    """Bytes a second of "3.35TB/s" or a bare number.

    >>> parse_bandwidth("bandwidth", "200GB/s")
    200000000000.0
    """
    value = _parse(text, ("B/s", ""))
    if value is None:
        raise InvalidArgument(f"{name} must be a bandwidth such as 3.35TB/s, got {text!r}")
    return value


def parse_flops(name: str, text: str) -> float:
    """Operations a second of "312TFLOP/s", "312T" or a bare number.

    >>> parse_flops("flops", "312TFLOP/s")
    312000000000000.0
    """
    value = _parse(text, ("FLOP/s", "FLOPS", "OP/s", ""))
    if value is None:
        raise InvalidArgument(f"{name} must be a rate such as 312TFLOP/s, got {text!r}")
    return value


def _parse(text: str, units: tuple[str, ...]) -> float | None:
    """The number, above 0, if what follows it and its prefix is one of the units."""
    compact = text.replace(" ", "")
    match = _QUANTITY.match(compact)
    if match is None:
        return None
    rest = compact[match.end() :].lower()
    count, number, prefix, binary = match.groups()
    if rest not in [unit.lower() for unit in units] or (binary and not prefix):
        return None
    base = 1024 if binary else 1000
    value = int(count or 1) * float(number) * float(base ** _PREFIXES[prefix.upper()])
    return value if value > 0 else None
