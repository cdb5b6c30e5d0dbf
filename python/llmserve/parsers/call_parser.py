"""Calls that are JSON objects, whatever a family's signs around them: a style says which."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from llmserve.parsers.call_object import CallObject
from llmserve.parsers.call_object import State as CallState
from llmserve.parsers.lark import Lark, joined
from llmserve.parsers.text_parser import MAX_HEAD, NAME, State, TextParser, sign_at
from llmserve.parsers.tool_style import Schemas, ToolStyle


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonStyle(ToolStyle):
    """{"name": ..., "arguments": {...}}, with signs around it."""

    other_begins: tuple[str, ...] = ()  # that models write in the place of `begin`
    ends: tuple[str, ...] = ()  # after a call, or after a list of them, where there is an end
    more: str = ""  # between calls after one `begin`, where there may be more
    argument_key: str = "arguments"
    is_list: bool = False  # calls may stand in a JSON list
    may_be_lines: bool = False  # or one behind the other, with nothing between
    name_end: str = ""  # where a name may stand before its arguments alone: what parts the two

    def parser(self, names: Collection[str] | None, schemas: Schemas) -> "CallParser":
        """See ToolStyle."""
        return CallParser(self, names)

    def body(self, lark: Lark, name: str, parameters: Mapping[str, object]) -> str:
        """See ToolStyle."""
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{self.argument_key}": '
        return joined(lark.literal(head), lark.value(parameters), lark.literal("}"))


class CallParser(TextParser):
    """Of one sample, see ToolStyle.parser."""

    def __init__(self, style: JsonStyle, names: Collection[str] | None = None) -> None:
        super().__init__(*filter(None, (style.begin, *style.other_begins)))
        self._style = style
        self._names = names
        if style.is_bare:
            self._at = self._start
        self._between_calls = (self._next_call, self._after_call)
        self._call = CallObject(0, names)
        self._in_list = False

    def _begin(self, sign: str) -> State:
        return self._first_call

    def _give_up(self, pos: int) -> int:
        self._in_list = False
        return super()._give_up(pos)

    def _start(self, text: str, pos: int) -> int | None:
        """Of a text that may begin with a call, or with the sign of one."""
        if (stop := self._past_whitespace(text, pos)) != pos:
            return stop
        sign = sign_at(text, pos, *self._begins)
        if sign is None:
            return None
        self._raw += sign
        self._at = self._first_call
        return pos + len(sign)

    def _first_call(self, text: str, pos: int) -> int | None:
        """A call, or a list of them."""
        if (stop := self._past_whitespace(text, pos)) != pos:
            return stop
        if text[pos] == "[" and self._style.is_list:
            self._in_list = True
            self._raw += "["
            self._at = self._next_call
            return pos + 1
        if self._style.name_end and NAME.match(text, pos):
            self._at = self._name
            return pos
        return self._next_call(text, pos)

    def _next_call(self, text: str, pos: int) -> int | None:
        if (stop := self._past_whitespace(text, pos)) != pos:
            return stop
        if text[pos] != "{":
            return self._give_up(pos)
        self._begin_call(has_bare_arguments=False)
        return pos

    def _begin_call(self, has_bare_arguments: bool) -> None:
        self._call = CallObject(self._num_calls, self._names, has_bare_arguments)
        self._at = self._in_call

    def _name(self, text: str, pos: int) -> int | None:
        """name[ARGS]{...}: the arguments alone."""
        match = NAME.match(text, pos)
        end = match.end() if match else pos
        if end - pos > MAX_HEAD:
            return self._give_up(pos)
        if end == len(text):
            return None
        sign = "" if text[end] == "{" else sign_at(text, end, self._style.name_end)
        if sign is None:
            return None
        begin = end + len(sign)
        if not sign and text[end] != "{":
            return self._give_up(pos)
        self._raw += text[pos:begin]
        self._begin_call(has_bare_arguments=True)
        self._feed_call(f'{{"name":"{text[pos:end]}","arguments":', 0)
        return begin

    def _feed_call(self, text: str, pos: int) -> int:
        return self._call.feed(text, pos, self._pieces.tool_calls)

    def _in_call(self, text: str, pos: int) -> int:
        stop = self._feed_call(text, pos)
        if not self._call.is_announced:
            self._raw += text[pos:stop]
        elif self._num_calls == self._call.index:
            self._note_call()
        else:
            self._raw = ""
        if self._call.state is CallState.FAILED:
            return self._give_up(stop)
        if self._call.state is CallState.DONE:
            self._at = self._after_call
        return stop

    def _after_call(self, text: str, pos: int) -> int | None:
        if (stop := self._past_whitespace(text, pos)) != pos:
            return stop
        more = "," if self._in_list else self._style.more
        ends = ("]",) if self._in_list else self._style.ends
        sign = sign_at(text, pos, more, *ends)
        if sign is None:
            return None
        if not sign and self._style.may_be_lines and not self._in_list and text[pos] == "{":
            self._begin_call(has_bare_arguments=False)
            return pos
        if not sign:
            return self._give_up(pos)
        if sign == more:
            self._raw += more
            self._at = self._next_call
        elif self._in_list and self._style.ends:
            self._raw = ""
            self._in_list = False  # the style's own end is to come
        else:
            self._raw = ""
            self._in_list = False
            self._at = self._content
        return pos + len(sign)
