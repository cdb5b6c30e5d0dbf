"""Pieces of a grammar in llguidance's Lark: literals in which special tokens stand, values of a
schema, and rules by number."""

import json
import re
from collections.abc import Callable, Mapping

# ruff: noqa: RUF001  # DeepSeek's tokens have wide bars
# What a special token may look like. Those that the tokenizer has are named by their id.
_TOKEN = re.compile(r"(<\|[^<>|]+\|>|<｜[^<>｜]+｜>|\[/?[A-Z_]+\]|</?[a-z_:]+>|｜[A-Z]+｜)")
_TIGHT = {"x-guidance": {"whitespace_flexible": False}}


def special_token_texts(text: str) -> list[str]:
    """What in a text may be special tokens.

    >>> special_token_texts("<|channel|>final<|message|>")
    ['<|channel|>', '<|message|>']
    """
    return _TOKEN.findall(text)


class Lark:
    """Collects rules beside the expressions that it gives. special_token_id: the id of a token that
    is no text, None for what is text.

    >>> lark = Lark({"[ARGS]": 9}.get)
    >>> lark.literal("now[ARGS]")
    '"now" <[9]>'
    """

    def __init__(self, special_token_id: Callable[[str], int | None]) -> None:
        self._special_token_id = special_token_id
        self.rules: list[str] = []

    def literal(self, text: str) -> str:
        """The text; nothing of "" is an empty expression."""
        parts: list[str] = []
        plain = ""
        for part in _TOKEN.split(text):
            token_id = self._special_token_id(part) if _TOKEN.fullmatch(part) else None
            if token_id is None:
                plain += part
                continue
            parts += [_quoted(plain), f"<[{token_id}]>"] if plain else [f"<[{token_id}]>"]
            plain = ""
        return " ".join([*parts, _quoted(plain)] if plain else parts)

    def value(self, schema: Mapping[str, object]) -> str:
        """A value of a JSON schema, on one line."""
        return f"%json {json.dumps({**schema, **_TIGHT})}"

    def rule(self, expression: str, attributes: str = "") -> str:
        """The name of a new rule."""
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {expression}")
        return name

    def text_until(self, end: str, lengths: str = "*") -> str:
        """Any text, and `end` behind it. lengths: a regular expression's count of characters."""
        if all(self._special_token_id(sign) is None for sign in special_token_texts(end)):
            return self.rule(rf"/(.|\n){lengths}/", f"[suffix={_quoted(end)}]")
        return joined(self.rule(rf"/(.|\n){lengths}/"), self.literal(end))


def joined(*expressions: str) -> str:
    """One after the other; those that are empty are left out."""
    return " ".join(filter(None, expressions))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
