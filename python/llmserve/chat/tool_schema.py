"""Tools of a chat: JSON schemas as they are, Python functions by their signature and docstring.

The schema of a function is the one that transformers' get_json_schema gives (5.20 to 5.23), so that
a model sees what it was trained on; an enumeration is its values, as in 5.23.
"""

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping

from llmserve.common.arguments import describe
from llmserve.errors import InvalidArgument

Schema = dict[str, object]
Tool = Mapping[str, object] | Callable[..., object]

_SCALARS: dict[object, str] = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    type(None): "null",
}
_TYPES: dict[object, Schema] = {
    **{kind: {"type": name} for kind, name in _SCALARS.items()},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    typing.Any: {},
}


def tool_schema(label: str, tool: object) -> Mapping[str, object]:
    """A tool as a JSON schema; a function needs type hints and a docstring in Google's style with a
    line for every argument. Raises InvalidArgument that names what is missing.

    >>> def add(x: int, y: int = 0):
    ...     '''Adds two numbers.
    ...
    ...     Args:
    ...         x: The first.
    ...         y: The second.
    ...     '''
    >>> schema = tool_schema("tools[0]", add)
    >>> schema["function"]["parameters"]["properties"]["x"]
    {'type': 'integer', 'description': 'The first.'}
    """
    if isinstance(tool, Mapping):
        return tool
    if not inspect.isfunction(tool) and not inspect.ismethod(tool):
        raise InvalidArgument(
            f"{label} must be a JSON schema (a dict) or a function with type hints and a "
            f"docstring, got {describe(tool)}"
        )
    return _function_schema(f"{label} ({tool.__name__})", tool)


def _function_schema(label: str, function: Callable[..., object]) -> Schema:
    text = inspect.getdoc(function)
    if not text:
        raise InvalidArgument(f"{label} has no docstring; it is what the model reads")
    description, arguments, returns = _parse_docstring(text.strip())
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:  # a hint may be any expression
        raise InvalidArgument(f"{label}: its type hints cannot be read: {error}") from error
    properties: Schema = {}
    required = []
    for idx, (name, parameter) in enumerate(inspect.signature(function).parameters.items()):
        if name not in hints:
            if idx == 0 and name in ("self", "cls"):
                continue
            raise InvalidArgument(f"{label}: argument {name} has no type hint")
        if name not in arguments:
            raise InvalidArgument(
                f"{label}: its docstring has no line for argument {name} under 'Args:'"
            )
        schema = _type_schema(f"{label}: argument {name}", hints[name])
        properties[name] = _described(f"{label}: argument {name}", schema, arguments[name])
        if parameter.default is inspect.Parameter.empty:
            required.append(name)
    parameters: Schema = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    schema = {
        "name": getattr(function, "__name__", "operation"),
        "description": description,
        "parameters": parameters,
    }
    if "return" in hints and (result := _return_schema(hints["return"])) is not None:
        schema["return"] = result if returns is None else {**result, "description": returns}
    return {"type": "function", "function": schema}


def _return_schema(hint: object) -> Schema | None:
    """Models do not write results: what cannot be said is left out."""
    try:
        return _type_schema("", hint)
    except InvalidArgument:
        return None


_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def _described(label: str, schema: Schema, text: str) -> Schema:
    """With the description, whose `(choices: [...])` at the end become an enum."""
    if match := _CHOICES.search(text):
        try:
            choices = json.loads(match.group(1))
        except ValueError as error:
            raise InvalidArgument(f"{label}: its choices are not a JSON list: {error}") from error
        schema = {**schema, "enum": [c.strip() if isinstance(c, str) else c for c in choices]}
        text = text[: match.start()].strip()
    return {**schema, "description": text}


def _type_schema(label: str, hint: object) -> Schema:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return _enum_schema(label, hint, [member.value for member in hint])
        if isinstance(hint, typing.Hashable) and hint in _TYPES:
            return dict(_TYPES[hint])
    elif origin in (typing.Union, types.UnionType):
        return _union_schema(label, arguments)
    elif origin is typing.Literal:
        return _enum_schema(label, hint, list(arguments))
    elif origin is list:
        return {"type": "array", "items": _type_schema(label, arguments[0])}
    elif origin is dict:
        return {"type": "object", "additionalProperties": _type_schema(label, arguments[1])}
    elif origin is tuple and len(arguments) > 1 and ... not in arguments:
        return {"type": "array", "prefixItems": [_type_schema(label, a) for a in arguments]}
    raise InvalidArgument(
        f"{label}: type hint {describe(hint)} has no JSON schema (int, float, str, bool, Enum, "
        f"Literal, and list, tuple, dict and unions of those have one); pass the schema as a dict"
    )


def _union_schema(label: str, arguments: tuple[object, ...]) -> Schema:
    schemas = [_type_schema(label, a) for a in arguments if a is not type(None)]
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(s.keys() == {"type"} and isinstance(s["type"], str) for s in schemas):
        names = sorted({str(s["type"]) for s in schemas})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": schemas}
    return {**schema, "nullable": True} if type(None) in arguments else schema


def _enum_schema(label: str, hint: object, values: list[object]) -> Schema:
    if not values or any(type(value) not in _SCALARS for value in values):
        raise InvalidArgument(f"{label}: {describe(hint)} must list strings, numbers or booleans")
    names = list(dict.fromkeys(_SCALARS[type(value)] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": values}


_HEADING = re.compile(r"\s*(Args|Returns|Raises):\s*$")
_ARGUMENT = re.compile(r"(\s*)(\w+):\s*(.*)$")


def _parse_docstring(text: str) -> tuple[str, dict[str, str], str | None]:
    """Description, arguments and result of a docstring in Google's style."""
    sections: dict[str, list[str]] = {"": []}
    heading = ""
    for line in text.splitlines():
        if match := _HEADING.match(line):
            heading = match.group(1)
            sections.setdefault(heading, [])
        else:
            sections[heading].append(line)
    returns = " ".join(line.strip() for line in sections.get("Returns", [])).strip()
    return (
        "\n".join(sections[""]).strip(),
        _parse_arguments(sections.get("Args", [])),
        returns or None,
    )


def _parse_arguments(lines: list[str]) -> dict[str, str]:
    """`name: text`, where deeper lines go on with the text."""
    arguments: dict[str, list[str]] = {}
    indent: int | None = None
    name = ""
    for line in filter(str.strip, lines):
        match = _ARGUMENT.match(line)
        if match and (indent is None or len(match.group(1)) <= indent):
            indent, name = len(match.group(1)), match.group(2)
            arguments[name] = [match.group(3).strip()]
        elif name:
            arguments[name].append(line.strip())
    return {name: " ".join(filter(None, parts)) for name, parts in arguments.items()}
