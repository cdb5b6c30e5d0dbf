"""What a chat answer's text is made of: content, reasoning, calls of tools. A parser takes the text
of one sample as it comes and gives the fields of its deltas."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from llmserve.outputs import CompletionOutput
from llmserve.parsers.deltas import Pieces, ToolCallDelta, ToolParser
from llmserve.parsers.reasoning import NO_REASONING, ReasoningStyle
from llmserve.parsers.registry import (
    detect_reasoning_style,
    detect_tool_style,
    reasoning_style,
    tool_parser,
    tool_style,
)
from llmserve.parsers.think import ThinkParser
from llmserve.parsers.tool_grammar import tool_function
from llmserve.parsers.tool_style import Schemas, ToolStyle
from llmserve.server.models import ServedModel
from llmserve.server.routes.bodies import ChatBody
from llmserve.server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How the answer to one request is read."""

    style: ToolStyle | None  # None: no call is looked for
    tool_names: Collection[str]
    is_parallel: bool  # several calls may be given on
    reasoning: ReasoningStyle | None  # None: no section is looked for
    is_thinking: bool  # the prompt ends within a section
    gives_reasoning: bool
    schemas: Schemas = field(default_factory=dict)  # of the tools' arguments
    # A grammar begins where the section ends, whatever looks like a call in it.
    has_grammar: bool = False

    def parser(self) -> "ChatParser":
        """For one sample."""
        return ChatParser(self)


def served_tool_style(model: ServedModel, settings: ServerSettings) -> ToolStyle:
    """In which the model writes calls: by the setting, or by what its chat template shows."""
    if settings.tool_call_parser != "auto":
        return tool_style(settings.tool_call_parser)
    return detect_tool_style(model.tokenizer().chat_template_source)


def served_reasoning_style(model: ServedModel, settings: ServerSettings) -> ReasoningStyle | None:
    """How the model writes its reasoning; None where none is looked for."""
    if settings.reasoning_parser in NO_REASONING:
        return None
    if settings.reasoning_parser != "auto":
        return reasoning_style(settings.reasoning_parser)
    return detect_reasoning_style(model.tokenizer().chat_template_source)


def chat_format(
    body: ChatBody,
    model: ServedModel,
    settings: ServerSettings,
    names: Collection[str],
    prompt: str,
    reasoning: ReasoningStyle | None,
    has_grammar: bool,
) -> ChatFormat:
    """names: of the tools that may be called. reasoning: the section to look for. has_grammar:
    what follows it is held to one."""
    style = served_tool_style(model, settings)
    return ChatFormat(
        style=style if names or style.is_envelope else None,
        tool_names=names,
        is_parallel=body.parallel_tool_calls is not False,
        reasoning=reasoning,
        is_thinking=reasoning is not None and reasoning.is_open(prompt),
        gives_reasoning=body.include_reasoning is not False,
        schemas=dict(tool_function("tools", tool) for tool in body.tools or ()) if names else {},
        has_grammar=has_grammar,
    )


def _calls_in_thought(form: ChatFormat) -> tuple[str, ...]:
    """Signs that end a section which was not closed."""
    if form.style is None or not form.style.marks_calls or form.has_grammar:
        return ()
    return (form.style.begin,)


class ChatParser:
    """Of one sample. What it gives does not depend on how the text was cut."""

    def __init__(self, form: ChatFormat) -> None:
        self._format = form
        self._think: ThinkParser | None = None
        if (reasoning := form.reasoning) is not None:
            self._think = ThinkParser(
                form.is_thinking,
                reasoning.starts,
                reasoning.ends,
                reasoning.answer,
                _calls_in_thought(form),
            )
        self._tools: ToolParser | None = None
        if form.style is not None:
            # A call of a tool that is not there is the client's to refuse; only where any object
            # may be a call are the names needed to tell.
            names = form.tool_names if form.style.is_bare else None
            self._tools = tool_parser(form.style, names, form.schemas)
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
        found.reasoning = pieces.reasoning + found.reasoning
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
