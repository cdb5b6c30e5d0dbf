"""What a text must match: every kind of grammar, beside every way a request can end, and what is
refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time
from collections.abc import Iterator

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llmserve import (
    LLM,
    AsyncLLM,
    CompletionOutput,
    InvalidArgument,
    NotSupported,
    SamplingParams,
    StructuredOutputsParams,
    demo_model_path,
)
from llmserve.requests import grammars
from offline import generate

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(demo_model_path(), num_threads=1, num_gpu_blocks_override=512) as llm:
        yield llm


def params(structured: dict[str, object], **fields: object) -> SamplingParams:
    common: dict[str, object] = {"max_tokens": 200, "temperature": 1.0, "seed": 0}
    outputs = StructuredOutputsParams(**structured)  # type: ignore[arg-type]
    return SamplingParams(structured_outputs=outputs, **{**common, **fields})  # type: ignore[arg-type]


def samples(llm: LLM, structured: dict[str, object], **fields: object) -> list[CompletionOutput]:
    (output,) = generate(llm, "Once upon a time", params(structured, **fields))
    return output.outputs


def test_a_schema_holds_for_every_sample(llm: LLM) -> None:
    for output in samples(llm, {"json": PERSON}, n=8):
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), PERSON)
    (same,) = samples(llm, {"json": json.dumps(PERSON)})
    jsonschema.validate(json.loads(same.text), PERSON)


def test_any_object_is_an_object(llm: LLM) -> None:
    for output in samples(llm, {"json_object": True}, n=4):
        assert output.finish_reason != "error"
        if output.finish_reason == "stop":
            assert isinstance(json.loads(output.text), dict)


def test_a_regular_expression_matches_the_whole_text(llm: LLM) -> None:
    pattern = r"(red|green) [a-z]{2,5}: \d+(\.\d\d)?;"
    for output in samples(llm, {"regex": pattern}, n=8, max_tokens=400):
        assert output.finish_reason == "length" or re.fullmatch(pattern, output.text)


META = "a.b*c+?(d)[e]{f}^$|#&-~ \\ \t"


@pytest.mark.parametrize(
    "choice",
    [
        ["yes"],
        ["yes", "yes, please", "no"],
        ['"/\n', "é😀", "\\d+", META],
        [META],
        [f"word {idx}" for idx in range(5000)],
    ],
)
def test_the_text_is_one_of_the_choices(llm: LLM, choice: list[str]) -> None:
    for output in samples(llm, {"choice": choice}, n=4):
        assert (output.finish_reason, output.text in choice) == ("stop", True)


def test_a_grammar_is_followed(llm: LLM) -> None:
    lark = 'start: "(" item ("," item)* ")"\nitem: /[a-c]{1,3}/ | start\n'
    for output in samples(llm, {"grammar": lark}, n=4, max_tokens=400):
        if output.finish_reason == "stop":
            assert re.fullmatch(r"[(),a-c]+", output.text)
            assert output.text.count("(") == output.text.count(")")


def test_whitespace_is_bounded_or_left_out(llm: LLM) -> None:
    spaces = {220: 100.0}  # the demo model's " "
    (output,) = samples(llm, {"json": PERSON}, logit_bias=spaces, max_tokens=500)
    assert output.finish_reason == "stop"
    between = re.findall(r"\s+", re.sub(r'"(\\.|[^"\\])*"', '""', output.text))
    assert between
    assert all(re.fullmatch(r" |\n( {0,32}|\t{0,16})", space) for space in between)
    (output,) = samples(llm, {"json": PERSON, "disable_any_whitespace": True}, logit_bias=spaces)
    assert output.text == json.dumps(json.loads(output.text), separators=(",", ":")) or (
        " " in json.loads(output.text)["name"]
    )
    (output,) = samples(llm, {"json": PERSON, "whitespace_pattern": ""})
    assert not re.search(r"\s", re.sub(r'"(\\.|[^"\\])*"', "", output.text))
    (output,) = samples(llm, {"json": PERSON, "whitespace_pattern": "~"})
    jsonschema.validate(json.loads(output.text.replace("~", "")), PERSON)


def test_additional_properties_can_be_ruled_out() -> None:
    schema = {
        "properties": {"properties": {"properties": {"a": {}}}, "b": {"enum": [{"properties": 1}]}},
        "$defs": {"c": {"additionalProperties": True, "properties": {}}},
    }
    source = StructuredOutputsParams(json=schema, disable_additional_properties=True).source()
    closed = json.loads(source.text)
    assert closed["additionalProperties"] is False
    assert closed["properties"]["properties"]["additionalProperties"] is False
    assert closed["properties"]["b"] == {"enum": [{"properties": 1}]}
    assert closed["$defs"]["c"]["additionalProperties"] is True


def test_a_grammar_in_gbnf_is_followed(llm: LLM) -> None:
    gbnf = 'root ::= pair ("," pair)*\npair ::= "(" root? ")" | [a-c]{2}'
    for output in samples(llm, {"grammar": gbnf}, n=4, max_tokens=400):
        text = output.text
        while "(" in text and output.finish_reason == "stop":
            text, num_pairs = re.subn(r"\(([a-c]{2}(,[a-c]{2})*)?\)", "aa", text)
            assert num_pairs > 0, output.text
        assert output.finish_reason == "length" or re.fullmatch(r"[a-c]{2}(,[a-c]{2})*", text)


def test_a_structural_tag_is_followed(llm: LLM) -> None:
    tag = {
        "type": "tag",
        "begin": "<n>",
        "content": {"type": "json_schema", "json_schema": {"enum": [1, 22]}},
        "end": "</n>",
    }
    many = {"type": "tags_with_separator", "tags": [tag], "separator": "+", "at_least_one": True}
    for output in samples(llm, {"structural_tag": {"format": many}}, n=4, max_tokens=400):
        assert re.fullmatch(r"<n>(1|22)</n>(\+<n>(1|22)</n>)*", output.text)


def test_the_begin_of_a_structural_tag_may_be_a_special_token(llm: LLM) -> None:
    begin = llm.get_tokenizer().encode("<|im_start|>")
    assert len(begin) == 1
    tag = {
        "type": "triggered_tags",
        "triggers": ["<|im_start|>"],
        "tags": [
            {
                "begin": "<|im_start|>[",
                "content": {"type": "const_string", "value": "x"},
                "end": "]",
            }
        ],
        "at_least_one": True,
        "stop_after_first": True,
    }
    fields = {"skip_special_tokens": False, "logit_bias": {begin[0]: 100.0}, "max_tokens": 20}
    for output in samples(llm, {"structural_tag": {"format": tag}}, n=3, **fields):
        assert begin[0] in output.token_ids
        assert output.text.endswith("<|im_start|>[x]")


def test_the_end_is_the_grammars_whatever_min_tokens_and_ignore_eos_say(llm: LLM) -> None:
    for fields in (
        {"min_tokens": 50},
        {"ignore_eos": True},
        {"min_tokens": 50, "ignore_eos": True},
    ):
        (output,) = samples(llm, {"choice": ["yes", "no"]}, **fields)
        assert (output.finish_reason, output.text in ("yes", "no")) == ("stop", True)


def test_min_tokens_and_ignore_eos_lengthen_a_text_that_can_go_on(llm: LLM) -> None:
    (output,) = samples(llm, {"regex": "[a-z]*"}, min_tokens=30, max_tokens=40)
    assert len(output.token_ids) >= 30
    (output,) = samples(llm, {"regex": "[a-z]*"}, ignore_eos=True, max_tokens=40)
    assert (output.finish_reason, len(output.token_ids)) == ("length", 40)


def test_stop_strings_and_lengths_cut_a_text_off(llm: LLM) -> None:
    (output,) = samples(llm, {"json": PERSON}, stop='"age"')
    assert (output.finish_reason, output.stop_reason) == ("stop", '"age"')
    assert '"name"' in output.text
    assert '"age"' not in output.text
    (output,) = samples(llm, {"json": PERSON}, max_tokens=3)
    assert (output.finish_reason, len(output.token_ids)) == ("length", 3)


def test_logprobs_are_of_the_raw_distribution(llm: LLM) -> None:
    (output,) = samples(llm, {"choice": ["zebra"]}, logprobs=2)
    assert output.logprobs is not None
    first = output.logprobs[0]
    drawn = first[output.token_ids[0]]
    assert drawn.rank is not None
    assert drawn.rank > 2
    assert any(lp.rank == 1 and lp.logprob > drawn.logprob for lp in first.values())


def test_other_edits_apply_within_the_grammar(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = [tokenizer.encode(c, add_special_tokens=False)[-1] for c in "abxyz"]
    (output,) = samples(llm, {"regex": "[a-m]{4,6}"}, allowed_token_ids=ids)
    assert re.fullmatch("[ab]{4,6}", output.text)
    (output,) = samples(llm, {"choice": ["a", "b"]}, allowed_token_ids=ids[2:])
    assert output.finish_reason == "error"
    assert "structured_outputs" in (output.error or "")


def test_a_stream_gives_the_same_text_in_pieces(llm: LLM) -> None:
    (whole,) = samples(llm, {"json": PERSON}, seed=5)
    pieces = list(llm.stream("Once upon a time", params({"json": PERSON}, seed=5)))
    assert pieces[-1].outputs[0].text == whole.text
    assert all(whole.text.startswith(piece.outputs[0].text) for piece in pieces)


def test_an_abort_ends_a_constrained_request(llm: LLM) -> None:
    stream = llm.stream("Once", params({"regex": "[a-z ]*"}, ignore_eos=True, max_tokens=400))
    next(stream)
    stream.close()
    llm.sleep()  # refused while anything runs, and a matcher left over is an error
    llm.wake_up()
    assert samples(llm, {"choice": ["yes"]})[0].text == "yes"


def test_an_event_loop_is_not_held_up_by_a_grammar() -> None:
    async def main() -> tuple[list[CompletionOutput], float, float]:
        async with AsyncLLM(demo_model_path(), num_threads=1) as llm:
            start = time.monotonic()
            slow = params({"json": {"type": "integer", "multipleOf": 50021}}, max_tokens=8)
            task = asyncio.ensure_future(collect(llm, slow))
            longest = 0.0
            while not task.done():
                before = time.monotonic()
                await asyncio.sleep(0.01)
                longest = max(longest, time.monotonic() - before)
            return await task, longest, time.monotonic() - start

    async def collect(llm: AsyncLLM, params: SamplingParams) -> list[CompletionOutput]:
        return [output async for output in llm.generate("The", params)][-1].outputs

    outputs, longest, total = asyncio.run(main())
    assert outputs[0].finish_reason in ("stop", "length")
    assert longest < total / 2  # most of it is the grammar's


BAD = [
    ({"json": {"type": "strin"}}, "json: Invalid type: strin"),
    ({"json": {"$ref": "#/nowhere"}}, "json: .*nowhere"),
    ({"json": {"$ref": "http://127.0.0.1:9/x.json"}}, "json: "),
    ({"json": {"type": "array", "uniqueItems": True}}, "json: .*uniqueItems"),
    ({"json": False}, None),
    ({"json": {"enum": []}}, "json: "),
    ({"json": {"$ref": "#"}}, "json: no text can begin to match it: no token may come next$"),
    ({"regex": "("}, "regex: (?s:.)*unclosed group"),
    ({"regex": r"(a)\1"}, "regex: "),
    ({"grammar": "start: ("}, "grammar: "),
    ({"grammar": ""}, "grammar: "),
    ({"grammar": "start: a"}, "grammar: "),
    ({"grammar": "start: /a\0/"}, "grammar: .*NUL"),
    ({"choice": ["x" * 300_000]}, "choice must be at most 262144 bytes, got 300000"),
]


@pytest.mark.parametrize(("structured", "message"), BAD)
def test_what_is_no_grammar_is_refused_by_its_field(
    llm: LLM, structured: dict[str, object], message: str | None
) -> None:
    if message is None:  # a schema that nothing matches
        with pytest.raises(InvalidArgument):
            samples(llm, structured)
        return
    with pytest.raises(
        InvalidArgument, match=r"^sampling_params\[0\]: structured_outputs: " + message
    ):
        samples(llm, structured)


REFUSED = [
    ({}, "structured_outputs needs exactly one of .* got none"),
    (
        {"regex": "a", "choice": ["b"]},
        "structured_outputs needs exactly one of .* got regex and choice",
    ),
    ({"json": 3}, "structured_outputs: json must be a JSON schema as a dict or a string, got 3"),
    ({"json": "[]"}, "structured_outputs: json must be a JSON schema, an object"),
    ({"json": "{"}, "structured_outputs: json is not JSON"),
    ({"json": '{"a":' * 5000}, "structured_outputs: json is not JSON"),
    ({"json": {"a": {1, 2}}}, "structured_outputs: json is not JSON"),
    ({"regex": 3}, "structured_outputs: regex must be a string, got 3"),
    ({"regex": "\ud800"}, "structured_outputs: regex has a lone surrogate"),
    ({"choice": "yes"}, "structured_outputs: choice must be a list of strings"),
    ({"choice": []}, "structured_outputs: choice must name at least one"),
    ({"choice": ["a", 3]}, r"structured_outputs: choice\[1\] must be a string"),
    ({"json_object": 1}, "structured_outputs: json_object must be True or False"),
    ({"regx": "a"}, "StructuredOutputsParams has no argument 'regx'; did you mean 'regex'"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_a_bad_argument_is_refused_with_field_rule_and_value(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        StructuredOutputsParams(**fields)  # type: ignore[arg-type]


def test_names_order_and_defaults_are_those_of_the_field() -> None:
    names = ["json", "regex", "choice", "grammar", "json_object", "disable_fallback"]
    names += ["disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"]
    assert [f.name for f in dataclasses.fields(StructuredOutputsParams)] == [
        *names,
        "structural_tag",
    ]
    with pytest.raises(InvalidArgument, match="structured_outputs must be a Structured"):
        SamplingParams(structured_outputs={"json": {}})  # type: ignore[arg-type]


def test_without_llguidance_the_error_names_the_extra(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars.importlib.util, "find_spec", lambda name: None)
    with LLM(demo_model_path(), num_threads=1, num_gpu_blocks_override=512) as bare:
        with pytest.raises(NotSupported, match=r"pip install 'llmserve\[structured\]'"):
            samples(bare, {"regex": "a"})
        assert generate(bare, "Once", SamplingParams(max_tokens=2))[0].outputs[0].token_ids


# What schemas may be made of: JSON's types, nested. Small, so that texts come to an end.
SCALARS = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -9, "maximum": 99},
        {"type": "string", "maxLength": 6},
        {"type": "string", "pattern": "^[a-f]{2,4}$"},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"enum": ["x", 1, None, "a longer one"]},
        {"const": {"k": [1, "two"]}},
    ]
)
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        inner.map(lambda s: {"type": "array", "items": s, "minItems": 1, "maxItems": 2}),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda parts: {
                "type": "object",
                "properties": {f"p{i}": s for i, s in enumerate(parts)},
                "required": [f"p{i}" for i in range(0, len(parts), 2)],
                "additionalProperties": False,
            }
        ),
        st.lists(inner, min_size=2, max_size=2).map(lambda parts: {"anyOf": parts}),
    ),
    max_leaves=5,
)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(SCHEMAS)
def test_outputs_of_random_schemas_validate(llm: LLM, schema: dict[str, object]) -> None:
    structured = {"json": schema, "disable_any_whitespace": True}
    for output in samples(llm, structured, n=2, max_tokens=300):
        assert output.finish_reason in ("stop", "length"), output.error
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), schema)
