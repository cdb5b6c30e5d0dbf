"""Structural tags, vLLM's way to say where in a text a schema holds, as llguidance's Lark.

Both forms are read: `structures` and `triggers`, and the nested `format` of XGrammar's later
versions. In a text with triggers, what begins a trigger begins nothing else.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmserve.common.arguments import describe
from llmserve.errors import InvalidArgument, NotSupported

_TYPES = (
    *("const_string", "json_schema", "regex", "any_text", "tag", "sequence", "or"),
    *("triggered_tags", "tags_with_separator"),
)
_ANY = r"/(?s:.)*/"


def structural_tag_to_lark(
    tag: object, schema_text: Callable[[object], str], special_token_ids: Mapping[str, int]
) -> str:
    """The Lark of a structural tag, a dict or its JSON. schema_text: a JSON schema as llguidance
    takes it. special_token_ids: of tokens that are no text, which a begin or end is often one of,
    by how they are written. Raises InvalidArgument that says where it is wrong, NotSupported for a
    type of format that is not here.

    >>> tag = {"format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"},
    ...                   "end": "</a>"}}
    >>> print(structural_tag_to_lark(tag, str, {}))
    start: "<a>" p0
    p0[suffix="</a>"]: /(?s:.)*/
    >>> print(structural_tag_to_lark(tag, str, {"<a>": 7}).splitlines()[0])
    start: <[7]> p0
    """
    document = _object("structural_tag", _parsed(tag))
    writer = _Writer(schema_text, special_token_ids)
    if "format" in document:
        start = writer.write("format", document["format"])
    else:
        start = writer.triggered(
            "structural_tag",
            {
                "triggers": document.get("triggers"),
                "tags": [
                    {
                        "begin": structure.get("begin"),
                        "content": {"type": "json_schema", "json_schema": structure.get("schema")},
                        "end": structure.get("end"),
                    }
                    for structure in _objects("structures", document.get("structures"))
                ],
            },
        )
    return "\n".join([f"start: {start}", *writer.lines])


class _Writer:
    def __init__(
        self, schema_text: Callable[[object], str], special_token_ids: Mapping[str, int]
    ) -> None:
        self._schema_text = schema_text
        self._special = special_token_ids
        signs = sorted(filter(None, special_token_ids), key=len, reverse=True)
        # What never matches, where there are none.
        self._special_token = re.compile("|".join(map(re.escape, signs)) or r"(?!)")
        self.lines: list[str] = []

    def write(self, where: str, value: object) -> str:
        """What stands for a format in a rule."""
        item = _object(where, value)
        kind = item.get("type")
        if kind not in _TYPES:
            raise NotSupported(
                f"{where}: type={describe(kind)} is not supported; the types are "
                f"{', '.join(_TYPES)}"
            )
        if kind == "const_string":
            return self._literal(_text(f"{where}.value", item.get("value")))
        if kind == "json_schema":
            schema = item.get("json_schema")
            if not isinstance(schema, Mapping | bool):
                raise InvalidArgument(
                    f"{where}.json_schema must be a schema, got {describe(schema)}"
                )
            return f"%json {self._schema_text(schema)}"
        if kind == "regex":
            pattern = _text(f"{where}.pattern", item.get("pattern"))
            return self._terminal("/" + _escaped_slashes(pattern) + "/")
        if kind == "any_text":
            return self._terminal(_ANY)
        if kind == "tag":
            return self._tag(where, item)
        if kind == "triggered_tags":
            return self.triggered(where, item)
        if kind == "tags_with_separator":
            return self._separated(where, item)
        parts = [
            self.write(f"{where}.elements[{idx}]", part)
            for idx, part in enumerate(_objects(f"{where}.elements", item.get("elements")))
        ]
        return " ".join(parts) if kind == "sequence" else "(" + " | ".join(parts) + ")"

    def triggered(self, where: str, item: Mapping[str, Any]) -> str:
        """A text in which tags stand, each of which begins with a trigger."""
        triggers = _texts(f"{where}.triggers", item.get("triggers"))
        tags = _objects(f"{where}.tags", item.get("tags"))
        ways = []
        for idx, trigger in enumerate(triggers):
            begun = [tag for tag in tags if str(tag.get("begin", "")).startswith(trigger)]
            if not begun:
                raise InvalidArgument(
                    f"{where}.triggers[{idx}] {trigger!r} begins no tag; a tag's begin starts with "
                    f"a trigger"
                )
            rests = [self._tag(f"{where}.tags", tag, trigger) for tag in begun]
            ways.append(f"{self._until(trigger)} ({' | '.join(rests)})")
        for tag in tags:
            begin = _text(f"{where}.tags.begin", tag.get("begin"))
            if not any(begin.startswith(trigger) for trigger in triggers):
                raise InvalidArgument(f"{where}: no trigger begins the tag {begin!r}")
        signs = [
            _escaped(trigger) for trigger in triggers if not self._special_token.search(trigger)
        ]
        other = rf" & ~/(?s:.)*({'|'.join(signs)})(?s:.)*/" if signs else ""
        text = self._terminal(_ANY + other)
        one = "(" + " | ".join(ways) + ")"
        if item.get("stop_after_first"):
            return one if item.get("at_least_one") else f"({one} | {text})"
        return f"{one}{'+' if item.get('at_least_one') else '*'} {text}"

    def _separated(self, where: str, item: Mapping[str, Any]) -> str:
        tags = _objects(f"{where}.tags", item.get("tags"))
        separator = self._literal(_text(f"{where}.separator", item.get("separator")))
        one = "(" + " | ".join(self._tag(f"{where}.tags", tag) for tag in tags) + ")"
        written = one if item.get("stop_after_first") else f"{one} ({separator} {one})*"
        return written if item.get("at_least_one") else f"({written})?"

    def _tag(self, where: str, item: Mapping[str, Any], begun: str = "") -> str:
        """A tag, of whose begin so much has been written."""
        begin = _text(f"{where}.begin", item.get("begin"))[len(begun) :]
        ends = item.get("end")
        end = ends[0] if isinstance(ends, list) and len(ends) == 1 else ends
        end = _text(f"{where}.end", end)
        content = item.get("content")
        parts = [self._literal(begin)] if begin else []
        if isinstance(content, Mapping) and content.get("type") == "any_text" and end:
            parts.append(self._until(end))
        else:
            parts.append(self.write(f"{where}.content", content))
            parts += [self._literal(end)] if end else []
        return " ".join(parts)

    def _until(self, end: str) -> str:
        """Any text up to the first of these, and these."""
        special = self._special_token.search(end)
        if special is None:
            name = f"p{len(self.lines)}"
            self.lines.append(f"{name}[suffix={json.dumps(end, ensure_ascii=False)}]: {_ANY}")
            return name
        before = self._terminal(f"/(?s:.)*{_escaped(end[: special.start()])}/")
        return f"{before} {self._literal(end[special.start() :])}"

    def _literal(self, text: str) -> str:
        """A text, with the special tokens in it."""
        parts, at = [], 0
        for special in self._special_token.finditer(text):
            if special.start() > at:
                parts.append(json.dumps(text[at : special.start()], ensure_ascii=False))
            parts.append(f"<[{self._special[special[0]]}]>")
            at = special.end()
        if at < len(text) or not parts:
            parts.append(json.dumps(text[at:], ensure_ascii=False))
        return " ".join(parts)

    def _terminal(self, regex: str) -> str:
        name = f"P{len(self.lines)}"
        self.lines.append(f"{name}: {regex}")
        return name


def _parsed(tag: object) -> object:
    if not isinstance(tag, str):
        return tag
    try:
        return json.loads(tag)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"structural_tag is not JSON: {error}") from None


def _object(where: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{where} must be an object, got {describe(value)}")
    return value


def _objects(where: str, value: object) -> list[Mapping[str, Any]]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise InvalidArgument(f"{where} must be a list of objects, got {describe(value)}")
    return [_object(f"{where}[{idx}]", item) for idx, item in enumerate(value)]


def _text(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"{where} must be a string, got {describe(value)}")
    return value


def _texts(where: str, value: object) -> list[str]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise InvalidArgument(f"{where} must be a list of strings, got {describe(value)}")
    texts = [_text(f"{where}[{idx}]", item) for idx, item in enumerate(value)]
    if "" in texts:
        raise InvalidArgument(f"{where} must not contain an empty string")
    return texts


def _escaped(text: str) -> str:
    """A regular expression of this text alone."""
    return re.escape(text).replace("/", r"\/")


def _escaped_slashes(pattern: str) -> str:
    return re.sub(r"\\.|/", lambda match: r"\/" if match[0] == "/" else match[0], pattern)
