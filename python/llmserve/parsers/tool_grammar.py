"""The grammars of calls, for requests that have to call a tool and for text in which calls may
stand: the model writes them in its own style, with arguments that match the tool's schema."""

import json
import re
from collections.abc import Callable, Mapping, Sequence

from llmserve.common.arguments import describe
from llmserve.errors import InvalidArgument
from llmserve.parsers.lark import Lark, joined, special_token_texts
from llmserve.parsers.tool_style import ToolStyle

ANY_ARGUMENTS: Mapping[str, object] = {"type": "object"}


def tool_function(label: str, tool: object) -> tuple[str, Mapping[str, object]]:
    """Name and schema of the arguments. Raises InvalidArgument that says what is missing."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise InvalidArgument(
            f"{label} must be a tool, {{'type': 'function', 'function': {{'name': ...}}}}, "
            f"got {describe(tool)}"
        )
    parameters = function.get("parameters")
    if parameters is None:
        parameters = ANY_ARGUMENTS
    if not isinstance(parameters, Mapping):
        raise InvalidArgument(
            f"{label}: parameters must be a JSON schema, got {describe(parameters)}"
        )
    return name, parameters


def is_strict(tool: Mapping[str, object]) -> bool:
    """Whether a tool asks that its arguments match its schema."""
    function = tool.get("function")
    return isinstance(function, Mapping) and function.get("strict") is True


def call_grammar(
    style: ToolStyle,
    tools: Sequence[tuple[str, Mapping[str, object]]],
    is_parallel: bool,
    special_token_id: Callable[[str], int | None],
) -> str:
    """Lark for one call of one of the tools; is_parallel: or of several. special_token_id: the id
    of a token that is no text, None for what is text.

    >>> from llmserve.parsers.hermes import STYLE
    >>> lark = call_grammar(STYLE, [("now", {"type": "object"})], False, lambda token: None)
    >>> print("\\n".join(lark.splitlines()[:2]))
    start: call
    call: "<tool_call>\\n" tool "\\n</tool_call>"
    """
    lark = Lark(special_token_id)
    begin, end = style.section if is_parallel or style.has_section_of_one else ("", "")
    start = f"start: {_section(style, lark, begin, end, is_parallel)}"
    return _grammar(style, tools, lark, [start], style.call[0])


def text_with_calls(
    style: ToolStyle,
    tools: Sequence[tuple[str, Mapping[str, object]]],
    is_parallel: bool,
    special_token_id: Callable[[str], int | None],
) -> str:
    """Lark for a text in which any number of calls may stand or, unless is_parallel, that may end
    in one. What begins a call begins nothing else: for styles that mark their calls.

    >>> from llmserve.parsers.hermes import STYLE
    >>> lark = text_with_calls(STYLE, [("now", {"type": "object"})], True, lambda token: None)
    >>> print("\\n".join(lark.splitlines()[:4]))
    start: (before call)* TEXT
    before[suffix="<tool_call>"]: /(.|\\n)*/
    TEXT: /(.|\\n)*/ & ~/(.|\\n)*<tool_call>(.|\\n)*/
    call: "\\n" tool "\\n</tool_call>"
    """
    lark = Lark(special_token_id)
    if all(special_token_id(sign) is None for sign in special_token_texts(style.begin)):
        sign = re.escape(style.begin)
        before = rf"before[suffix={json.dumps(style.begin, ensure_ascii=False)}]: /(.|\n)*/"
        text = rf"TEXT: /(.|\n)*/ & ~/(.|\n)*{sign}(.|\n)*/"
    else:
        before, text = f"before: TEXT {lark.literal(style.begin)}", r"TEXT: /(.|\n)*/"
    begin, end = style.section
    calls, call_begin = "call", style.call[0]
    if begin:
        calls = "calls"
        section = _section(style, lark, begin.removeprefix(style.begin), end, is_parallel)
    else:
        call_begin = call_begin.removeprefix(style.begin)
    start = f"start: (before {calls})* TEXT" if is_parallel else f"start: before {calls} | TEXT"
    rules = [start, before, text, *([f"calls: {section}"] if begin else [])]
    return _grammar(style, tools, lark, rules, call_begin)


def _section(style: ToolStyle, lark: Lark, begin: str, end: str, is_parallel: bool) -> str:
    more = f"({joined(lark.literal(style.separator), 'call')})*" if is_parallel else ""
    return joined(lark.literal(begin), "call", more, lark.literal(end))


def _grammar(
    style: ToolStyle,
    tools: Sequence[tuple[str, Mapping[str, object]]],
    lark: Lark,
    rules: list[str],
    call_begin: str,
) -> str:
    """With the rules of a call of one of the tools."""
    call = joined(lark.literal(call_begin), "tool", lark.literal(style.call[1]))
    bodies = [
        f"tool_{idx}: {style.body(lark, name, _of_object(name, parameters))}"
        for idx, (name, parameters) in enumerate(tools)
    ]
    tool = "tool: " + " | ".join(f"tool_{idx}" for idx in range(len(tools)))
    return "\n".join([*rules, f"call: {call}", tool, *bodies, *lark.rules]) + "\n"


def _of_object(name: str, parameters: Mapping[str, object]) -> Mapping[str, object]:
    """The schema of what of it is an object: arguments are one, also where a schema has no type or
    takes other values as well. Raises InvalidArgument where it takes none."""
    types = parameters.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        raise InvalidArgument(
            f"tools: the parameters of {describe(name)} must be the schema of an object, got type "
            f"{describe(types)}"
        )
    return {**parameters, "type": "object"}
