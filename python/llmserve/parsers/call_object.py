"""One call as a JSON object, {"name": ..., "arguments": {...}}, read as it comes.

It is announced once its name is known; then its arguments go out as they come. They are not
checked, only followed to their end: what a model writes wrongly is for the caller to see. Until it
is announced, it can turn out to be no call.
"""

import enum
import json
import re
from collections.abc import Collection

from llmserve.parsers.deltas import ToolCallDelta, new_call_id

_PLAIN = re.compile(r'[^"\\{}\[\]]+')  # of a value outside strings
_IN_STRING = re.compile(r'[^"\\]+')
_SCALAR = re.compile(r"[^\s,{}\[\]\":]+")
_WHITESPACE = re.compile(r"[ \t\n\r]+")
NAME_KEYS = ("name",)
ARGUMENT_KEYS = ("arguments", "parameters")


class State(enum.Enum):
    """What comes next."""

    OBJECT = enum.auto()  # its opening brace
    KEY = enum.auto()  # a key, or the end
    COLON = enum.auto()
    BEFORE_VALUE = enum.auto()
    VALUE = enum.auto()
    AFTER_VALUE = enum.auto()  # a comma or the end
    DONE = enum.auto()
    FAILED = enum.auto()  # no call, and it was not announced


class CallObject:
    """Reads one call. `names`: of the tools that there are, None takes any. ends_with_arguments:
    the object was begun by who reads, and its end is not in the text: that of its arguments is."""

    def __init__(
        self, index: int, names: Collection[str] | None, ends_with_arguments: bool = False
    ) -> None:
        self.state = State.OBJECT
        self.is_announced = False
        self.index = index
        self._names = names
        self._ends_with_arguments = ends_with_arguments
        self._key = ""
        self._value = ""  # so far; of arguments that go out as they come, what has not gone yet
        self._arguments: str | None = None  # that came before the name
        self._has_arguments = False
        self._is_key = False
        self._is_first_object = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    @property
    def is_over(self) -> bool:
        """Whether the text that follows is not its."""
        return self.state in (State.DONE, State.FAILED)

    def feed(self, text: str, pos: int, out: list[ToolCallDelta]) -> int:
        """Reads on from `pos`, and returns where it stopped: the end, or what is not its."""
        while pos < len(text) and not self.is_over:
            if self.state is State.VALUE:
                pos = self._go_on_with_value(text, pos, out)
            elif match := _WHITESPACE.match(text, pos):
                pos = match.end()
            else:
                pos = self._read_sign(text, pos, out)
        return pos

    def _go_on_with_value(self, text: str, pos: int, out: list[ToolCallDelta]) -> int:
        pos = self._read_value(text, pos)
        if self._is_streamed:
            self._send(out)
        if self.state is State.AFTER_VALUE:
            self._take_value(out)
        if self._ends_with_arguments and self._has_arguments:
            self._end(out)
        return pos

    @property
    def _is_streamed(self) -> bool:
        """Whether the value is that of the arguments and goes out as it comes."""
        return self.is_announced and self._key in ARGUMENT_KEYS and self._is_first_object

    def _read_sign(self, text: str, pos: int, out: list[ToolCallDelta]) -> int:
        character = text[pos]
        if self.state is State.OBJECT and character == "{":
            self.state = State.KEY
        elif self.state in (State.KEY, State.AFTER_VALUE) and character == "}":
            self._end(out)
        elif self.state is State.AFTER_VALUE and character == ",":
            self.state = State.KEY
        elif self.state is State.COLON and character == ":":
            self.state = State.BEFORE_VALUE
        elif (self.state is State.KEY and character == '"') or (
            self.state is State.BEFORE_VALUE and character not in ",:}]"
        ):
            self._begin_value(character, is_key=self.state is State.KEY)
            return pos
        else:
            self._fail()
            return pos
        return pos + 1

    def _begin_value(self, character: str, is_key: bool) -> None:
        if is_key:
            self._key = ""
        self._is_key = is_key
        self._is_first_object = not self._has_arguments and character == "{"
        self._value = ""
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self.state = State.VALUE

    def _read_value(self, text: str, pos: int) -> int:
        begin = pos
        while pos < len(text):
            if self._in_string:
                pos = self._read_in_string(text, pos)
            elif self._depth > 0 and (match := _PLAIN.match(text, pos)):
                pos = match.end()
                continue
            elif text[pos] == '"':
                self._in_string = True
                pos += 1
                continue
            elif text[pos] in "{[":
                self._depth += 1
                pos += 1
                continue
            elif self._depth > 0:  # a bracket that closes, or a stray backslash
                self._depth -= text[pos] in "}]"
                pos += 1
            elif match := _SCALAR.match(text, pos):
                pos = match.end()
                continue
            else:  # the end of a scalar
                self.state = State.AFTER_VALUE
                break
            if self._depth == 0 and not self._in_string:
                self.state = State.AFTER_VALUE
                break
        self._value += text[begin:pos]
        return pos

    def _read_in_string(self, text: str, pos: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return pos + 1
        if match := _IN_STRING.match(text, pos):
            return match.end()
        if text[pos] == "\\":
            self._is_escaped = True
        else:
            self._in_string = False
        return pos + 1

    def _take_value(self, out: list[ToolCallDelta]) -> None:
        if self._is_key:
            key = _loaded(self._value)
            self._key = key if isinstance(key, str) else ""
            self.state = State.COLON
        elif self._key in NAME_KEYS and not self.is_announced:
            self._announce(_loaded(self._value), out)
        elif self._key in ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            if self._is_first_object and self.is_announced:
                return  # sent already
            self._arguments = _as_arguments(self._value)
            if self.is_announced:
                self._value, self._arguments = self._arguments, None
                self._send(out)

    def _announce(self, name: object, out: list[ToolCallDelta]) -> None:
        if not isinstance(name, str) or not name or (self._names and name not in self._names):
            self._fail()
            return
        self.is_announced = True
        arguments, self._arguments = self._arguments or "", None
        out.append(ToolCallDelta(self.index, arguments, new_call_id(), name))

    def _send(self, out: list[ToolCallDelta]) -> None:
        if self._value:
            out.append(ToolCallDelta(self.index, self._value))
            self._value = ""

    def _end(self, out: list[ToolCallDelta]) -> None:
        if not self.is_announced:
            self._fail()
            return
        if not self._has_arguments:
            out.append(ToolCallDelta(self.index, "{}"))
        self.state = State.DONE

    def _fail(self) -> None:
        """What is announced stays, as far as it came."""
        self.state = State.DONE if self.is_announced else State.FAILED


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _as_arguments(text: str) -> str:
    """Arguments that are a string may be an object, as JSON within it."""
    if text.startswith('"'):
        value = _loaded(text)
        if isinstance(value, str) and not value.strip():
            return "{}"
        if isinstance(value, str) and isinstance(_loaded(value), dict):
            return value
    return "{}" if text == "null" else text
