"""Grammars of arguments that are not one object of JSON: as keywords, or as texts between signs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmserve.parsers.lark import Lark, joined
from llmserve.parsers.text_values import TEXT, value_types

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
# What a schema of an object may say if its arguments are to be written one by one.
_ONE_BY_ONE = {
    *("type", "properties", "required", "additionalProperties", "title", "description"),
    *("$defs", "definitions", "$schema", "strict"),
}
_NOTHING = '""'
_ROOT = ("$defs", "definitions")


@dataclass(frozen=True, slots=True)
class _Argument:
    name: str
    schema: Mapping[str, object]
    is_required: bool


def keyword_arguments(lark: Lark, parameters: Mapping[str, object]) -> str:
    """`a=1, b="x"`, in the schema's order; any where the schema is of another kind."""
    arguments = _arguments(parameters)
    if arguments is None or not all(_IDENTIFIER.fullmatch(item.name) for item in arguments):
        free = lark.rule(rf'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ "=" {lark.value({})}')
        return f'({free} (", " {free})*)?'
    return _separated(
        lark,
        arguments,
        '", "',
        [lark.literal(f"{item.name}=") + " " + lark.value(item.schema) for item in arguments],
    )


def escaped_arguments(lark: Lark, parameters: Mapping[str, object], quote: str) -> str:
    """`a:1,b:<escape>x<escape>`, in the schema's order; texts alone where it is of another kind.
    quote: stands on both sides of a text. Values within others are JSON."""
    arguments = _arguments(parameters)
    sign = lark.literal(quote)
    if arguments is None or not all(_IDENTIFIER.fullmatch(item.name) for item in arguments):
        free = lark.rule(rf'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ ":" {sign} {lark.text_until(quote)}')
        return f'({free} ("," {free})*)?'
    written = []
    for item in arguments:
        is_text, value = _value(lark, parameters, item, quote)
        if not is_text:
            value = lark.value(item.schema)
        head = lark.literal(f"{item.name}:") + (f" {sign}" if is_text else "")
        written.append(f"{head} {value}")
    return _separated(lark, arguments, '","', written)


def _separated(
    lark: Lark, arguments: Sequence[_Argument], separator: str, written: Sequence[str]
) -> str:
    """Those that are required, and any of the others, in their order."""
    # From the last one on: what may follow where nothing has been written, and where something has.
    first = rest = ""
    for item, text in zip(reversed(arguments), reversed(written), strict=True):
        argument = lark.rule(text)
        here, behind = joined(argument, rest), joined(separator, argument, rest)
        if not item.is_required:
            here, behind = f"({here} | {first or _NOTHING})", f"({behind} | {rest or _NOTHING})"
        first, rest = lark.rule(here), lark.rule(behind)
    return first


def keyed_arguments(
    lark: Lark,
    parameters: Mapping[str, object],
    *,
    before_key: str,
    before_value: tuple[str, str],
    after_value: str,
) -> str:
    """Each key and value between signs, in the schema's order; any where the schema is of another
    kind. before_value: of a text, and of another value. A text stands as it is: of its schema, an
    enumeration and the lengths are kept to."""
    arguments = _arguments(parameters)
    if arguments is None or any(">" in item.name or "<" in item.name for item in arguments):
        key = lark.literal(before_key) + r' /[^<>"\s]{1,64}/ ' + lark.literal(before_value[0])
        return f"({lark.rule(f'{key} {lark.text_until(after_value)}')})*"
    parts = []
    for item in arguments:
        is_text, value = _value(lark, parameters, item, after_value)
        head = lark.literal(before_key + item.name + before_value[not is_text])
        rule = lark.rule(f"{head} {value}")
        parts.append(rule if item.is_required else f"({rule})?")
    return joined(*parts)


def _value(lark: Lark, root: Mapping[str, object], item: _Argument, after: str) -> tuple[bool, str]:
    """Whether it is a text, and its expression with what stands behind it."""
    choices = item.schema.get("enum", [item.schema["const"]] if "const" in item.schema else None)
    if isinstance(choices, list) and choices and all(isinstance(text, str) for text in choices):
        literals = " | ".join(lark.literal(text) for text in choices)
        return True, f"({literals}) {lark.literal(after)}"
    types = value_types(root, item.name)
    if not types or "string" in types:
        return True, lark.text_until(after, _lengths(item.schema) if types == TEXT else "*")
    return False, f"{lark.value(item.schema)} {lark.literal(after)}"


def _lengths(schema: Mapping[str, object]) -> str:
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if not all(bound == "" or type(bound) is int for bound in (least, most)):
        return "*"
    return "*" if (least, most) == (0, "") else f"{{{least},{most}}}"


def _arguments(parameters: Mapping[str, object]) -> Sequence[_Argument] | None:
    """None where they cannot be listed."""
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not set(parameters) <= _ONE_BY_ONE or not isinstance(properties, Mapping):
        return None
    if not isinstance(required, list) or not set(required) <= set(properties):
        return None
    if "properties" not in parameters and parameters.get("additionalProperties") is not False:
        return None
    root = {name: parameters[name] for name in _ROOT if name in parameters}
    return [
        _Argument(name, {**root, **schema} if isinstance(schema, Mapping) else {}, name in required)
        for name, schema in properties.items()
    ]
