"""Calls in a section, each with its name before its arguments: DeepSeek's and Kimi's models."""

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from llmserve.parsers.call_object import CallObject
from llmserve.parsers.call_object import State as CallState
from llmserve.parsers.lark import Lark, joined
from llmserve.parsers.text_parser import MAX_HEAD, State, TextParser, sign_at
from llmserve.parsers.tool_style import Schemas, ToolStyle


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedStyle(ToolStyle):
    """`begin`, calls, `end`. A call is `call_begin`, what `head` matches, an object of JSON, `tail`
    where it is written, and `call_end`."""

    end: str
    call_begin: str
    call_end: str
    head: re.Pattern[str]  # groups: name, and id where the model numbers its calls
    tail: str = ""
    written_head: tuple[str, str] = ("", "")  # around the name, for a grammar
    has_number: bool = False  # a colon and a number stand behind the name

    def parser(self, names: Collection[str] | None, schemas: Schemas) -> "NamedParser":
        """See ToolStyle."""
        return NamedParser(self, names)

    def body(self, lark: Lark, name: str, parameters: Mapping[str, object]) -> str:
        """See ToolStyle."""
        before, after = self.written_head
        head = lark.literal(f"{before}{name}{'' if self.has_number else after}")
        number = f'":" /[0-9]/ {lark.literal(after)}' if self.has_number else ""
        return joined(head, number, lark.value(parameters))


class NamedParser(TextParser):
    """Of one sample, see ToolStyle.parser."""

    def __init__(self, style: NamedStyle, names: Collection[str] | None = None) -> None:
        super().__init__(style.begin, style.call_begin)
        self._style = style
        self._names = names
        self._between_calls = (self._section, self._after_arguments)
        self._call = CallObject(0, names)
        self._id = ""  # the model's own
        self._ids: set[str] = set()

    def _begin(self, sign: str) -> State:
        return self._head if sign == self._style.call_begin else self._section

    def _section(self, text: str, pos: int) -> int | None:
        """Before a call, or at the end of the section."""
        if (stop := self._past_whitespace(text, pos)) != pos:
            return stop
        sign = sign_at(text, pos, self._style.call_begin, self._style.end)
        if sign is None:
            return None
        if not sign:
            return self._give_up(pos)
        is_end = sign == self._style.end
        if is_end and self._writer.is_after_call:
            self._raw = ""
            self._at = self._content
        elif is_end:  # a section without calls
            self._raw += sign
            return self._give_up(pos + len(sign))
        else:
            self._raw += sign
            self._at = self._head
        return pos + len(sign)

    def _head(self, text: str, pos: int) -> int | None:
        """All up to the arguments."""
        end = text.find("{", pos)
        if end < 0 and len(text) - pos <= MAX_HEAD:
            return None
        match = self._style.head.fullmatch(text, pos, end) if 0 <= end - pos <= MAX_HEAD else None
        if match is None:
            return self._give_up(pos)
        self._raw += match.group()
        found = match.groupdict().get("id") or ""
        self._id = "" if found in self._ids else found
        self._ids.add(found)
        self._call = CallObject(self._num_calls, self._names, ends_with_arguments=True)
        self._feed_call(f'{{"name":"{match["name"]}","arguments":', 0)
        if self._call.state is CallState.FAILED:
            return self._give_up(end)
        self._note_call()
        if self._id:
            announced = self._pieces.tool_calls[-1]
            self._pieces.tool_calls[-1] = dataclasses.replace(announced, id=self._id)
        self._at = self._arguments
        return end

    def _feed_call(self, text: str, pos: int) -> int:
        return self._call.feed(text, pos, self._pieces.tool_calls)

    def _arguments(self, text: str, pos: int) -> int:
        stop = self._feed_call(text, pos)
        if self._call.is_over:
            self._at = self._after_arguments
        return stop

    def _after_arguments(self, text: str, pos: int) -> int | None:
        if (stop := self._past_whitespace(text, pos)) != pos:
            return stop
        style = self._style
        sign = sign_at(text, pos, style.tail, style.call_end, style.call_begin, style.end)
        if sign is None:
            return None
        if not sign:
            return self._give_up(pos)
        if sign in (style.call_begin, style.end):  # the call's own end is missing
            self._at = self._section
            return pos
        self._raw = ""
        if sign == style.call_end:
            self._at = self._section
        return pos + len(sign)
