"""What the text of an output must match: a JSON schema, a regular expression, one of several
strings, or a grammar."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from llmserve.common.arguments import (
    boolean,
    describe,
    refuse_unknown,
    unicode_text,
)
from llmserve.common.init_signature import InitSignature
from llmserve.errors import InvalidArgument, LLMServeError

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_BOOLEANS = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")
# Between two tokens of JSON: what people and programs write. Whatever else there could be, a model
# that likes whitespace would go on with until its last token.
_WHITESPACE = r" |\n( {0,32}|\t{0,16})"
# Schemas under these keys are by name, under the others one or a list of them.
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as llguidance takes it."""

    field: str  # of StructuredOutputsParams
    kind: str  # "json_schema", "regex" or "lark"
    text: str


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """What the text of an output must match; exactly one of the first five and
    structural_tag.

    json: a JSON schema, as a dict or a string. regex: a regular expression for the whole text
    (Rust's syntax, without look-around and references). choice: strings, of which the text is one.
    grammar: a grammar in GBNF or the EBNF of XGrammar, whose first rule is `root ::=`, or in
    llguidance's variant of Lark, whose first rule is `start:`. json_object=True: any JSON object.
    structural_tag: a text in which a schema holds between a begin and an end, as a dict or JSON:
    {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, or {"format": {...}}.

    disable_any_whitespace leaves no whitespace between the tokens of JSON; by default there may be
    a space, a line break and its indent, or what whitespace_pattern matches.
    disable_additional_properties: objects of the schema have no properties but their own, where it
    does not say. disable_fallback changes nothing: there is one backend, llguidance.

    Raises InvalidArgument or NotSupported; what is no grammar is refused when the request comes in.

    >>> StructuredOutputsParams(choice=["yes", "no"]).source().kind
    'regex'
    """

    json: str | Mapping[str, object] | None = field(default=None, hash=False)
    regex: str | None = None
    choice: Iterable[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | Mapping[str, object] | None = field(default=None, hash=False)

    __signature__ = InitSignature()

    def __new__(cls, *args: object, **kwargs: object) -> "StructuredOutputsParams":
        """Refuses unknown names with a hint before the generated __init__ sees them."""
        refuse_unknown("StructuredOutputsParams", kwargs, cls.__slots__)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidArgument(
                f"structured_outputs needs exactly one of {', '.join(_KINDS)}, got "
                f"{' and '.join(given) or 'none'}"
            )
        for name in ("regex", "grammar", "whitespace_pattern"):
            if getattr(self, name) is not None:
                unicode_text(f"structured_outputs: {name}", getattr(self, name))
        for name in _BOOLEANS if self.json_object is None else (*_BOOLEANS, "json_object"):
            value = boolean(f"structured_outputs: {name}", getattr(self, name))
            object.__setattr__(self, name, value)
        if self.json is not None:
            _schema(self.json)
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.grammar is not None or self.structural_tag is not None:
            self.source()  # raises what is wrong with it

    def source(self, special_token_ids: Mapping[str, int] | None = None) -> GrammarSource:
        """The grammar that the engine's compiler takes. special_token_ids: of the tokenizer, by how
        they are written; structural_tag's begin or end may be one."""
        if self.json is not None:
            return GrammarSource("json", "json_schema", self._json_text(_schema(self.json)))
        if self.json_object:
            return GrammarSource("json_object", "json_schema", self._json_text({"type": "object"}))
        if self.regex is not None:
            return GrammarSource("regex", "regex", self.regex)
        if self.choice is not None:
            # One terminal: as alternatives of a rule, a few thousand are too many for its parser.
            return GrammarSource("choice", "regex", "|".join(map(_literal, self.choice)))
        if self.structural_tag is not None:
            from llmserve.common.structural_tag import structural_tag_to_lark  # seldom needed

            with _named("structural_tag"):
                lark = structural_tag_to_lark(
                    self.structural_tag, self._json_text, special_token_ids or {}
                )
            return GrammarSource("structural_tag", "lark", lark)
        from llmserve.common.gbnf import gbnf_to_lark, is_gbnf  # seldom needed

        grammar = self.grammar or ""
        if is_gbnf(grammar):
            with _named("grammar"):
                grammar = gbnf_to_lark(grammar, special_token_ids)
        return GrammarSource("grammar", "lark", grammar)

    def _json_text(self, schema: object) -> str:
        """The schema with the options that llguidance reads from it; its own go first."""
        if self.disable_additional_properties:
            try:
                schema = closed_schema(schema)
            except RecursionError:
                raise InvalidArgument("structured_outputs: json is nested too deeply") from None
        pattern = _WHITESPACE if self.whitespace_pattern is None else self.whitespace_pattern
        options: dict[str, object] = {"whitespace_pattern": pattern}
        if self.disable_any_whitespace:
            options = {"whitespace_flexible": False}
        if not isinstance(schema, Mapping):  # true, anything; false, nothing
            schema = {"allOf": [schema]}
        own = schema.get("x-guidance")
        if isinstance(own, Mapping):
            options.update(own)
        return json.dumps({**schema, "x-guidance": options}, separators=(",", ":"))


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Errors name the field."""
    try:
        yield
    except LLMServeError as error:
        raise type(error)(f"structured_outputs: {name}: {error}") from None


class GuidedDecodingParams(StructuredOutputsParams):
    """StructuredOutputsParams as older versions of vLLM call them; `backend` changes nothing: there
    is one.

    >>> GuidedDecodingParams(choice=["yes", "no"]).choice
    ('yes', 'no')
    """

    __slots__ = ()

    def __new__(cls, *args: object, **kwargs: object) -> "GuidedDecodingParams":
        kwargs.pop("backend", None)
        refuse_unknown("GuidedDecodingParams", kwargs, StructuredOutputsParams.__slots__)
        return object.__new__(cls)

    def __init__(self, *args: Any, backend: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


def _schema(value: object) -> object:
    """A schema as an object, whatever it came as."""
    name = "structured_outputs: json"
    if not isinstance(value, str | Mapping):
        raise InvalidArgument(
            f"{name} must be a JSON schema as a dict or a string, got {describe(value)}"
        )
    try:
        parsed = json.loads(value if isinstance(value, str) else json.dumps(value))
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidArgument(f"{name} is not JSON: {error}") from None
    if not isinstance(parsed, dict | bool):
        raise InvalidArgument(f"{name} must be a JSON schema, an object, got {describe(parsed)}")
    return parsed


def _choices(value: object) -> tuple[str, ...]:
    name = "structured_outputs: choice"
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidArgument(f"{name} must be a list of strings, got {describe(value)}")
    choices = tuple(unicode_text(f"{name}[{idx}]", item) for idx, item in enumerate(value))
    if not choices:
        raise InvalidArgument(f"{name} must name at least one string")
    return choices


def _literal(words: str) -> str:
    """A regular expression of Rust's that matches these words alone."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&\-~]", r"\\\g<0>", words)


def closed_schema(schema: object) -> object:
    """The schema with additionalProperties: false wherever it lists properties and does not say."""
    if isinstance(schema, list):
        return [closed_schema(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed: dict[object, object] = {}
    for key, value in schema.items():
        if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            closed[key] = {name: closed_schema(item) for name, item in value.items()}
        elif key in ("enum", "const", "default", "examples"):
            closed[key] = value  # values, not schemas
        else:
            closed[key] = closed_schema(value)
    if "properties" in closed or "patternProperties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed
