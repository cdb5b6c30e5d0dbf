"""The styles of calls and of reasoning that there are, and which one a chat template uses."""

from collections.abc import Collection, Iterable

from llmserve.common.arguments import describe
from llmserve.errors import InvalidArgument
from llmserve.parsers import (
    deepseek_v3,
    deepseek_v31,
    deepseek_v32,
    functiongemma,
    generic_json,
    gigachat3,
    glm45,
    granite,
    harmony,
    hermes,
    internlm,
    jamba,
    kimi_k2,
    lfm2,
    llama3,
    llama4,
    longcat,
    minimax_m2,
    mistral,
    olmo3,
    phi4,
    pythonic,
    qwen3_coder,
    seed_oss,
    step3,
    xlam,
)
from llmserve.parsers.deltas import ToolParser
from llmserve.parsers.reasoning import REASONING_STYLES, ReasoningStyle
from llmserve.parsers.tool_style import Schemas, ToolStyle

# In the order in which a template is looked at: the first whose hint is in it.
TOOL_STYLES: tuple[ToolStyle, ...] = (
    harmony.STYLE,
    qwen3_coder.STYLE,
    glm45.STYLE,
    seed_oss.STYLE,
    minimax_m2.STYLE,
    step3.STYLE,
    functiongemma.STYLE,
    gigachat3.STYLE,
    lfm2.STYLE,
    kimi_k2.STYLE,
    deepseek_v32.STYLE,
    deepseek_v3.STYLE,
    deepseek_v31.STYLE,
    phi4.STYLE,
    granite.STYLE,
    jamba.STYLE,
    internlm.STYLE,
    longcat.STYLE,
    hermes.STYLE,
    mistral.STYLE,
    llama4.STYLE,
    olmo3.STYLE,
    pythonic.STYLE,
    llama3.STYLE,
    xlam.STYLE,
    generic_json.STYLE,
)


def tool_style(name: str) -> ToolStyle:
    """The style of that name. Raises InvalidArgument that lists them."""
    for style in TOOL_STYLES:
        if name in (style.name, *style.aliases):
            return style
    raise _unknown("tool_call_parser", name, (style.name for style in TOOL_STYLES))


def reasoning_style(name: str) -> ReasoningStyle:
    """The style of that name. Raises InvalidArgument that lists them."""
    for style in REASONING_STYLES:
        if name in (style.name, *style.aliases):
            return style
    names = [name for style in REASONING_STYLES for name in (style.name, *style.aliases)]
    raise _unknown("reasoning_parser", name, names)


def _unknown(setting: str, name: str, known: Iterable[str]) -> InvalidArgument:
    return InvalidArgument(f"{setting} must be one of {', '.join(known)}, got {describe(name)}")


def detect_tool_style(chat_template: str) -> ToolStyle:
    """The style that a chat template teaches; JSON where it shows none.

    >>> detect_tool_style("... <tool_call>{{ call }}</tool_call>").name
    'hermes'
    """
    taught = (style for style in TOOL_STYLES if style.is_taught_by(chat_template))
    return next(taught, generic_json.STYLE)


def detect_reasoning_style(chat_template: str) -> ReasoningStyle | None:
    """The style that a chat template teaches, if there is one.

    >>> detect_reasoning_style("... <think>{{ thought }}</think>").name
    'think'
    """
    taught = (style for style in REASONING_STYLES if style.is_taught_by(chat_template))
    return next(taught, None)


def tool_parser(
    style: ToolStyle, names: Collection[str] | None = None, schemas: Schemas | None = None
) -> ToolParser:
    """For one sample. `names`: of the tools that there are. schemas: of their arguments."""
    return style.parser(names, schemas or {})
