"""Structural tags in both of their forms, asked of llguidance byte by byte."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest
from llmserve import InvalidArgument, LLMServeError, NotSupported, StructuredOutputsParams

BYTES = llguidance.LLTokenizer("byte")
DAYS = {
    "type": "object",
    "properties": {"days": {"type": "integer"}},
    "required": ["days"],
    "additionalProperties": False,
}
TRIGGERED = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<call=w>", "schema": DAYS, "end": "</call>"},
        {"begin": "<call=z>", "schema": {"type": "boolean"}, "end": "</call>"},
        {"begin": "[t/", "schema": {"type": "boolean"}, "end": "]"},
    ],
    "triggers": ["<call=", "[t/"],
}


def tag(content: Any, begin: str = "<a>", end: str = "</a>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def of_format(format: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": format}


ANY, TRUE = {"type": "any_text"}, {"type": "json_schema", "json_schema": {"const": True}}
ONE = {"type": "triggered_tags", "triggers": ["<a"], "tags": [tag(TRUE)]}
SEPARATED = {"type": "tags_with_separator", "separator": ", ", "tags": [tag(TRUE), tag(ANY, "<b>")]}
EITHER = {
    "type": "or",
    "elements": [
        {"type": "regex", "pattern": r"a/b\/+"},
        {"type": "const_string", "value": 'say "no"\n'},
    ],
}
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        TRIGGERED,
        ["hi", 'hi <call=w>{"days": 1}</call> and <call=z>true</call>', "[t/true] b", "a <cal"],
        ["<call=q>", '<call=w>{"day": 1}</call>', "[t/1]", "<call=z>true</cal"],
    ),
    (of_format(tag(ANY)), ["<a>x</b></a>", "<a></a>"], ["x<a></a>", "<a>x", "<a></a>x"]),
    (of_format(ONE), ["", "x", "x<a>true</a>y<a>true</a>"], ["<a>false</a>", "x<a"]),
    (
        of_format({**ONE, "stop_after_first": True}),
        ["x", "x<a>true</a>"],
        ["<a>true</a>y", "<a>true</a><a>true</a>"],
    ),
    (of_format({**ONE, "at_least_one": True}), ["x<a>true</a>y"], ["x", ""]),
    (
        of_format(SEPARATED),
        ["", "<a>true</a>", "<b>x</a>, <a>true</a>"],
        ["<a>true</a>,", "<a>true</a><a>true</a>"],
    ),
    (of_format({**SEPARATED, "at_least_one": True, "stop_after_first": True}), ["<b></a>"], [""]),
    (
        of_format({"type": "sequence", "elements": [tag(ANY), EITHER]}),
        ["<a>thinks</a>a/b//", '<a></a>say "no"\n'],
        ["a/b/", "<a></a>"],
    ),
]


@pytest.mark.parametrize(("structural_tag", "yes", "no"), CASES)
def test_a_structural_tag_matches_what_it_says(
    structural_tag: dict[str, Any], yes: list[str], no: list[str]
) -> None:
    for form in (structural_tag, json.dumps(structural_tag)):
        lark = StructuredOutputsParams(structural_tag=form).source().text
        for text in (*yes, *no):
            matcher = llguidance.LLMatcher(BYTES, llguidance.LLMatcher.grammar_from_lark(lark))
            assert not matcher.is_error(), f"{matcher.get_error()}\n{lark}"
            token_ids = BYTES.tokenize_str(text)
            is_matched = matcher.try_consume_tokens(token_ids) == len(token_ids)
            assert (is_matched and matcher.is_accepting()) == (text in yes), (text, lark)


REFUSED: list[tuple[Any, type[LLMServeError], str]] = [
    ("{", InvalidArgument, "structural_tag is not JSON"),
    ({"structures": []}, InvalidArgument, "structures must be a list of objects"),
    (
        of_format({"type": "xml"}),
        NotSupported,
        "format: type='xml' is not supported; ",
    ),
    (
        {"structures": TRIGGERED["structures"], "triggers": ["<call=", "[t/", "?"]},
        InvalidArgument,
        r"triggers\[2\] '\?' begins no tag",
    ),
    (
        {"structures": TRIGGERED["structures"], "triggers": ["<call="]},
        InvalidArgument,
        r"no trigger begins the tag '\[t/'",
    ),
    (of_format(tag({"type": "json_schema"})), InvalidArgument, "json_schema must be a schema"),
    (of_format({"type": "tag", "begin": 3}), InvalidArgument, "format.begin must be a string"),
]


@pytest.mark.parametrize(("structural_tag", "error", "message"), REFUSED)
def test_one_that_is_wrong_is_refused_with_the_place(
    structural_tag: Any, error: type[LLMServeError], message: str
) -> None:
    with pytest.raises(error, match=f"^structured_outputs: structural_tag: .*{message}"):
        StructuredOutputsParams(structural_tag=structural_tag)
