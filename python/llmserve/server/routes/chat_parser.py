"""What a chat answer's text is made of: content, reasoning, calls of tools. A parser takes the text
of one sample as it comes and gives the fields of its deltas."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from llmserve.outputs import CompletionOutput
from llmserve.parsers.call_parser import ToolStyle
from llmserve.parsers.deltas import Pieces, ToolCallDelta, ToolParser
from llmserve.parsers.registry import (
    REASONING_STYLES,
    detect_tool_style,
    tool_parser,
    tool_style,
)
from llmserve.parsers.think import ThinkParser
from llmserve.server.models import ServedModel
from llmserve.server.routes.bodies import ChatBody
from llmserve.server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How the answer to one request is read."""

    style: ToolStyle | None  # None: no call is looked for
    tool_names: Collection[str]
    is_parallel: bool  # several calls may be given on
    reasoning: tuple[str, str] | None  # what opens and ends a section; None: none is looked for
    is_thinking: bool  # the prompt ends within a section
    gives_reasoning: bool

    def parser(self) -> "ChatParser":
        """For one sample."""
        return ChatParser(self)


def served_tool_style(model: ServedModel, settings: ServerSettings) -> ToolStyle:
    """In which the model writes calls: by the setting, or by what its chat template shows."""
    if settings.tool_call_parser != "auto":
        return tool_style(settings.tool_call_parser)
    return detect_tool_style(model.tokenizer().chat_template_source)


def reasoning_section(model: ServedModel, settings: ServerSettings) -> tuple[str, str] | None:
    """What opens and ends the model's reasoning; None where none is looked for."""
    if settings.reasoning_parser == "none":
        return None
    start, end = REASONING_STYLES["think"]
    if settings.reasoning_parser == "think" or end in model.tokenizer().chat_template_source:
        return start, end
    return None


def chat_format(
    body: ChatBody,
    model: ServedModel,
    settings: ServerSettings,
    names: Collection[str],
    prompt: str,
    reasoning: tuple[str, str] | None,
) -> ChatFormat:
    """names: of the tools that may be called. reasoning: the section to look for."""
    is_thinking = reasoning is not None and prompt.rstrip().endswith(reasoning[0])
    return ChatFormat(
        style=served_tool_style(model, settings) if names else None,
        tool_names=names,
        is_parallel=body.parallel_tool_calls is not False,
        reasoning=reasoning,
        is_thinking=is_thinking,
        gives_reasoning=body.include_reasoning is not False,
    )


class ChatParser:
    """Of one sample. What it gives does not depend on how the text was cut."""

    def __init__(self, form: ChatFormat) -> None:
        self._format = form
        self._think = ThinkParser(form.is_thinking, *form.reasoning) if form.reasoning else None
        self._tools: ToolParser | None = None
        if form.style is not None:
            # A call of a tool that is not there is the client's to refuse; only where any object
            # may be a call are the names needed to tell.
            names = form.tool_names if form.style.is_bare else None
            self._tools = tool_parser(form.style, names)
        self.has_tool_calls = False  # finish_reason "stop" is "tool_calls" then

    def read(self, completion: CompletionOutput) -> Pieces:
        """What the new text of an output adds to the message; at its end also what was held
        back."""
        pieces = self._feed(completion.text)
        if completion.finish_reason is not None:
            pieces.add(self._finish())
        if not self._format.gives_reasoning:
            pieces.reasoning = ""
        if not self._format.is_parallel:
            pieces.tool_calls = [delta for delta in pieces.tool_calls if delta.index == 0]
        self.has_tool_calls |= bool(pieces.tool_calls)
        return pieces

    def _feed(self, text: str) -> Pieces:
        return self._call(Pieces(content=text) if self._think is None else self._think.feed(text))

    def _finish(self) -> Pieces:
        pieces = self._call(Pieces() if self._think is None else self._think.finish())
        if self._tools is not None:
            pieces.add(self._tools.finish())
        return pieces

    def _call(self, pieces: Pieces) -> Pieces:
        """With the calls that stand in the content."""
        if self._tools is None:
            return pieces
        found = self._tools.feed(pieces.content)
        found.reasoning = pieces.reasoning
        return found


def streamed_calls(deltas: Iterable[ToolCallDelta]) -> list[dict[str, object]]:
    """As they stand in a chunk: one entry a call."""
    by_index: dict[int, ToolCallDelta] = {}
    for delta in deltas:
        first = by_index.get(delta.index)
        if first is not None:
            arguments = first.arguments + delta.arguments
            delta = ToolCallDelta(first.index, arguments, first.id, first.name)
        by_index[delta.index] = delta
    return [delta.to_dict() for delta in by_index.values()]
