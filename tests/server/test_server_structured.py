"""Structured output and tools over HTTP, by the official client."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from llmserve import AsyncLLM, demo_model_path
from serving import RunningServer, running_server

ASK: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "parameters": {"enum": [{}]}}},
]
SCHEMAS = {"weather": CITY, "now": {"enum": [{}]}}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return server.openai()


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    given = {"model": "demo", "messages": ASK, "max_tokens": 300, "seed": 1, **fields}
    return client.chat.completions.create(**given)


def test_an_answer_matches_its_schema(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": CITY}}
    answer = ask(client, response_format=form, n=3)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), CITY)
    text = ""
    for chunk in ask(client, response_format=form, stream=True):
        text += chunk.choices[0].delta.content or ""
    assert text == answer.choices[0].message.content


def test_an_answer_is_an_object_where_that_is_asked_for(client: openai.OpenAI) -> None:
    for choice in ask(client, response_format={"type": "json_object"}, n=2).choices:
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
    assert ask(client, response_format={"type": "text"}, max_tokens=3).choices[0].message.content


def test_vllms_extra_field_constrains_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo",
        prompt="The fox is",
        extra_body={"structured_outputs": {"choice": ["red", "grey"]}},
        n=3,
    )
    assert {choice.text for choice in answer.choices} <= {"red", "grey"}


def checked(calls: list[Any]) -> None:
    for call in calls:
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert len({call.id for call in calls}) == len(calls)


@pytest.mark.parametrize(
    "parser",
    ["hermes", "mistral", "llama3_json", "json", "qwen3_xml", "glm45", "kimi_k2"],
)
def test_a_call_that_is_asked_for_is_made(demo: AsyncLLM, parser: str) -> None:
    with running_server(demo, ["demo"], tool_call_parser=parser) as server:
        client = server.openai()
        named = {"type": "function", "function": {"name": "weather"}}
        for fields in ({"tool_choice": "required"}, {"tool_choice": named}):
            answer = ask(client, tools=TOOLS, n=2, **fields)
            for choice in answer.choices:
                calls = choice.message.tool_calls
                assert choice.finish_reason == "tool_calls", choice
                assert choice.message.content is None
                checked(calls)
                if fields["tool_choice"] != "required":
                    assert [call.function.name for call in calls] == ["weather"]
        one = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, n=4)
        assert all(len(choice.message.tool_calls) == 1 for choice in one.choices)


def test_an_answer_with_a_schema_may_be_a_call_instead(client: openai.OpenAI) -> None:
    schema = {"enum": ["sunny", "rainy"]}
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
    kinds = set()
    for seed in range(6):
        for fields in ({}, {"tool_choice": "none"}):
            answer = ask(client, tools=TOOLS, response_format=form, seed=seed, **fields).choices[0]
            kinds.add(answer.finish_reason)
            if answer.finish_reason == "tool_calls":
                assert not fields
                checked(answer.message.tool_calls)
            else:
                jsonschema.validate(json.loads(answer.message.content), schema)
    assert kinds == {"stop", "tool_calls"}


def test_a_streamed_call_is_the_whole_one_in_pieces(client: openai.OpenAI) -> None:
    whole = ask(client, tools=TOOLS, tool_choice="required").choices[0]
    names: dict[int, str] = {}
    ids: dict[int, str] = {}
    arguments: dict[int, str] = {}
    chunks = list(ask(client, tools=TOOLS, tool_choice="required", stream=True))
    for chunk in chunks:
        delta = chunk.choices[0].delta
        assert not delta.content
        for call in delta.tool_calls or ():
            if call.id is not None:
                assert call.index not in ids
                ids[call.index] = call.id
                names[call.index] = call.function.name
            else:
                assert call.function.name is None
            arguments[call.index] = arguments.get(call.index, "") + call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    expected = [(c.function.name, c.function.arguments) for c in whole.message.tool_calls]
    assert [(names[i], arguments[i]) for i in sorted(names)] == expected
    # One chunk at least; on a loaded machine several tokens share one.
    assert any(chunk.choices[0].delta.tool_calls for chunk in chunks)


def test_the_model_may_choose_and_what_it_calls_is_found(client: openai.OpenAI) -> None:
    """The demo model is held to a call, or to none, by a grammar of the test's own."""
    call = (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
    )
    for text, expected in ((f"Well.\n{call}", 1), (f"{call}\n{call}", 2), ("It is sunny.", 0)):
        for choice in ("auto", "none"):
            answer = ask(
                client,
                tools=TOOLS,
                tool_choice=choice,
                extra_body={"structured_outputs": {"choice": [text]}},
            ).choices[0]
            calls = answer.message.tool_calls or []
            assert len(calls) == (expected if choice == "auto" else 0)
            checked(calls)
            if not calls:
                assert (answer.message.content, answer.finish_reason) == (text, "stop")
            elif expected == 1:
                assert (answer.message.content, answer.finish_reason) == ("Well.", "tool_calls")


def strict(tool: Any) -> Any:
    return {**tool, "function": {**tool["function"], "strict": True}}


@pytest.mark.parametrize("is_parallel", [False, True])
def test_a_strict_tools_arguments_match_where_the_model_may_choose(
    client: openai.OpenAI, is_parallel: bool
) -> None:
    """A bias has the model begin calls, again and again."""
    given: dict[str, Any] = {
        "tools": [strict(TOOLS[0]), TOOLS[1]],
        "parallel_tool_calls": is_parallel,
        "max_tokens": 120,
        "n": 4,
    }
    for choice in ask(client, **given, logit_bias={"3": 100}).choices:
        calls = choice.message.tool_calls
        if is_parallel:  # max_tokens cuts the last one off
            assert len(calls) > 1
            calls = calls[:-1]
        else:
            assert (choice.finish_reason, len(calls)) == ("tool_calls", 1)
        for call in calls:
            arguments = json.loads(call.function.arguments)
            if call.function.name == "weather":
                jsonschema.validate(arguments, CITY)
    for choice in ask(client, **given, logit_bias={"3": -100}).choices:
        assert (bool(choice.message.content), choice.message.tool_calls) == (True, None)


A = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"type": ["string", "object"]},
        {"enum": ["a", {}]},
        {"anyOf": [{"type": "string"}, A]},
        {"$ref": "#/$defs/x", "$defs": {"x": {"oneOf": [{"type": "number"}, A]}}},
        {"allOf": [{"properties": {"a": {"type": "integer"}}, "additionalProperties": False}]},
    ],
    ids=str,
)
def test_arguments_are_an_object_whatever_else_their_schema_takes(
    client: openai.OpenAI, parameters: dict[str, Any]
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    given: dict[str, Any] = {"temperature": 8.0, "parallel_tool_calls": False, "n": 16}
    given |= {"max_tokens": 60, "extra_body": {"top_k": 40}}
    for fields in (
        {"tools": [tool], "tool_choice": "required"},
        {"tools": [strict(tool)], "logit_bias": {"3": 100}},
    ):
        reasons = set()
        for choice in ask(client, **given, **fields).choices:
            arguments = choice.message.tool_calls[0].function.arguments
            assert arguments.startswith("{")
            reasons.add(choice.finish_reason)
            if choice.finish_reason == "tool_calls":
                jsonschema.validate(json.loads(arguments), parameters)
        assert "tool_calls" in reasons


def test_a_call_whose_arguments_can_be_no_object_is_refused(server: RunningServer) -> None:
    for parameters in ({"type": "string"}, {"type": ["array", "null"]}, {"enum": [3]}):
        tool = {"function": {"name": "f", "parameters": parameters}}
        asked = {"messages": ASK, "max_tokens": 4, "tools": [tool]}
        status, answer = server.post(CHAT, **asked, tool_choice="required")
        assert (status, answer["error"]["param"]) == (400, "tools"), answer
        assert server.post(CHAT, **asked)[0] == 200


def test_a_strict_tools_schema_is_refused_by_its_name(server: RunningServer) -> None:
    tool = {"function": {"name": "f", "parameters": {"type": "x"}}}
    asked = {"messages": ASK, "max_tokens": 4}
    assert server.post(CHAT, **asked, tools=[tool])[0] == 200
    status, answer = server.post(CHAT, **asked, tools=[strict(tool)])
    assert (status, answer["error"]["param"]) == (400, "tools"), answer


def test_messages_of_channels_are_calls_answers_and_thoughts() -> None:
    signs = {
        "reasoning_start_str": "<|channel|>analysis<|message|>",
        "reasoning_end_str": "<|end|>",
    }
    llm = AsyncLLM(
        demo_model_path(),
        chat_template="{{ messages[0].content }}\n" + signs["reasoning_start_str"],
        reasoning_config=signs,
        num_threads=1,
        kv_cache_memory_bytes=2**23,
    )
    styles = {"tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"}
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    extra = {"thinking_token_budget": 6}
    with running_server(llm, ["demo"], **styles) as server:
        client = server.openai()
        for is_streamed in (False, True):
            answer = ask(client, response_format=form, stream=is_streamed, extra_body=extra)
            reasoning, content = told(answer, is_streamed)
            jsonschema.validate(json.loads(content), CITY)
            assert reasoning
        one = {"parallel_tool_calls": False, "extra_body": extra}
        choice = ask(client, tools=TOOLS, tool_choice="required", **one).choices[0]
        (call,) = choice.message.tool_calls
        checked([call])
        assert choice.finish_reason == "tool_calls"
    llm.close()


@pytest.fixture(scope="module")
def thinking(demo: AsyncLLM) -> Iterator[RunningServer]:
    with running_server(demo, ["demo"], reasoning_parser="think") as server:
        yield server


def test_reasoning_is_left_alone_without_a_section(thinking: RunningServer) -> None:
    answer = ask(thinking.openai(), max_tokens=8).choices[0].message
    assert answer.content
    assert answer.reasoning_content is None


OPEN = "{% for m in messages %}{{ m.content }}\n{% endfor %}<think>\n"
CLOSED = OPEN + "</think>\n\n"


@pytest.fixture(scope="module", params=["open", "closed"])
def thinker(request: pytest.FixtureRequest) -> Iterator[tuple[str, RunningServer]]:
    """A model whose template opens a section of reasoning, or has an empty one."""
    tags = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
    llm = AsyncLLM(
        demo_model_path(),
        chat_template=OPEN if request.param == "open" else CLOSED,
        reasoning_config=tags,
        num_threads=1,
        kv_cache_memory_bytes=2**23,
    )
    with running_server(llm, ["demo"], reasoning_parser="think") as server:
        yield request.param, server
    llm.close()


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_may_be_thought_about_and_matches_from_there_on(
    thinker: tuple[str, RunningServer], is_streamed: bool
) -> None:
    kind, server = thinker
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    given: dict[str, Any] = {
        "response_format": form,
        "extra_body": {"thinking_token_budget": 12},
        "stream": is_streamed,
    }
    reasoning, content = told(ask(server.openai(), **given), is_streamed)
    jsonschema.validate(json.loads(content), CITY)
    assert bool(reasoning) == (kind == "open")
    assert "think>" not in content + reasoning


def test_a_call_may_be_thought_about_too(thinker: tuple[str, RunningServer]) -> None:
    kind, server = thinker
    extra = {"thinking_token_budget": 12}
    answer = ask(server.openai(), tools=TOOLS, tool_choice="required", extra_body=extra).choices[0]
    assert answer.finish_reason == "tool_calls"
    for call in answer.message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert (answer.message.reasoning_content is not None) == (kind == "open")


def test_a_strict_tool_may_be_thought_about(thinker: tuple[str, RunningServer]) -> None:
    kind, of_json = thinker
    styles = {"reasoning_parser": "think", "tool_call_parser": "hermes"}
    with running_server(of_json.llm, ["demo"], **styles) as server:
        answer = ask(
            server.openai(),
            tools=[strict(TOOLS[0])],
            logit_bias={"3": 100},
            parallel_tool_calls=False,
            extra_body={"thinking_token_budget": 6},
        ).choices[0]
    (call,) = answer.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), CITY)
    assert (answer.message.reasoning_content is not None) == (kind == "open")


def test_a_thought_may_end_in_a_call_or_in_an_answer(thinker: tuple[str, RunningServer]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    extra = {"thinking_token_budget": 6}
    answer = ask(
        thinker[1].openai(), tools=TOOLS, tool_choice="auto", response_format=form, extra_body=extra
    ).choices[0]
    if answer.message.tool_calls:
        assert answer.finish_reason == "tool_calls"
    else:
        jsonschema.validate(json.loads(answer.message.content), CITY)


def test_a_choice_a_pattern_and_a_grammar_of_ones_own(thinker: tuple[str, RunningServer]) -> None:
    kind, server = thinker
    for constraint, expected in (
        ({"choice": ["yes", "no/maybe"]}, r"yes|no/maybe"),
        ({"regex": "[a-c]{2}/\\/\n?x"}, "[a-c]{2}//\n?x"),
        ({"grammar": 'start: "x" start | "y"'}, "x*y"),
    ):
        body = {"thinking_token_budget": 8, "structured_outputs": constraint}
        message = ask(server.openai(), max_tokens=200, extra_body=body).choices[0].message
        assert re.fullmatch(expected, message.content), message
        thinks = kind == "open" and "grammar" not in constraint
        assert (message.reasoning_content is not None) == thinks


def told(answer: Any, is_streamed: bool) -> tuple[str, str]:
    """(reasoning, content) of an answer of one choice."""
    if not is_streamed:
        message = answer.choices[0].message
        return getattr(message, "reasoning_content", None) or "", message.content
    deltas = [chunk.choices[0].delta for chunk in answer]
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    return reasoning, "".join(delta.content or "" for delta in deltas)


@pytest.fixture(scope="module")
def special_thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A model with special tokens to think between, whose template opens them if it is told to."""
    model = shutil.copytree(demo_model_path(), tmp_path_factory.mktemp("special") / "model")
    path = model / "tokenizer.json"
    document = json.loads(path.read_text().replace("tool_call>", "think>"))
    for token in document["added_tokens"]:
        token["special"] = True
    path.write_text(json.dumps(document))
    template = (
        "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if opens %}<think>\n{% endif %}"
        "{# </think> #}"
    )
    llm = AsyncLLM(model, chat_template=template, num_threads=1, kv_cache_memory_bytes=2**23)
    with running_server(llm, ["demo"]) as server:
        yield server.openai()
    llm.close()


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("opens", "is_constrained"), [(True, False), (True, True), (False, True)]
)  # where the template does not open them, a bias has the model do it
def test_thoughts_are_told_from_the_answer_by_special_tokens_too(
    special_thinker: openai.OpenAI, opens: bool, is_constrained: bool, is_streamed: bool
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    given: dict[str, Any] = {"response_format": form} if is_constrained else {"max_tokens": 20}
    extra = {"thinking_token_budget": 5, "chat_template_kwargs": {"opens": opens}, "min_tokens": 9}
    if not opens:
        given["logit_bias"] = {"3": 100}
    answer = ask(special_thinker, stream=is_streamed, extra_body=extra, **given)
    reasoning, content = told(answer, is_streamed)
    assert reasoning
    assert content
    assert not {"<", "|"} & {*reasoning, *content}
    if is_constrained:
        jsonschema.validate(json.loads(content), CITY)


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": SCHEMA}, "response_format"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"structured_outputs": {"regx": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"response_format": {}}, "response_format"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "response_format",
    ),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}},
        "tool_choice",
    ),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}],
            "tool_choice": "required",
        },
        "tools",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"multipleOf": 0}}}},
        "response_format",
    ),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_a_bad_constraint_is_a_400_by_its_name(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    status, answer = server.post(CHAT, messages=ASK, max_tokens=4, **fields)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert param in answer["error"]["message"]
    assert not re.search("Traceback|Params", answer["error"]["message"])
    status, answer = server.post(CHAT, messages=ASK, max_tokens=4, temperature=0)
    assert status == 200
