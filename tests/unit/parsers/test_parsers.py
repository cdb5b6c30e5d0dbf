"""Calls and reasoning in a model's text: whatever the style, wherever it is cut, however broken."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmserve import (
    LLM,
    InvalidArgument,
    SamplingParams,
    StructuredOutputsParams,
    demo_model_path,
)
from llmserve.parsers.deltas import Pieces, merged
from llmserve.parsers.registry import (
    REASONING_STYLES,
    TOOL_STYLES,
    detect_tool_style,
    tool_parser,
    tool_style,
)
from llmserve.parsers.think import ThinkParser
from llmserve.parsers.tool_grammar import call_grammar, text_with_calls, tool_function
from llmserve.server.routes.chat_parser import ChatFormat

NAMES = ["weather", "add", "now"]
STYLES = [style.name for style in TOOL_STYLES]
WEATHER = '{"name": "weather", "arguments": {"city": "Rome, \\"IT\\"", "days": [1, 2]}}'
ADD = '{"arguments": {"x": {"a": "}{]"}, "y": null}, "name": "add"}'

Calls = list[tuple[str, str]]


def parsed(style: str, pieces: Iterable[str]) -> tuple[str, Calls]:
    """Content and calls. Checks the form of what is streamed."""
    parser = tool_parser(tool_style(style), NAMES)
    whole = Pieces()
    for piece in pieces:
        whole.add(parser.feed(piece))
    whole.add(parser.finish())
    seen: list[int] = []
    ids = set()
    for delta in whole.tool_calls:
        if delta.index in seen:
            assert delta.index == seen[-1]
            assert delta.to_dict() == {
                "index": delta.index,
                "function": {"arguments": delta.arguments},
            }
        else:
            assert delta.index == len(seen)
            assert delta.to_dict()["type"] == "function"
            assert delta.name in NAMES
            seen.append(delta.index)
            ids.add(delta.id)
    assert len(ids) == len(seen)
    calls = [call["function"] for call in merged(whole.tool_calls)]
    return whole.content, [(c["name"], c["arguments"]) for c in calls]  # type: ignore[index]


def cut(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(len(text) + 1)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


ROME = ("weather", '{"city": "Rome, \\"IT\\"", "days": [1, 2]}')
SUM = ("add", '{"x": {"a": "}{]"}, "y": null}')
NOW = ("now", "{}")
CASES: list[tuple[str, str, str, Calls]] = [
    ("hermes", f"Let me see.\n<tool_call>\n{WEATHER}\n</tool_call>", "Let me see.", [ROME]),
    (
        "hermes",
        f"<tool_call>{ADD}</tool_call>\n<tool_call>\n{WEATHER}\n</tool_call>\n",
        "",
        [SUM, ROME],
    ),
    ("hermes", f"<tool_call>{WEATHER}</tool_call> and so on.\n", "and so on.\n", [ROME]),
    ("hermes", f"I ask. <tool_call>{ADD}</tool_call>\nThen I say.", "I ask. Then I say.", [SUM]),
    ("hermes", f"I ask:<tool_call>{ADD}</tool_call>Done.\n", "I ask:\nDone.\n", [SUM]),
    (
        "hermes",
        f"1\n\n<tool_call>{ADD}</tool_call> <tool_call>{WEATHER}</tool_call>2 "
        f"<tool_call>{ADD}</tool_call>\n",
        "1\n\n2",
        [SUM, ROME, SUM],
    ),
    ("hermes", f"1 <tool_call>{ADD}</tool_call> <tool_call> 2", "1 <tool_call> 2", [SUM]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"arguments": "{}", "name": "now"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "x"}</tool_call>', "", [("now", '"x"')]),
    (
        "hermes",
        '<tool_call>{"arguments": "[3]", "name": "now"}</tool_call>',
        "",
        [("now", '"[3]"')],
    ),
    ("hermes", '<tool_call>{"id": 3, "x": [{}], "name": "now"}</tool_call>', "", [NOW]),
    ("llama3_json", ADD.replace("arguments", "parameters"), "", [SUM]),
    ("llama3_json", f"<|python_tag|>{WEATHER}; {ADD}", "", [ROME, SUM]),
    ("llama3_json", f"\n [{WEATHER}, {ADD}]\n", "", [ROME, SUM]),
    ("llama3_json", f"First: {WEATHER}", f"First: {WEATHER}", []),
    ("mistral", f"[TOOL_CALLS] [{WEATHER}, {ADD}]", "", [ROME, SUM]),
    ("mistral", f"Yes.[TOOL_CALLS]{WEATHER}", "Yes.", [ROME]),
    ("mistral", "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]add{ }", "", [NOW, ("add", "{ }")]),
    ("mistral", 'So. [TOOL_CALLS][{"name": "now"}] Yes.', "So. Yes.", [NOW]),
    ("mistral", "a [TOOL_CALLS] b", "a [TOOL_CALLS] b", []),
    ("json", f"  [{WEATHER} , {ADD}]", "", [ROME, SUM]),
    ("json", WEATHER, "", [ROME]),
    ("json", '{"temperature": 3}', '{"temperature": 3}', []),
    ("json", "[1, 2]", "[1, 2]", []),
    ("json", "Hello, {}", "Hello, {}", []),
]


@pytest.mark.parametrize(("style", "text", "content", "calls"), CASES)
def test_calls_are_found_wherever_the_text_is_cut(
    style: str, text: str, content: str, calls: Calls
) -> None:
    assert parsed(style, [text]) == (content, calls)
    assert parsed(style, text) == (content, calls)
    rng = random.Random(text)
    for _ in range(30):
        assert parsed(style, cut(text, rng)) == (content, calls)


BROKEN: list[tuple[str, str]] = [
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call> weather"),
    ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 3}</tool_call>'),
    ("hermes", '<tool_call>{"name": "wea'),
    ("hermes", "<tool_call>{name: now}</tool_call>"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"\\ud800": {"a": [}}</tool_call>'),
    ("hermes", "a < b <tool_cal> c <tool"),
    ("hermes", '<tool_call>[{"name": "now"}]</tool_call>'),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS]" + "x" * 300 + "[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]nobody[ARGS]{}"),
    ("json", "[" * 3000),
    ("json", '{"a":' * 3000),
]


@pytest.mark.parametrize(("style", "text"), BROKEN)
def test_what_is_no_call_is_content_as_it_stands(style: str, text: str) -> None:
    content, calls = parsed(style, [text])
    assert calls == []
    assert content == text
    rng = random.Random(text)
    for _ in range(10):
        assert parsed(style, cut(text, rng)) == (text, [])


def test_what_is_announced_stays_though_it_breaks_off() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Ro'
    assert parsed("hermes", text) == ("", [("weather", '{"city": "Ro')])
    text = f"<tool_call>{WEATHER}\n</tool"
    assert parsed("hermes", text) == ("", [ROME])
    text = f"[{WEATHER}, "
    assert parsed("json", text) == ("", [ROME])
    text = f"<tool_call>{WEATHER}<tool_call>{ADD}</tool_call>"  # no end between them
    assert parsed("hermes", text) == ("", [ROME, SUM])


def test_arguments_go_out_as_they_come() -> None:
    parser = tool_parser(tool_style("hermes"), NAMES)
    begin = parser.feed('<tool_call>\n{"name": "weather"').tool_calls
    assert [(d.index, d.name, d.arguments) for d in begin] == [(0, "weather", "")]
    assert parser.feed(', "arguments": {"city": "Ro').tool_calls[0].arguments == '{"city": "Ro'
    assert parser.feed('me"}').tool_calls[0].arguments == 'me"}'
    assert parser.feed("}\n</tool_call>").tool_calls == []


# Texts out of the signs that the styles are made of, so that every state meets every sign.
SIGNS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", WEATHER, ADD]
SIGNS += ['{"name": "now"', '"name"', '"arguments": ', "{", "}", "[", "]", ",", ";", ":", '"']
SIGNS += ["\\", " ", "\n", "now", "é", "null", "12", "<", "</", "<think>", "</think>"]
SOUP = st.lists(st.sampled_from(SIGNS), max_size=14).map("".join)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(style=st.sampled_from(STYLES), text=SOUP, seed=st.integers(0, 2**16))
def test_the_result_never_depends_on_where_the_text_is_cut(
    style: str, text: str, seed: int
) -> None:
    whole = parsed(style, [text])
    assert parsed(style, text) == whole
    assert parsed(style, cut(text, random.Random(seed))) == whole
    if not whole[1]:
        assert whole[0] == text


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    style=st.sampled_from(["hermes", "json", "mistral", "llama3_json"]),
    arguments=st.lists(
        st.dictionaries(
            st.text(max_size=5),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.text(max_size=8),
                lambda inner: (
                    st.lists(inner, max_size=3)
                    | st.dictionaries(st.text(max_size=4), inner, max_size=3)
                ),
                max_leaves=6,
            ),
            max_size=3,
        ),
        min_size=1,
        max_size=3,
    ),
    seed=st.integers(0, 2**16),
)
def test_any_arguments_come_through(
    style: str, arguments: list[dict[str, object]], seed: int
) -> None:
    objects = [json.dumps({"name": "add", "arguments": a}, ensure_ascii=False) for a in arguments]
    text = {
        "hermes": "\n".join(f"<tool_call>\n{o}\n</tool_call>" for o in objects),
        "json": f"[{', '.join(objects)}]",
        "mistral": f"[TOOL_CALLS][{','.join(objects)}]",
        "llama3_json": "; ".join(objects),
    }[style]
    content, calls = parsed(style, cut(text, random.Random(seed)))
    assert content == ""
    assert [json.loads(found) for _, found in calls] == arguments


def test_hostile_texts_take_no_longer_than_they_are() -> None:
    """A parser that looked back would not come to an end here."""
    for text in ('<tool_call>{"a": "' * 5_000, "<tool_call>" * 9_000, "<tool_call>[" * 9_000):
        content, calls = parsed("hermes", [text])
        assert (content, calls) == (text, [])
    content, calls = parsed("mistral", ["[TOOL_CALLS]x" * 6_000])
    assert calls == []


def split(is_open: bool, pieces: Iterable[str]) -> tuple[str, str]:
    parser = ThinkParser(is_open)
    whole = Pieces()
    for piece in pieces:
        whole.add(parser.feed(piece))
    whole.add(parser.finish())
    return whole.reasoning, whole.content


THOUGHTS = [
    (False, "<think>\nHm.\n</think>\n\nYes.\n", "Hm.", "Yes.\n"),
    (False, " \n<think>a</think>b</think>", "a", "b</think>"),
    (False, "Yes <think>a</think>", "", "Yes <think>a</think>"),
    (False, "<think>a < b </thin", "a < b </thin", ""),
    (False, "<think></think>", "", ""),
    (False, " <thi", "", " <thi"),
    (True, "Hm. </think> Yes", "Hm.", "Yes"),
    (True, "\n\nHm. ", "Hm.", ""),
    (True, "</think>Yes", "", "Yes"),
]


@pytest.mark.parametrize(("is_open", "text", "reasoning", "content"), THOUGHTS)
def test_reasoning_is_split_off_wherever_the_text_is_cut(
    is_open: bool, text: str, reasoning: str, content: str
) -> None:
    assert split(is_open, [text]) == (reasoning, content)
    assert split(is_open, text) == (reasoning, content)
    rng = random.Random(text)
    for _ in range(20):
        assert split(is_open, cut(text, rng)) == (reasoning, content)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(is_open=st.booleans(), text=SOUP, seed=st.integers(0, 2**16))
def test_reasoning_never_depends_on_where_the_text_is_cut(
    is_open: bool, text: str, seed: int
) -> None:
    whole = split(is_open, [text])
    assert split(is_open, text) == whole
    assert split(is_open, cut(text, random.Random(seed))) == whole


def test_a_chat_template_tells_its_style() -> None:
    templates = {
        "<tool_call>\n{{ call | tojson }}\n</tool_call>": "hermes",
        "[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]{{ calls }}": "mistral",
        "Environment: ipython": "llama3_json",
        "{{ messages }}": "json",
    }
    for template, style in templates.items():
        assert detect_tool_style(template).name == style
    assert set(REASONING_STYLES) == {"think"}
    with pytest.raises(InvalidArgument, match=r"must be one of hermes, .* got 'pythonic'"):
        tool_style("pythonic")


TOOLS: list[object] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 8},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"enum": [{}]}}},
]


@pytest.mark.parametrize("is_parallel", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_a_forced_call_is_found_by_its_own_parser(style: str, is_parallel: bool) -> None:
    functions = [tool_function(f"tools[{i}]", tool) for i, tool in enumerate(TOOLS)]
    lark = call_grammar(tool_style(style), functions, is_parallel, lambda token: None)
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(grammar=lark),
        max_tokens=300,
        seed=3,
        n=4,
        temperature=1.0,
    )
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    with LLM(demo_model_path(), num_threads=1, num_gpu_blocks_override=256) as llm:
        (output,) = llm.chat(messages, params, use_tqdm=False, tools=TOOLS)  # type: ignore[arg-type]
    for sample in output.outputs:
        assert sample.finish_reason in ("stop", "length")
        content, calls = parsed(style, sample.text)
        if sample.finish_reason == "length":
            continue
        assert content == ""
        assert len(calls) == 1 or is_parallel
        for name, arguments in calls:
            schema = dict(functions)[name]
            jsonschema.validate(json.loads(arguments), schema)


@pytest.mark.parametrize("is_parallel", [False, True])
@pytest.mark.parametrize("style", ["hermes", "mistral"])
def test_a_call_within_a_text_is_found_by_its_own_parser(style: str, is_parallel: bool) -> None:
    functions = [tool_function(f"tools[{i}]", tool) for i, tool in enumerate(TOOLS)]
    lark = text_with_calls(tool_style(style), functions, is_parallel, lambda token: None)
    with LLM(demo_model_path(), num_threads=1, num_gpu_blocks_override=256) as llm:
        tokenizer = llm.get_tokenizer()
        said = tokenizer.encode("Well, I ask. " + tool_style(style).begin)
        prompt = tokenizer.encode("What is the weather in Rome?")

        def says(token_ids: np.ndarray, logits: np.ndarray) -> None:
            num_new = len(token_ids) - len(prompt)
            if num_new < len(said):
                logits[said[num_new]] = 1e4

        params = SamplingParams(
            structured_outputs=StructuredOutputsParams(grammar=lark),
            logits_processors=[says],
            max_tokens=200,
            n=4,
            seed=3,
        )
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    for sample in output.outputs:
        content, calls = parsed(style, sample.text)
        assert content.startswith("Well, I ask.")
        if sample.finish_reason == "stop":
            assert calls
        for name, arguments in calls if sample.finish_reason == "stop" else calls[:-1]:
            jsonschema.validate(json.loads(arguments), dict(functions)[name])


def test_a_grammar_of_calls_names_special_tokens_by_their_id() -> None:
    ids = {"[TOOL_CALLS]": 7}.get
    lark = call_grammar(tool_style("mistral"), [("now", {})], True, ids)
    assert lark.startswith('start: <[7]> "["')
    lark = text_with_calls(tool_style("mistral"), [("now", {})], True, ids)
    assert "before: TEXT <[7]>" in lark


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (3, r"tools\[0\] must be a tool"),
        ({"type": "function"}, r"tools\[0\] must be a tool"),
        ({"function": {"name": ""}}, r"tools\[0\] must be a tool"),
        ({"function": {"name": "a", "parameters": 3}}, r"tools\[0\]: parameters must be"),
    ],
)
def test_what_is_no_tool_is_refused(tool: object, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        tool_function("tools[0]", tool)


def test_calls_are_not_looked_for_in_reasoning_and_both_come_wherever_the_text_is_cut() -> None:
    form = ChatFormat(
        style=tool_style("hermes"),
        tool_names=NAMES,
        is_parallel=False,
        reasoning=REASONING_STYLES["think"],
        is_thinking=True,
        gives_reasoning=True,
    )
    block = f"<tool_call>{ADD}</tool_call>"
    text = f"I might {block}.\n</think>\n\nYes. {block}\n{block}"
    rng = random.Random(1)
    for pieces in ([text], list(text), *(cut(text, rng) for _ in range(20))):
        parser = form.parser()
        found = [parser.feed(piece) for piece in pieces] + [parser.finish()]
        assert "".join(f.get("reasoning_content", "") for f in found) == f"I might {block}."
        assert "".join(f.get("content", "") for f in found) == "Yes."
        calls = merged([delta for f in found for delta in f.get("tool_calls", ())])
        assert [call["function"] for call in calls] == [{"name": SUM[0], "arguments": SUM[1]}]
        assert parser.has_tool_calls
    silent = dataclasses.replace(form, gives_reasoning=False).parser()
    assert silent.feed("Hm.</think>") == {}
