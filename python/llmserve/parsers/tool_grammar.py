"""The grammar of calls, for requests that have to call a tool: the model writes them in its own
style, with arguments that match the tool's schema."""

import json
from collections.abc import Callable, Mapping, Sequence

from llmserve.arguments import describe
from llmserve.errors import InvalidArgument
from llmserve.parsers.call_parser import ToolStyle

_ANY_ARGUMENTS: Mapping[str, object] = {"type": "object"}


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
        parameters = _ANY_ARGUMENTS
    if not isinstance(parameters, Mapping):
        raise InvalidArgument(
            f"{label}: parameters must be a JSON schema, got {describe(parameters)}"
        )
    return name, parameters


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

    def literal(text: str) -> str:
        token_id = special_token_id(text)
        return json.dumps(text, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"

    begin = "" if style.is_bare else literal(style.begin) + " "
    if style.end:
        rules = [
            r'start: call ("\n" call)*' if is_parallel else "start: call",
            rf'call: {begin}"\n" object "\n" {literal(style.end)}',
        ]
    elif is_parallel or not style.is_bare:
        more = ' (", " object)*' if is_parallel else ""
        rules = [f'start: {begin}"[" object{more} "]"']
    else:
        rules = ["start: object"]
    rules.append("object: " + " | ".join(f"tool_{idx}" for idx in range(len(tools))))
    for idx, (name, parameters) in enumerate(tools):
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{style.argument_key}": '
        schema = json.dumps({**parameters, "x-guidance": {"whitespace_flexible": False}})
        rules.append(f'tool_{idx}: {json.dumps(head, ensure_ascii=False)} %json {schema} "}}"')
    return "\n".join(rules) + "\n"
