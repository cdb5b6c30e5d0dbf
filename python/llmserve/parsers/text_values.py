"""Values of arguments that a model writes as texts, by the types of a tool's schema."""

import json
from collections.abc import Mapping

TEXT = frozenset(("string",))  # the types of what is a text, whatever it looks like
_MAX_DEPTH = 8
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


def value_types(parameters: Mapping[str, object], key: str) -> frozenset[str]:
    """JSON's names of the types that the argument may have; none: nothing is known.

    >>> sorted(value_types({"properties": {"n": {"type": ["integer", "null"]}}}, "n"))
    ['integer', 'null']
    """
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    return frozenset(_types(parameters, schema, 0))


def _types(root: Mapping[str, object], schema: object, depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return set()
    kind = schema.get("type")
    if kind is not None:
        kinds = kind if isinstance(kind, list) else [kind]
        found = {item for item in kinds if isinstance(item, str)}
        return found | {"null"} if schema.get("nullable") is True else found
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: object = root
        for name in reference[2:].split("/"):
            target = target.get(name) if isinstance(target, Mapping) else None
        return _types(root, target, depth + 1)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return {_type_of(value) for value in values}
    found = set()
    for name in ("anyOf", "oneOf", "allOf"):
        members = schema.get(name)
        for member in members if isinstance(members, list) else ():
            found |= _types(root, member, depth + 1)
    return found


def _type_of(value: object) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return "null" if value is None else names.get(type(value), "object")


def json_value(text: str, types: frozenset[str]) -> str:
    """The value as JSON: what the text says if that is of one of the types, or else the text.

    >>> json_value("3", frozenset({"integer"})), json_value("3", frozenset({"string", "null"}))
    ('3', '"3"')
    >>> json_value("5.0", frozenset({"integer"}))
    '5'
    """
    stripped = text.strip()
    known = set(types) | ({"integer"} if "number" in types else set())
    try:
        value = _WORDS[stripped] if stripped in _WORDS else json.loads(stripped, parse_constant=_no)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    is_integer = "integer" in types and "number" not in types
    if is_integer and type(value) is float and value.is_integer():  # 5.0
        return str(int(value))
    if not types or _type_of(value) in known or "string" not in types:
        return json.dumps(value) if stripped in _WORDS else stripped
    return json.dumps(text, ensure_ascii=False)


def _no(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
