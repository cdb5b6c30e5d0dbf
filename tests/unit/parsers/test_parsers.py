"""Calls and reasoning in a model's text: whatever the style, wherever it is cut, however broken."""
# ruff: noqa: RUF001  # DeepSeek's tokens have wide bars

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Iterable

import pytest
from call_texts import (
    ADD,
    BEGINS,
    BROKEN,
    CALL,
    CALL_END,
    CASES,
    ENDS,
    NAMES,
    OWN,
    ROME,
    SCHEMAS,
    SECTION,
    SECTION_END,
    SEP,
    SOUP,
    START,
    STYLES,
    SUM,
    WEATHER,
    Calls,
    cut,
    glm,
    harmony,
    kimi,
    parsed,
    soup_of,
    to,
    xml,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from llmserve import (
    CompletionOutput,
    InvalidArgument,
)
from llmserve.parsers.deltas import Pieces, merged
from llmserve.parsers.reasoning import REASONING_STYLES
from llmserve.parsers.registry import (
    TOOL_STYLES,
    detect_reasoning_style,
    detect_tool_style,
    reasoning_style,
    tool_parser,
    tool_style,
)
from llmserve.parsers.think import ThinkParser
from llmserve.server.routes.chat_parser import ChatFormat


@pytest.mark.parametrize(("style", "text", "content", "calls"), CASES)
def test_calls_are_found_wherever_the_text_is_cut(
    style: str, text: str, content: str, calls: Calls
) -> None:
    assert parsed(style, [text]) == (content, calls)
    assert parsed(style, text) == (content, calls)
    rng = random.Random(text)
    for _ in range(30):
        assert parsed(style, cut(text, rng)) == (content, calls)


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


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_the_result_never_depends_on_where_the_text_is_cut(
    style: str, data: st.DataObject, seed: int
) -> None:
    text = data.draw(soup_of(style) if tool_style(style).signs or style in OWN else SOUP)
    whole = parsed(style, [text])
    assert parsed(style, text) == whole
    assert parsed(style, cut(text, random.Random(seed))) == whole
    if not whole[1] and style != "openai":  # whose messages stand in signs
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
    for style, signs in OWN.items():
        text = "".join(signs) * 500
        assert parsed(style, text) == parsed(style, [text])


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


def assert_split(
    parser_of: Callable[[], ThinkParser], text: str, reasoning: str, content: str
) -> None:
    """Whole, a letter at a time, and cut anywhere."""

    def read(pieces: Iterable[str]) -> tuple[str, str]:
        parser = parser_of()
        whole = Pieces()
        for piece in pieces:
            whole.add(parser.feed(piece))
        whole.add(parser.finish())
        return whole.reasoning, whole.content

    assert read([text]) == (reasoning, content)
    assert read(text) == (reasoning, content)
    rng = random.Random(text)
    for _ in range(20):
        assert read(cut(text, rng)) == (reasoning, content)


@pytest.mark.parametrize(
    ("sign", "text", "reasoning", "content"),
    [
        ("<tool_call>", "I read it.\n\n<tool_call>{", "I read it.", "<tool_call>{"),
        ("<tool_call>", "<tool_call>{", "", "<tool_call>{"),
        (
            "<tool_call>",
            "A <tool_call> is due.\n <tool_call>",
            "A <tool_call> is due.",
            "<tool_call>",
        ),
        ("<tool_call>", "A <tool_call>\n</think>\n<tool_call>", "A <tool_call>", "<tool_call>"),
        ("<|calls|>", "So.<|calls|>now", "So.", "<|calls|>now"),
    ],
)
def test_a_call_ends_a_thought_that_was_not_closed(
    sign: str, text: str, reasoning: str, content: str
) -> None:
    assert_split(lambda: ThinkParser(True, calls=(sign,)), text, reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\n<response>\nYes.\n</response>\n", "Hm.", "Yes."),
        ("<response>Yes.</response> <tool_call>", "", "Yes.<tool_call>"),
        ("<think>a</think>\nYes </response> ", "a", "Yes </response> "),
        ("<think>a</think><response>\nb \n c\n\n", "a", "b \n c\n\n"),
        ("<think>a</think><respo", "a", "<respo"),
        ("<think>a</think><response> <response>", "a", "<response>"),
    ],
)
def test_signs_around_an_answer_are_none_of_it(text: str, reasoning: str, content: str) -> None:
    style = reasoning_style("ernie45")

    assert_split(
        lambda: ThinkParser(False, style.starts, style.ends, style.answer), text, reasoning, content
    )


def test_texts_in_pythons_style_go_out_as_they_come() -> None:
    parser = tool_parser(tool_style("pythonic"), NAMES)
    assert parser.feed("[weather(city").tool_calls == []
    begin = parser.feed("='Ro").tool_calls
    assert [(d.name, d.arguments) for d in begin] == [
        ("weather", ""),
        (None, '{"city": '),
        (None, '"'),
        (None, "Ro"),
    ]
    assert "".join(d.arguments for d in parser.feed("me\\").tool_calls) == "me"
    assert "".join(d.arguments for d in parser.feed("n', days=[1").tool_calls) == '\\n"'
    assert "".join(d.arguments for d in parser.feed(", 2])]").tool_calls) == ', "days": [1, 2]}'


def test_a_chat_template_tells_its_style() -> None:
    templates = {
        "<tool_call>\n{{ call | tojson }}\n</tool_call>": "hermes",
        "<tool_call>\n<function=f>\n<parameter=p>": "qwen3_coder",
        "<tool_call>{{ name }}\n<arg_key>": "glm45",
        "<seed:tool_call><function=f><parameter=p>": "seed_oss",
        '<minimax:tool_call><invoke name="f">': "minimax_m2",
        "[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]{{ calls }}": "mistral",
        "Environment: ipython <|python_tag|>": "llama3_json",
        "<|python_start|>[func_name1(params_name1=params_value1)]": "llama4_pythonic",
        "[func_name1(params_name1=params_value1)]": "pythonic",
        "function<｜tool▁sep｜>f\n```json\n{}": "deepseek_v3",
        "f<｜tool▁sep｜>{}": "deepseek_v31",
        '{%- set dsml_token = "｜DSML｜" -%}': "deepseek_v32",
        "functions.f:0<|tool_call_argument_begin|>{}": "kimi_k2",
        "<|tool_call|>{{ calls }}": "granite",
        "<|tool|>{{ tools }}<|/tool|> with <|tool_call|>": "phi4_mini_json",
        "<|im_system|>tool_declare<|im_middle|>": "kimi_k2",
        '<|python_start|>{"name": n, "parameters": dictionary of argument name': "llama3_json",
        "<|channel|>analysis<|message|>": "openai",
        "<tool_calls>{{ calls }}</tool_calls>": "jamba",
        "<|action_start|><|plugin|>": "internlm",
        "<longcat_tool_call>": "longcat",
        "<function_calls>{{ calls }}</function_calls>": "olmo3",
        "<|tool_call_start|>[{{ calls }}]<|tool_call_end|>": "lfm2",
        '<steptml:invoke name="f">': "step3",
        "<start_function_call>call:f{}<end_function_call>": "functiongemma",
        "function call<|role_sep|>": "gigachat3",
        "{{ messages }}": "json",
    }
    for template, style in templates.items():
        assert detect_tool_style(template).name == style
    assert set(templates.values()) == set(STYLES) - {"xlam"}  # whose templates show no sign
    with pytest.raises(InvalidArgument, match=r"must be one of openai, .* got 'nobody'"):
        tool_style("nobody")


def test_a_chat_template_tells_its_style_of_reasoning() -> None:
    templates = {
        "<think>{{ thought }}</think>": "think",
        "<think></think><response>": "ernie45",
        "<think></think><answer>": "hunyuan_a13b",
        "[THINK]{{ thought }}[/THINK]": "mistral",
        "<seed:think></seed:think>": "seed_oss",
        "<|START_THINKING|><|END_THINKING|>": "cohere_command",
        "Write 'Here's my thought process:' first.": "granite",
        "<|channel|>analysis<|message|>": "openai_gptoss",
    }
    for template, name in templates.items():
        style = detect_reasoning_style(template)
        assert style is not None
        assert style.name == name
    assert detect_reasoning_style("{{ messages }}") is None
    assert set(templates.values()) == {style.name for style in REASONING_STYLES}
    with pytest.raises(InvalidArgument, match=r"must be one of openai_gptoss, .* got 'nobody'"):
        reasoning_style("nobody")


TOOL_PARSERS = (
    "hermes qwen3_coder qwen3_xml llama3_json llama4_json llama4_pythonic pythonic mistral "
    "deepseek_v3 deepseek_v31 deepseek_v32 glm45 glm47 kimi_k2 granite granite-20b-fc granite4 "
    "phi4_mini_json openai internlm jamba xlam minimax minimax_m2 hunyuan_a13b step3 seed_oss olmo3"
)
REASONING_PARSERS = (
    "deepseek_r1 deepseek_v3 qwen3 glm45 kimi_k2 granite mistral openai_gptoss hunyuan_a13b "
    "ernie45 minimax_m2 olmo3 seed_oss step3 holo2"
)


def test_vllms_names_of_parsers_work() -> None:
    assert all(tool_style(name) in TOOL_STYLES for name in TOOL_PARSERS.split())
    assert all(reasoning_style(name) in REASONING_STYLES for name in REASONING_PARSERS.split())


def test_every_name_is_of_one_style() -> None:
    for styles, find in ((TOOL_STYLES, tool_style), (REASONING_STYLES, reasoning_style)):
        names = [(name, s) for s in styles for name in (s.name, *s.aliases)]
        assert len({name for name, _ in names}) == len(names)
        for name, style in names:
            assert find(name) is style


def output(text: str, finish_reason: str | None = None) -> CompletionOutput:
    return CompletionOutput(
        index=0,
        text=text,
        token_ids=[],
        cumulative_logprob=None,
        logprobs=None,
        finish_reason=finish_reason,
    )


def test_calls_are_not_looked_for_in_reasoning_and_both_come_wherever_the_text_is_cut() -> None:
    form = ChatFormat(
        style=tool_style("hermes"),
        tool_names=NAMES,
        is_parallel=False,
        reasoning=reasoning_style("think"),
        is_thinking=True,
        gives_reasoning=True,
    )
    block = f"<tool_call>{ADD}</tool_call>"
    text = f"I might {block}.\n</think>\n\nYes. {block}\n{block}"
    rng = random.Random(1)
    for pieces in ([text], list(text), *(cut(text, rng) for _ in range(20))):
        parser = form.parser()
        found = Pieces()
        for piece in pieces:
            found.add(parser.read(output(piece)))
        found.add(parser.read(output("", "stop")))
        assert found.reasoning == f"I might {block}."
        assert found.content == "Yes."
        calls = merged(found.tool_calls)
        assert [call["function"] for call in calls] == [{"name": SUM[0], "arguments": SUM[1]}]
        assert parser.has_tool_calls
    silent = dataclasses.replace(form, gives_reasoning=False).parser()
    assert silent.read(output("Hm.</think>")) == Pieces()


def test_messages_of_channels_are_reasoning_calls_and_content() -> None:
    form = ChatFormat(
        style=tool_style("openai"),
        tool_names=NAMES,
        is_parallel=True,
        reasoning=reasoning_style("openai_gptoss"),
        is_thinking=False,
        gives_reasoning=True,
    )
    text = START.join(
        [harmony("analysis", "Hm."), harmony("analysis", "So."), to("add", SUM[1]), "x"]
    ).removesuffix("x")
    text += harmony("final", "1 <|x", "<|return|>")
    rng = random.Random(1)
    for pieces in ([text], list(text), *(cut(text, rng) for _ in range(20))):
        parser = form.parser()
        found = Pieces()
        for piece in pieces:
            found.add(parser.read(output(piece)))
        found.add(parser.read(output("", "stop")))
        assert found.reasoning == "Hm.\nSo."
        assert found.content == "1 <|x"
        calls = merged(found.tool_calls)
        assert [call["function"] for call in calls] == [{"name": SUM[0], "arguments": SUM[1]}]


def test_kimis_own_ids_are_kept_and_none_comes_twice() -> None:
    parser = tool_parser(tool_style("kimi_k2"))
    text = SECTION + 2 * kimi("functions.now:0", "{}") + SECTION_END
    ids = [call["id"] for call in merged(parser.feed(text).tool_calls)]
    assert ids[0] == "functions.now:0"
    assert isinstance(ids[1], str)
    assert ids[1].startswith("call_")


def test_texts_of_arguments_go_out_as_they_come() -> None:
    parser = tool_parser(tool_style("qwen3_coder"), None, SCHEMAS)
    parser.feed("<tool_call>\n<function=weather>\n<parameter=city>\nRo")
    assert parser.feed('me\n"').tool_calls[0].arguments == 'me\\n\\"'
    assert parser.feed("\n</parameter").tool_calls == []


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    style=st.sampled_from(["qwen3_coder", "glm45", "pythonic", "deepseek_v3", "kimi_k2"]),
    city=st.text(max_size=12).filter(lambda text: "<" not in text),
    days=st.lists(st.integers(), max_size=3),
    seed=st.integers(0, 2**16),
)
def test_any_arguments_come_through_signs(
    style: str, city: str, days: list[int], seed: int
) -> None:
    arguments = {"city": city, "days": days}
    written = json.dumps(arguments)
    text = {
        "qwen3_coder": xml("weather", city=city, days=str(days)),
        "glm45": glm("weather", city=city, days=str(days)),
        "pythonic": f"[weather(city={city!r}, days={days})]",
        "deepseek_v3": f"{BEGINS}{CALL}function{SEP}weather\n```json\n{written}\n```{CALL_END}"
        f"{ENDS}",
        "kimi_k2": f"{SECTION}{kimi('functions.weather:0', written)}{SECTION_END}",
    }[style]
    content, calls = parsed(style, cut(text, random.Random(seed)))
    assert content == ""
    assert [(name, json.loads(found)) for name, found in calls] == [("weather", arguments)]
