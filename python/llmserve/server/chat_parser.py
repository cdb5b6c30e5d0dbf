"""What a chat answer's text is made of: the seam to tool calls and reasoning. A parser takes the
text of one sample as it comes and gives the fields of its deltas; without one, all is content."""

from collections.abc import Mapping
from typing import Protocol

from llmserve.server.bodies import ChatBody
from llmserve.server.models import ServedModel


class ChatParser(Protocol):
    """Of one sample. What it gives must not depend on how the text was cut."""

    def feed(self, text: str) -> Mapping[str, object]:
        """The delta's fields for the next piece of text: "content", "reasoning_content",
        "tool_calls"; those that have nothing new are left out."""

    def finish(self) -> Mapping[str, object]:
        """What was held back, at the end of the text."""

    @property
    def has_tool_calls(self) -> bool:
        """Whether any came: finish_reason "stop" is "tool_calls" then."""


class PlainText:
    """All is content."""

    has_tool_calls = False

    def feed(self, text: str) -> Mapping[str, object]:
        """See ChatParser."""
        return {"content": text} if text else {}

    def finish(self) -> Mapping[str, object]:
        """See ChatParser."""
        return {}


def make_parser(body: ChatBody, model: ServedModel) -> ChatParser:
    """The one that the request and the model need."""
    return PlainText()
