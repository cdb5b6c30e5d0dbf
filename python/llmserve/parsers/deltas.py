"""What parsers of a model's text give: pieces of a chat message, in OpenAI's terms.

A parser is fed the text as it comes and gives what became certain. It decides by the text alone:
all its pieces together do not depend on where the text was cut. What is no call, or is broken,
is content; nothing is ever taken back, and no text makes a parser raise.
"""

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

_WHITESPACE = " \n\r\t"
_NEW_CALL_ID = re.compile(r"call_[0-9a-f]{24}")


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """News of one call. The first has id and name; the arguments' pieces make up JSON."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None

    def to_dict(self) -> dict[str, object]:
        """As it stands in a chunk."""
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class Pieces:
    """What came of a piece of text."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def add(self, other: "Pieces") -> None:
        """Puts what came later behind."""
        self.reasoning += other.reasoning
        self.content += other.content
        self.tool_calls += other.tool_calls


class ToolParser(Protocol):
    """Of one sample."""

    def feed(self, text: str) -> Pieces:
        """The next piece of text."""

    def finish(self) -> Pieces:
        """There is no more: what was held back."""


def merged(deltas: Iterable[ToolCallDelta]) -> list[dict[str, object]]:
    """Whole calls, as they stand in a message."""
    calls: dict[int, dict[str, object]] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        calls.setdefault(delta.index, {"id": delta.id, "name": delta.name})
        arguments.setdefault(delta.index, []).append(delta.arguments)
    return [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": "".join(arguments[index])},
        }
        for index, call in calls.items()
    ]


def new_call_id() -> str:
    """An id that no other call has."""
    return f"call_{secrets.token_hex(12)}"


def is_new_call_id(call_id: str) -> bool:
    """Whether it was drawn here, and not given by the model."""
    return _NEW_CALL_ID.fullmatch(call_id) is not None


def held_length(text: str, marker: str) -> int:
    """Characters at the end of `text` that may be the beginning of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


class ContentWriter:
    """Content in which calls stand: the whitespace around them is theirs, but for what parts the
    content before them from that after them."""

    def __init__(self) -> None:
        self._held = ""  # whitespace that may stand before a call
        self._gap = ""  # goes before what follows the call
        self._has_content = False
        self.is_after_call = False  # and nothing has come since

    def write(self, text: str) -> str:
        """What of it may go out now."""
        if self.is_after_call:
            text = text.lstrip(_WHITESPACE)
            if not text:
                return ""
            self.is_after_call = False
            text = self._gap + text
        text = self._held + text
        end = len(text.rstrip(_WHITESPACE))
        self._held = text[end:]
        self._has_content |= end > 0
        return text[:end]

    def call(self) -> None:
        """A call stands here."""
        if not self.is_after_call:  # else it follows another one
            self._gap = (self._held or "\n") if self._has_content else ""
        self._held = ""
        self.is_after_call = True

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held
