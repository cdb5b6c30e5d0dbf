"""Values as Python writes them, read without running anything. Words and texts of JSON are taken as
well."""

import re
import sys

_MAX_DEPTH = 64
_SPACE = re.compile(r"\s*")
KEY = re.compile(r"[A-Za-z_][\w.-]*")
_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][+-]?\d+)?")
_WORD = re.compile(r"[A-Za-z]+")
_WORDS = {"None": None, "null": None, "True": True, "true": True, "False": False, "false": False}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"}
_NUMBERED = {"x": 2, "u": 4, "U": 8}  # digits of an escape by number
# Halves of characters (UTF-16's surrogates), the second kind from _LOW on.
_HIGH, _LOW, _LAST_HALF = 0xD800, 0xDC00, 0xDFFF
_HALF = "\ufffd"
_MAX_DIGITS = 400  # of an integer: more are no number that a tool takes


def read_value(text: str) -> object:
    """A value, and nothing behind it. Raises ValueError for what is none.

    >>> read_value("{'a': [1, None], 'b': (true,)}")
    {'a': [1, None], 'b': [True]}
    """
    reader = _Reader(text)
    value = reader.value(0)
    if reader.peek():
        raise ValueError("something stands behind the value")
    return value


def read_escape(text: str, pos: int) -> tuple[str, int] | None:
    """What a backslash within a text stands for, and the place behind; None where more of the text
    has to be known. A backslash that escapes nothing is itself, and half a character U+FFFD. Raises
    ValueError.

    >>> read_escape(r"a\\u00e9", 1), read_escape(r"\\q", 0), read_escape(r"\\u00", 0)
    (('é', 7), ('\\\\q', 2), None)
    """
    sign = text[pos + 1 : pos + 2]
    if sign not in _NUMBERED:
        if not sign:
            return None
        if sign in _ESCAPES:
            return _ESCAPES[sign], pos + 2
        if sign == "\n":
            return "", pos + 2
        return sign if sign in ("\\", "'", '"', "/") else "\\" + sign, pos + 2
    end = pos + 2 + _NUMBERED[sign]
    if end > len(text):
        return None
    code = _code(sign, text[pos + 2 : end])
    if not _HIGH <= code <= _LAST_HALF:
        return chr(code), end
    if code >= _LOW:
        return _HALF, end
    # The first half of a character, as JSON writes some; the other comes next.
    other = text[end : end + 6]
    if len(other) < 6 and "\\u".startswith(other[:2]):
        return None
    if other.startswith("\\u") and _LOW <= (low := _code("u", other[2:])) <= _LAST_HALF:
        return chr(0x10000 + ((code - _HIGH) << 10) + (low - _LOW)), end + 6
    return _HALF, end


def _code(sign: str, digits: str) -> int:
    try:
        code = int(digits, 16) if digits.isalnum() else -1
        if not 0 <= code <= sys.maxunicode:
            raise ValueError
    except ValueError:
        raise ValueError(f"\\{sign}{digits} is no character") from None
    return code


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._pos = 0

    def peek(self) -> str:
        """The next character that is no space; "" at the end."""
        self._pos = _SPACE.match(self._text, self._pos).end()  # type: ignore[union-attr]  # always
        return self._text[self._pos : self._pos + 1]

    def _expect(self, sign: str) -> None:
        if self.peek() != sign:
            raise ValueError(f"{sign!r} is missing")
        self._pos += 1

    def _match(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._pos)
        if match is None:
            raise ValueError(f"nothing of {pattern.pattern}")
        self._pos = match.end()
        return match.group()

    def value(self, depth: int) -> object:
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deep")
        sign = self.peek()
        if sign in ("'", '"'):
            return self._string(sign)
        if sign == "{":
            return self._dict(depth)
        if sign in ("[", "("):
            return self._list(_CLOSING[sign], depth)
        if sign.isalpha():
            word = self._match(_WORD)
            if word not in _WORDS:
                raise ValueError(f"{word} is no value")
            return _WORDS[word]
        number = self._match(_NUMBER).replace("_", "")
        if len(number) > _MAX_DIGITS:
            raise ValueError("too many digits")
        is_whole = number.lstrip("+-").isdecimal()
        value = int(number) if is_whole else float(number)
        if value in (float("inf"), float("-inf")):
            raise ValueError("too large")
        return value

    def _list(self, end: str, depth: int) -> list[object]:
        self._pos += 1
        items: list[object] = []
        while self.peek() != end:
            items.append(self.value(depth + 1))
            if self.peek() != end:
                self._expect(",")
        self._pos += 1
        return items

    def _dict(self, depth: int) -> dict[str, object]:
        self._pos += 1
        items: dict[str, object] = {}
        while self.peek() != "}":
            key = self.value(depth + 1)
            self._expect(":")
            items[key if isinstance(key, str) else str(key)] = self.value(depth + 1)
            if self.peek() != "}":
                self._expect(",")
        self._pos += 1
        return items

    def _string(self, quote: str) -> str:
        self._pos += 1
        parts: list[str] = []
        while True:
            end = self._text.find(quote, self._pos)
            escape = self._text.find("\\", self._pos, end if end >= 0 else None)
            if escape >= 0:
                parts.append(self._text[self._pos : escape])
                found = read_escape(self._text, escape)
                if found is None:
                    raise ValueError("a text has no end")
                character, self._pos = found
                parts.append(character)
                continue
            if end < 0:
                raise ValueError("a text has no end")
            parts.append(self._text[self._pos : end])
            self._pos = end + 1
            return "".join(parts)
