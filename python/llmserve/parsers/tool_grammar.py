"""The grammars of calls, for requests that have to call a tool and for text in which calls may
stand: the model writes them in its own style, with arguments that match the tool's schema."""

import json
import re
from collections.abc import Callable, Mapping, Sequence

from llmserve.common.arguments import describe
from llmserve.errors import InvalidArgument
from llmserve.parsers.call_parser import ToolStyle

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
    >>> lark.splitlines()[0]
    'start: call'
    """
    begin = "" if style.is_bare else _literal(style.begin, special_token_id) + " "
    if style.end:
        start = r'start: call ("\n" call)*' if is_parallel else "start: call"
        rules = [start, f"call: {begin}{_after_begin(style, is_parallel, special_token_id)}"]
    elif is_parallel or not style.is_bare:
        rules = [f"start: {begin}{_after_begin(style, is_parallel, special_token_id)}"]
    else:
        rules = ["start: object"]
    return "\n".join([*rules, *_objects(style, tools)]) + "\n"


def text_with_calls(
    style: ToolStyle,
    tools: Sequence[tuple[str, Mapping[str, object]]],
    is_parallel: bool,
    special_token_id: Callable[[str], int | None],
) -> str:
    """Lark for a text in which any number of calls may stand or, unless is_parallel, that may end
    in one. What begins a call begins nothing else: not for styles that are bare.

    >>> from llmserve.parsers.hermes import STYLE
    >>> lark = text_with_calls(STYLE, [("now", {"type": "object"})], True, lambda token: None)
    >>> print("\\n".join(lark.splitlines()[:4]))
    start: (before call)* TEXT
    before[suffix="<tool_call>"]: /(.|\\n)*/
    TEXT: /(.|\\n)*/ & ~/(.|\\n)*<tool_call>(.|\\n)*/
    call: "\\n" object "\\n" "</tool_call>"
    """
    begin_id = special_token_id(style.begin)
    if begin_id is None:
        sign = re.escape(style.begin)
        before = rf"before[suffix={json.dumps(style.begin)}]: /(.|\n)*/"
        text = rf"TEXT: /(.|\n)*/ & ~/(.|\n)*{sign}(.|\n)*/"
    else:
        before, text = f"before: TEXT <[{begin_id}]>", r"TEXT: /(.|\n)*/"
    start = "start: (before call)* TEXT" if is_parallel else "start: before call | TEXT"
    call = f"call: {_after_begin(style, is_parallel, special_token_id)}"
    return "\n".join([start, before, text, call, *_objects(style, tools)]) + "\n"


def _literal(text: str, special_token_id: Callable[[str], int | None]) -> str:
    token_id = special_token_id(text)
    return json.dumps(text, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"


def _after_begin(
    style: ToolStyle, is_parallel: bool, special_token_id: Callable[[str], int | None]
) -> str:
    if style.end:
        return rf'"\n" object "\n" {_literal(style.end, special_token_id)}'
    more = ' (", " object)*' if is_parallel else ""
    return f'"[" object{more} "]"'


def _objects(style: ToolStyle, tools: Sequence[tuple[str, Mapping[str, object]]]) -> list[str]:
    """The rule `object`, a call of one of the tools, and what it is made of."""
    rules = ["object: " + " | ".join(f"tool_{idx}" for idx in range(len(tools)))]
    for idx, (name, parameters) in enumerate(tools):
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{style.argument_key}": '
        options = {"x-guidance": {"whitespace_flexible": False}}
        schema = json.dumps({**_of_object(name, parameters), **options})
        rules.append(f'tool_{idx}: {json.dumps(head, ensure_ascii=False)} %json {schema} "}}"')
    return rules


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
