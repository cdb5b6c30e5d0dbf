"""Calls as Python writes them, in a list: [weather(city="Rome"), now()]."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from llmserve.parsers.arguments_grammar import keyword_arguments
from llmserve.parsers.lark import Lark, joined
from llmserve.parsers.python_literals import read_arguments
from llmserve.parsers.text_parser import MAX_HEAD, NAME, State, TextParser, sign_at
from llmserve.parsers.tool_style import Schemas, ToolStyle

_PLAIN = re.compile(r"[^\"'()\[\]{}\\]+")
_IN_STRING = {'"': re.compile(r'[^"\\]+'), "'": re.compile(r"[^'\\]+")}


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonicStyle(ToolStyle):
    """A list of calls, where the text starts or behind `begin`."""

    end: str = ""

    def parser(self, names: Collection[str] | None, schemas: Schemas) -> "PythonicParser":
        """See ToolStyle."""
        return PythonicParser(self, names)

    def body(self, lark: Lark, name: str, parameters: Mapping[str, object]) -> str:
        """See ToolStyle."""
        return joined(lark.literal(f"{name}("), keyword_arguments(lark, parameters), '")"')


class PythonicParser(TextParser):
    """Of one sample, see ToolStyle.parser. A call goes out when it is read: only then is it known
    that it is one."""

    def __init__(self, style: PythonicStyle, names: Collection[str] | None = None) -> None:
        super().__init__(*filter(None, (style.begin,)))
        self._style = style
        self._names = names
        self._at = self._start
        self._between_calls = (self._after_call, self._after_list)
        self._name = ""
        self._arguments = ""
        self._depth = 0
        self._quote = ""  # of the text that the arguments are in
        self._is_escaped = False

    def _begin(self, sign: str) -> State:
        return self._list

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
        self._arguments = ""
        self._depth = 0
        self._quote = ""
        self._is_escaped = False
        self._at = self._in_call
        return end + 1

    def _in_call(self, text: str, pos: int) -> int:
        """A text or a bracket of the arguments, or what stands between; or the call's end."""
        begin = pos
        if self._quote:
            pos = self._in_string(text, pos)
        elif match := _PLAIN.match(text, pos):
            pos = match.end()
        elif text[pos] == ")" and self._depth == 0:
            return self._take_call(pos)
        else:
            if text[pos] in "\"'":
                self._quote = text[pos]
            self._depth += (text[pos] in "([{") - (text[pos] in ")]}")
            pos += 1
        self._arguments += text[begin:pos]
        self._raw += text[begin:pos]
        return self._give_up(pos) if self._depth < 0 else pos

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

    def _take_call(self, pos: int) -> int:
        try:
            arguments = read_arguments(self._arguments)
        except ValueError:
            return self._give_up(pos)
        self._announce(self._name)
        self._send(json.dumps(arguments, ensure_ascii=False))
        self._at = self._after_call
        return pos + 1

    def _after_call(self, text: str, pos: int) -> int | None:
        if (stop := self._past_whitespace(text, pos)) != pos:
            return stop
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
