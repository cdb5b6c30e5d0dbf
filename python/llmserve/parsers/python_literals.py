"""Arguments as Python writes them, `city="Rome", days=[1, 2]`, read without running anything. Words
and texts of JSON are taken as well."""

import re

_MAX_DEPTH = 64
_SPACE = re.compile(r"\s*")
_KEY = re.compile(r"[A-Za-z_][\w.-]*")
_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][+-]?\d+)?")
_WORD = re.compile(r"[A-Za-z]+")
_WORDS = {"None": None, "null": None, "True": True, "true": True, "False": False, "false": False}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"}
_NUMBERED = {"x": 2, "u": 4, "U": 8}  # digits of an escape by number
_MAX_DIGITS = 400  # of an integer: more are no number that a tool takes


def read_arguments(text: str) -> dict[str, object]:
    """Keyword arguments. Raises ValueError for what is something else.

    >>> read_arguments("city='Rome', days=[1, 2], sure=True")
    {'city': 'Rome', 'days': [1, 2], 'sure': True}
    """
    return _Reader(text).arguments()


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._pos = 0

    def arguments(self) -> dict[str, object]:
        found: dict[str, object] = {}
        while self._peek():
            key = self._match(_KEY)
            self._expect("=")
            found[key] = self._value(0)
            if self._peek():
                self._expect(",")
        return found

    def _peek(self) -> str:
        """The next character that is no space; "" at the end."""
        self._pos = _SPACE.match(self._text, self._pos).end()  # type: ignore[union-attr]  # always
        return self._text[self._pos : self._pos + 1]

    def _expect(self, sign: str) -> None:
        if self._peek() != sign:
            raise ValueError(f"{sign!r} is missing")
        self._pos += 1

    def _match(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._pos)
        if match is None:
            raise ValueError(f"nothing of {pattern.pattern}")
        self._pos = match.end()
        return match.group()

    def _value(self, depth: int) -> object:
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deep")
        sign = self._peek()
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
        while self._peek() != end:
            items.append(self._value(depth + 1))
            if self._peek() != end:
                self._expect(",")
        self._pos += 1
        return items

    def _dict(self, depth: int) -> dict[str, object]:
        self._pos += 1
        items: dict[str, object] = {}
        while self._peek() != "}":
            key = self._value(depth + 1)
            self._expect(":")
            items[key if isinstance(key, str) else str(key)] = self._value(depth + 1)
            if self._peek() != "}":
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
                self._pos = escape + 1
                parts.append(self._escaped())
                continue
            if end < 0:
                raise ValueError("a text has no end")
            parts.append(self._text[self._pos : end])
            self._pos = end + 1
            return _paired("".join(parts))

    def _escaped(self) -> str:
        """What stands behind a backslash; the backslash stays where it escapes nothing."""
        sign = self._text[self._pos : self._pos + 1]
        self._pos += 1
        if sign in _NUMBERED:
            digits = self._text[self._pos : self._pos + _NUMBERED[sign]]
            self._pos += len(digits)
            try:
                return chr(int(digits, 16))
            except (ValueError, OverflowError):
                raise ValueError(f"\\{sign}{digits} is no character") from None
        if sign in _ESCAPES:
            return _ESCAPES[sign]
        if sign == "\n":
            return ""
        return sign if sign in ("\\", "'", '"', "/") else "\\" + sign


def _paired(text: str) -> str:
    """Halves of a character, as JSON writes some, put together; a half alone is replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
