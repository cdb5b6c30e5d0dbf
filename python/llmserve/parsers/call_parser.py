"""Reads the calls in a model's text, whatever its family's signs for them: a style says which."""

import enum
import re
from collections.abc import Collection
from dataclasses import dataclass

from llmserve.parsers.call_object import CallObject, State
from llmserve.parsers.deltas import ContentWriter, Pieces, held_length

_WHITESPACE = re.compile(r"[ \t\n\r]+")
_NAME = re.compile(r"[A-Za-z0-9_.:-]+")
_MAX_NAME_LENGTH = 256


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """How a family of models writes calls."""

    name: str
    begin: str  # before a call, or before the first of several
    end: str = ""  # after it, where there is one
    separator: str = ""  # between calls after one `begin`, where there may be more
    argument_key: str = "arguments"
    is_list: bool = False  # calls may stand in a JSON list
    is_bare: bool = False  # a text may start with a call, without `begin`
    name_end: str = ""  # where a name may stand before its arguments alone: what parts the two
    # Special tokens in which the style shows: they have to be in the text, and tell a template.
    special_tokens: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()  # what else in a chat template tells that it is this style


class _At(enum.Enum):
    START = enum.auto()
    CONTENT = enum.auto()
    CALL_OR_LIST = enum.auto()  # after `begin`
    CALL = enum.auto()  # after a separator
    NAME = enum.auto()
    IN_CALL = enum.auto()
    AFTER_CALL = enum.auto()


class CallParser:
    """Of one sample, see ToolParser. `names`: of the tools that there are; calls of others are
    content. None takes any."""

    def __init__(self, style: ToolStyle, names: Collection[str] | None = None) -> None:
        self._style = style
        self._names = names
        self._at = _At.START if style.is_bare else _At.CONTENT
        self._rest = ""  # read and not decided
        self._raw = ""  # of what may turn out to be content: since the last that was none
        self._writer = ContentWriter()
        self._pieces = Pieces()
        self._call = CallObject(0, names)
        self._num_calls = 0
        self._in_list = False
        self._has_bare_arguments = False

    def feed(self, text: str) -> Pieces:
        """See ToolParser."""
        text = self._rest + text
        self._rest = ""
        pos = 0
        while pos < len(text):
            stop = self._step(text, pos)
            if stop is None:  # more has to be known
                self._rest = text[pos:]
                break
            pos = stop
        return self._take()

    def finish(self) -> Pieces:
        """See ToolParser."""
        raw, self._raw, self._rest = self._raw + self._rest, "", ""
        if self._at in (_At.AFTER_CALL, _At.CALL) and self._writer.is_after_call:
            raw = ""  # signs of the call before
        self._pieces.content += self._writer.write(raw) + self._writer.finish()
        return self._take()

    def _take(self) -> Pieces:
        pieces, self._pieces = self._pieces, Pieces()
        return pieces

    def _step(self, text: str, pos: int) -> int | None:
        """Where the next thing begins; None where more has to be known."""
        if self._at is _At.CONTENT:
            return self._read_content(text, pos)
        if self._at is _At.IN_CALL:
            return self._read_call(text, pos)
        if self._at is _At.NAME:
            return self._read_name(text, pos)
        if match := _WHITESPACE.match(text, pos):
            self._raw += match.group()
            return match.end()
        if self._at is _At.AFTER_CALL:
            return self._read_after_call(text, pos)
        return self._read_begin(text, pos)

    def _read_content(self, text: str, pos: int) -> int | None:
        begin = self._style.begin
        found = text.find(begin, pos) if begin else -1
        end = found if found >= 0 else len(text) - held_length(text[pos:], begin)
        self._pieces.content += self._writer.write(text[pos:end])
        if found < 0:
            return end if end > pos else None
        self._raw = begin
        self._at = _At.CALL_OR_LIST
        return found + len(begin)

    def _read_begin(self, text: str, pos: int) -> int | None:
        """At a call's first character, or that of a list of them."""
        style = self._style
        if self._at is _At.START and style.begin:
            if text.startswith(style.begin, pos):
                self._raw += style.begin
                self._at = _At.CALL_OR_LIST
                return pos + len(style.begin)
            if style.begin.startswith(text[pos:]):
                return None
        if text[pos] == "[" and style.is_list and self._at is not _At.CALL:
            self._in_list = True
            self._raw += "["
            self._at = _At.CALL
            return pos + 1
        if text[pos] == "{":
            self._begin_call()
            return pos
        if style.name_end and self._at is _At.CALL_OR_LIST and _NAME.match(text, pos):
            self._at = _At.NAME
            return pos
        return self._give_up(pos)

    def _begin_call(self) -> None:
        self._call = CallObject(self._num_calls, self._names)
        self._has_bare_arguments = False
        self._at = _At.IN_CALL

    def _read_name(self, text: str, pos: int) -> int | None:
        """name[ARGS]{...}: the arguments alone."""
        match = _NAME.match(text, pos)
        end = match.end() if match else pos
        if end - pos > _MAX_NAME_LENGTH:
            return self._give_up(pos)
        sign = self._style.name_end
        if text.startswith(sign, end):
            begin = end + len(sign)
        elif text.startswith("{", end):
            begin = end
        elif end == len(text) or sign.startswith(text[end:]):
            return None
        else:
            return self._give_up(pos)
        self._raw += text[pos:begin]
        self._begin_call()
        self._has_bare_arguments = True
        self._feed_call(f'{{"name":"{text[pos:end]}","arguments":', 0)
        return begin

    def _feed_call(self, text: str, pos: int) -> int:
        stop = self._call.feed(text, pos, self._pieces.tool_calls)
        if self._has_bare_arguments and self._call.state is State.AFTER_VALUE:
            self._call.feed("}", 0, self._pieces.tool_calls)
        return stop

    def _read_call(self, text: str, pos: int) -> int:
        stop = self._feed_call(text, pos)
        if self._call.is_announced:
            if self._num_calls == self._call.index:
                self._num_calls += 1
                self._writer.call()
            self._raw = ""
        else:
            self._raw += text[pos:stop]
        if self._call.state is State.FAILED:
            return self._give_up(stop)
        if self._call.state is State.DONE:
            self._at = _At.AFTER_CALL
        return stop

    def _read_after_call(self, text: str, pos: int) -> int | None:
        separator = "," if self._in_list else self._style.separator
        sign = "]" if self._in_list else self._style.end
        if separator and text.startswith(separator, pos):
            self._raw += separator
            self._at = _At.CALL
            return pos + len(separator)
        if sign and text.startswith(sign, pos):
            self._raw = ""
            if self._in_list and self._style.end:
                self._in_list = False  # the style's own end is to come
                return pos + 1
            self._in_list = False
            self._at = _At.CONTENT
            return pos + len(sign)
        if sign and sign.startswith(text[pos:]):
            return None
        return self._give_up(pos)

    def _give_up(self, pos: int) -> int:
        """What was no call is content, and what follows too, until the next one."""
        raw, self._raw = self._raw, ""
        self._pieces.content += self._writer.write(raw)
        self._in_list = False
        self._at = _At.CONTENT
        return pos
