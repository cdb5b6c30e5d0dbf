"""Calls whose arguments are an object without quotes but a sign on both sides of each text:
FunctionGemma's."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from llmserve.parsers.arguments_grammar import escaped_arguments
from llmserve.parsers.deltas import Pieces, held_length
from llmserve.parsers.lark import Lark, joined
from llmserve.parsers.text_parser import MAX_HEAD, State, TextParser, sign_at
from llmserve.parsers.text_values import json_value, value_types
from llmserve.parsers.tool_style import Schemas, ToolStyle

_HEAD = "call:"
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_PLAIN = re.compile(r"[^<{}\[\],]+")
_SCALAR = re.compile(r"[^<{}\[\],]*")
_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EscapedStyle(ToolStyle):
    """`begin`, call:NAME, an object whose texts stand between two `quote`, and `end`."""

    end: str
    quote: str

    def parser(self, names: Collection[str] | None, schemas: Schemas) -> "EscapedParser":
        """See ToolStyle."""
        return EscapedParser(self, names, schemas)

    def body(self, lark: Lark, name: str, parameters: Mapping[str, object]) -> str:
        """See ToolStyle."""
        arguments = escaped_arguments(lark, parameters, self.quote)
        return joined(lark.literal(f"{_HEAD}{name}{{"), arguments, '"}"')


class EscapedParser(TextParser):
    """Of one sample, see ToolStyle.parser. Texts go out as they come, other values at their
    ends."""

    def __init__(
        self, style: EscapedStyle, names: Collection[str] | None, schemas: Schemas | None = None
    ) -> None:
        super().__init__(style.begin)
        self._style = style
        self._names = names
        self._schemas = schemas or {}
        self._between_calls = (self._after_call,)
        self._name_read = ""
        self._key_read = ""
        self._is_in_call = False
        self._num_values = 0
        self._value_text = ""
        self._depth = 0
        self._is_in_text = False  # within a value that is none itself

    def finish(self) -> Pieces:
        """See ToolParser: arguments that break off stay as far as they came."""
        if self._is_in_call:
            if self._at == self._text:
                self._send_text(self._rest)
            self._rest = self._raw = ""
        return super().finish()

    def _begin(self, sign: str) -> State:
        return self._head

    def _head(self, text: str, pos: int) -> int | None:
        if (stop := self._past_whitespace(text, pos)) != pos:
            return stop
        sign = sign_at(text, pos, _HEAD)
        if not sign:
            return None if sign is None else self._give_up(pos)
        self._raw += sign
        self._at = self._name
        return pos + len(sign)

    def _name(self, text: str, pos: int) -> int | None:
        match = _NAME.match(text, pos)
        end = match.end() if match else pos
        if match is None or end - pos > MAX_HEAD:
            return self._give_up(pos)
        if end == len(text):
            return None
        self._name_read = match.group()
        is_stranger = self._names is not None and self._name_read not in self._names
        if text[end] != "{" or is_stranger:
            return self._give_up(pos)
        self._announce(self._name_read)
        self._is_in_call = True
        self._num_values = 0
        self._at = self._before_key
        return end + 1

    def _end_call(self) -> None:
        self._send("}" if self._num_values else "{}")
        self._is_in_call = False
        self._raw = ""

    def _break_off(self, pos: int) -> int:
        self._end_call()
        return self._give_up(pos)

    def _before_key(self, text: str, pos: int) -> int | None:
        if (stop := self._past_whitespace(text, pos)) != pos:
            return stop
        if text[pos] == "}":
            self._end_call()
            self._at = self._after_call
            return pos + 1
        end = text.find(":", pos)
        if end < 0 and len(text) - pos <= MAX_HEAD:
            return None
        if not 0 <= end - pos <= MAX_HEAD:
            return self._break_off(pos)
        self._key_read = text[pos:end].replace(self._style.quote, "").strip()
        self._at = self._before_value
        return end + 1

    def _before_value(self, text: str, pos: int) -> int | None:
        if (stop := self._past_whitespace(text, pos)) != pos:
            return stop
        sign = sign_at(text, pos, self._style.quote)
        if sign is None:
            return None
        key = json.dumps(self._key_read, ensure_ascii=False)
        self._send(f"{', ' if self._num_values else '{'}{key}: ")
        self._num_values += 1
        if sign:
            self._send('"')
            self._at = self._text
            return pos + len(sign)
        self._value_text = ""
        self._depth = 0
        self._is_in_text = False
        self._at = self._value
        return pos

    def _text(self, text: str, pos: int) -> int | None:
        quote = self._style.quote
        found = text.find(quote, pos)
        end = found if found >= 0 else len(text) - held_length(text[pos:], quote)
        self._send_text(text[pos:end])
        if found < 0:
            return end if end > pos else None
        self._send('"')
        self._at = self._after_value
        return end + len(quote)

    def _send_text(self, text: str) -> None:
        self._send(json.dumps(text, ensure_ascii=False)[1:-1])

    def _value(self, text: str, pos: int) -> int | None:
        """A piece of a value that is no text; or its end."""
        begin, quote = pos, self._style.quote
        if self._is_in_text:
            found = text.find(quote, pos)
            end = found if found >= 0 else len(text) - held_length(text[pos:], quote)
            if found >= 0:
                end += len(quote)
                self._is_in_text = False
            self._value_text += text[begin:end]
            return end if end > pos else None
        if match := _PLAIN.match(text, pos):
            pos = match.end()
        elif text[pos] == "<":
            sign = sign_at(text, pos, quote)
            if sign is None:
                return None
            self._is_in_text = bool(sign)
            pos += len(sign) or 1
        elif text[pos] in ",}" and self._depth == 0:
            types = value_types(self._schemas.get(self._name_read, {}), self._key_read)
            self._send(read_escaped(self._value_text, quote, types))
            self._at = self._after_value
            return pos
        else:
            self._depth += (text[pos] in "[{") - (text[pos] in "]}")
            pos += 1
        self._value_text += text[begin:pos]
        return pos

    def _after_value(self, text: str, pos: int) -> int:
        if (stop := self._past_whitespace(text, pos)) != pos:
            return stop
        if text[pos] not in ",}":
            return self._break_off(pos)
        self._at = self._before_key
        return pos + (text[pos] == ",")

    def _after_call(self, text: str, pos: int) -> int | None:
        if (stop := self._past_whitespace(text, pos)) != pos:
            return stop
        sign = sign_at(text, pos, self._style.end)
        if sign is None:
            return None
        self._raw = ""
        self._at = self._content
        return pos + len(sign)


def read_escaped(text: str, quote: str, types: frozenset[str] = frozenset()) -> str:
    """A value that is no text, as JSON: an object, a list, a number or a word; a text where it is
    none of these.

    >>> read_escaped("{a:<escape>b, c<escape>,n:[1,true]}", "<escape>")
    '{"a": "b, c", "n": [1, true]}'
    """
    stripped = text.strip()
    if stripped[:1] not in ("{", "["):
        return json_value(stripped, types)
    try:
        return json.dumps(json.loads(stripped), ensure_ascii=False)
    except (ValueError, RecursionError):
        pass
    try:
        reader = _Reader(stripped, quote)
        value = reader.value(0)
        if reader.pos == len(stripped):
            return value
    except ValueError:
        pass
    return json.dumps(stripped, ensure_ascii=False)


class _Reader:
    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote
        self.pos = 0

    def value(self, depth: int) -> str:
        """As JSON. Raises ValueError."""
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deep")
        if self._take(self._quote):
            return json.dumps(self._until(self._quote), ensure_ascii=False)
        if self._take("{"):
            members = []
            while not self._take("}"):
                key = self._until(":").replace(self._quote, "").strip()
                members.append(f"{json.dumps(key, ensure_ascii=False)}: {self.value(depth + 1)}")
                self._take(",")
            return "{" + ", ".join(members) + "}"
        if self._take("["):
            items = []
            while not self._take("]"):
                items.append(self.value(depth + 1))
                self._take(",")
            return f"[{', '.join(items)}]"
        match = _SCALAR.match(self._text, self.pos)
        assert match is not None
        if not match.group():
            raise ValueError("a value is missing")
        self.pos = match.end()
        return json_value(match.group().strip(), frozenset())

    def _take(self, sign: str) -> bool:
        while self._text[self.pos : self.pos + 1].isspace():
            self.pos += 1
        is_there = self._text.startswith(sign, self.pos)
        self.pos += len(sign) * is_there
        return is_there

    def _until(self, sign: str) -> str:
        end = self._text.find(sign, self.pos)
        if end < 0:
            raise ValueError(f"{sign!r} is missing")
        found, self.pos = self._text[self.pos : end], end + len(sign)
        return found
