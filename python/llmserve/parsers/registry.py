"""The styles of calls and of reasoning that there are, and which one a chat template uses."""

from collections.abc import Collection

from llmserve.common.arguments import describe
from llmserve.errors import InvalidArgument
from llmserve.parsers import generic_json, hermes, llama3, mistral
from llmserve.parsers.call_parser import CallParser, ToolStyle

# In the order in which a template is looked at: the first whose hint is in it.
TOOL_STYLES: tuple[ToolStyle, ...] = (
    hermes.STYLE,
    mistral.STYLE,
    llama3.STYLE,
    generic_json.STYLE,
)
# What opens and ends a section, by name.
REASONING_STYLES = {"think": ("<think>", "</think>")}


def tool_style(name: str) -> ToolStyle:
    """The style of that name. Raises InvalidArgument that lists them."""
    for style in TOOL_STYLES:
        if style.name == name:
            return style
    names = ", ".join(style.name for style in TOOL_STYLES)
    raise InvalidArgument(f"tool_call_parser must be one of {names}, got {describe(name)}")


def detect_tool_style(chat_template: str) -> ToolStyle:
    """The style that a chat template teaches; JSON where it shows none.

    >>> detect_tool_style("... <tool_call>{{ call }}</tool_call>").name
    'hermes'
    """
    for style in TOOL_STYLES:
        if any(hint in chat_template for hint in (*style.special_tokens, *style.hints)):
            return style
    return generic_json.STYLE


def tool_parser(style: ToolStyle, names: Collection[str] | None = None) -> CallParser:
    """For one sample. `names`: of the tools that there are."""
    return CallParser(style, names)
