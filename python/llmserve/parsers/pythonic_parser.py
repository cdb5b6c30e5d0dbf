"""Calls as Python writes them: weather(city="Rome"), now()."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from llmserve.parsers.arguments_grammar import keyword_arguments
from llmserve.parsers.deltas import Pieces
from llmserve.parsers.lark import Lark, joined
from llmserve.parsers.python_literals import KEY, read_escape, read_value
from llmserve.parsers.text_parser import MAX_HEAD, NAME, State, TextParser, sign_at
from llmserve.parsers.tool_style import Schemas, ToolStyle

_PLAIN = re.compile(r"[^\"'()\[\]{}\\,]+")
_IN_STRING = {'"': re.compile(r'[^"\\]+'), "'": re.compile(r"[^'\\]+")}


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonicStyle(ToolStyle):
    """Calls in a list or, without is_list, one behind the other, where the text starts or behind
    `begin`."""

    end: str = ""
    is_list: bool = True

    def parser(self, names: Collection[str] | None, schemas: Schemas) -> "PythonicParser":
        """See ToolStyle."""
        return PythonicParser(self, names)

    def body(self, lark: Lark, name: str, parameters: Mapping[str, object]) -> str:
        """See ToolStyle."""
        return joined(lark.literal(f"{name}("), keyword_arguments(lark, parameters), '")"')


class PythonicParser(TextParser):
    """Of one sample, see ToolStyle.parser. A call is announced once the first of its values has
    begun, or it has ended without any: then its texts go out as they come, other values at their
    ends."""

    def __init__(self, style: PythonicStyle, names: Collection[str] | None = None) -> None:
        super().__init__(*filter(None, (style.begin,)))
        self._style = style
        self._names = names
        if style.is_bare:
            self._at = self._start
        self._between_calls = (self._after_call, self._after_list)
        self._name = ""
        self._key_read = ""
        self._is_announced = False  # and has not ended
        self._num_values = 0
        self._value_text = ""  # of a value that is no text, so far
        self._depth = 0
        self._quote = ""  # of the text that the value is, or is in
        self._is_escaped = False

    def finish(self) -> Pieces:
        """See ToolParser: arguments that break off stay as far as they came."""
        if self._is_announced:
            self._rest = self._raw = ""
        return super().finish()

    def _begin(self, sign: str) -> State:
        return self._list if self._style.is_list else self._head

    def _start(self, text: str, pos: int) -> int | None:
        if (stop := self._past_whitespace(text, pos)) != pos:
            return stop
        sign = sign_at(text, pos, self._style.begin)
        if sign is None:
            return None
        self._raw += sign
        self._at = self._list
        return pos + len(sign)

    def _list(self, text: str, pos: int) -> int | None:
        if (stop := self._past_whitespace(text, pos)) != pos:
            return stop
        if text[pos] != "[":
            return self._give_up(pos)
        self._raw += "["
        self._at = self._head
        return pos + 1

    def _head(self, text: str, pos: int) -> int | None:
        if (stop := self._past_whitespace(text, pos)) != pos:
            return stop
        if text[pos] == "]" and self._raw.strip() == ",":  # behind the last call
            self._at = self._after_list
            return pos + 1
        match = NAME.match(text, pos)
        end = match.end() if match else pos
        if match is None or end - pos > MAX_HEAD:
            return self._give_up(pos)
        if end == len(text):
            return None
        self._name = match.group()
        if text[end] != "(" or (self._names is not None and self._name not in self._names):
            return self._give_up(pos)
        self._raw += text[pos : end + 1]
        self._num_values = 0
        self._at = self._before_key
        return end + 1

    def _break_off(self, pos: int) -> int:
        """A call that is announced has what came of its arguments; else there is none."""
        if self._is_announced:
            self._end_call()
        return self._give_up(pos)

    def _before_key(self, text: str, pos: int) -> int | None:
        if (stop := self._past_whitespace(text, pos)) != pos:
            return stop
        if text[pos] == ")":
            return self._take_end(pos)
        match = KEY.match(text, pos)
        end = match.end() if match else pos
        if match is None or end - pos > MAX_HEAD:
            return self._break_off(pos)
        if end == len(text):
            return None
        self._key_read = match.group()
        self._raw += self._key_read
        self._at = self._equals
        return end

    def _equals(self, text: str, pos: int) -> int:
        if (stop := self._past_whitespace(text, pos)) != pos:
            return stop
        if text[pos] != "=":
            return self._break_off(pos)
        self._raw += "="
        self._at = self._before_value
        return pos + 1

    def _before_value(self, text: str, pos: int) -> int:
        if (stop := self._past_whitespace(text, pos)) != pos:
            return stop
        self._quote = ""
        if text[pos] in _IN_STRING:
            self._begin_value()
            self._send('"')
            self._quote = text[pos]
            self._at = self._text
            return pos + 1
        self._value_text = ""
        self._depth = 0
        self._at = self._value
        return pos

    def _begin_value(self) -> None:
        if not self._is_announced:
            self._is_announced = True
            self._announce(self._name)
        key = json.dumps(self._key_read, ensure_ascii=False)
        self._send(f"{', ' if self._num_values else '{'}{key}: ")
        self._num_values += 1

    def _text(self, text: str, pos: int) -> int | None:
        if match := _IN_STRING[self._quote].match(text, pos):
            self._send(json.dumps(match.group(), ensure_ascii=False)[1:-1])
            return match.end()
        if text[pos] == self._quote:
            self._send('"')
            self._at = self._after_value
            return pos + 1
        try:
            found = read_escape(text, pos)
        except ValueError:
            self._send('"')
            return self._break_off(pos)
        if found is None:
            return None
        self._send(json.dumps(found[0], ensure_ascii=False)[1:-1])
        return found[1]

    def _value(self, text: str, pos: int) -> int:
        """A bracket or a text within the value, or what stands between; or the value's end."""
        begin = pos
        if self._quote:
            pos = self._in_string(text, pos)
        elif match := _PLAIN.match(text, pos):
            pos = match.end()
        elif text[pos] in ",)" and self._depth == 0:
            return self._take_value(pos)
        else:
            if text[pos] in "\"'":
                self._quote = text[pos]
            self._depth += (text[pos] in "([{") - (text[pos] in ")]}")
            pos += 1
        self._value_text += text[begin:pos]
        self._raw += text[begin:pos]
        return self._break_off(pos) if self._depth < 0 else pos

    def _in_string(self, text: str, pos: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
        elif match := _IN_STRING[self._quote].match(text, pos):
            return match.end()
        elif text[pos] == "\\":
            self._is_escaped = True
        else:
            self._quote = ""
        return pos + 1

    def _take_value(self, pos: int) -> int:
        try:
            value = read_value(self._value_text)
        except ValueError:
            return self._break_off(pos)
        self._begin_value()
        self._send(json.dumps(value, ensure_ascii=False))
        self._at = self._after_value
        return pos

    def _after_value(self, text: str, pos: int) -> int:
        if (stop := self._past_whitespace(text, pos)) != pos:
            return stop
        if text[pos] == ",":
            self._at = self._before_key
            return pos + 1
        return self._take_end(pos) if text[pos] == ")" else self._break_off(pos)

    def _take_end(self, pos: int) -> int:
        if not self._is_announced:  # it has no arguments
            self._announce(self._name)
        self._end_call()
        self._at = self._after_call
        return pos + 1

    def _end_call(self) -> None:
        self._send("}" if self._num_values else "{}")
        self._is_announced = False
        self._raw = ""

    def _after_call(self, text: str, pos: int) -> int | None:
        if (stop := self._past_whitespace(text, pos)) != pos:
            return stop
        if not self._style.is_list:
            if NAME.match(text, pos):
                self._at = self._head
                return pos
            return self._after_list(text, pos)
        if text[pos] not in ",]":
            return self._give_up(pos)
        self._raw = text[pos]
        self._at = self._head if text[pos] == "," else self._after_list
        return pos + 1

    def _after_list(self, text: str, pos: int) -> int | None:
        self._raw = ""
        if (stop := self._past_whitespace(text, pos)) != pos:
            return stop
        sign = sign_at(text, pos, self._style.end)
        if sign is None:
            return None
        self._at = self._content
        return pos + len(sign)
