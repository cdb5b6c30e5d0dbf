"""Anthropic's protocol, by its official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from llmserve import AsyncLLM, demo_model_path
from serving import RunningServer, running_server

anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed")

HELLO: list[Any] = [{"role": "user", "content": "Tell me a story."}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"name": "weather", "description": "Of a city.", "input_schema": CITY}]
CALLED: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": "Is it warm?"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "I ask.", "signature": ""},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "content": [{"type": "text", "text": "18 degrees"}],
            },
            {"type": "text", "text": "So?"},
        ],
    },
]


def client_of(server: RunningServer, **options: Any) -> Any:
    options = {"api_key": "none", "max_retries": 0, **options}
    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", **options)


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Any:
    return client_of(server)


def ask(client: Any, **fields: Any) -> Any:
    given = {"model": "demo", "messages": HELLO, "max_tokens": 24, "extra_body": {"seed": 1}}
    return client.messages.create(**{**given, **fields})


def test_a_message_is_the_chats_answer(client: Any, server: RunningServer) -> None:
    answer = ask(client, system="Be brief.", extra_body={"temperature": 0.0})
    chat = server.post(
        "/v1/chat/completions",
        messages=[{"role": "system", "content": "Be brief."}, *HELLO],
        max_tokens=24,
        temperature=0,
    )[1]
    (block,) = answer.content
    assert (block.type, block.text) == ("text", chat["choices"][0]["message"]["content"])
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "demo")
    usage = answer.usage
    assert usage.output_tokens == chat["usage"]["completion_tokens"]
    num_prompt = usage.input_tokens + usage.cache_read_input_tokens
    assert num_prompt == chat["usage"]["prompt_tokens"]
    assert answer.id.startswith("msg")


def test_a_streamed_message_is_the_whole_one_in_pieces(client: Any) -> None:
    whole = ask(client)
    with client.messages.stream(
        model="demo", messages=HELLO, max_tokens=24, extra_body={"seed": 1}
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert [block.text for block in final.content] == [block.text for block in whole.content]
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_why_a_message_ended_is_told(client: Any) -> None:
    assert ask(client, max_tokens=2).stop_reason == "max_tokens"
    text = ask(client).content[0].text
    stopped = ask(client, stop_sequences=[text[5:8]])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[5:8])
    assert stopped.content[0].text == text[: text.index(text[5:8])]


def test_a_tool_is_called_as_its_choice_says(client: Any) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        answer = ask(client, tools=TOOLS, tool_choice=choice, max_tokens=200)
        assert answer.stop_reason == "tool_use"
        for block in answer.content:
            assert (block.type, block.name, list(block.input)) == ("tool_use", "weather", ["city"])
    choice = {"type": "any", "disable_parallel_tool_use": True}
    body = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 200, "messages": HELLO}
    with client.messages.stream(model="demo", **body) as stream:
        pieces = [e.partial_json for e in stream if e.type == "input_json"]
        (call,) = stream.get_final_message().content
    assert json.loads("".join(pieces)) == call.input


def test_what_was_called_goes_back_into_the_conversation(
    client: Any, server: RunningServer
) -> None:
    counted = client.messages.count_tokens(model="demo", messages=CALLED, tools=TOOLS)
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    tool = {"name": "weather", "description": "Of a city.", "parameters": CITY}
    chat = [
        {"role": "user", "content": "Is it warm?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "18 degrees"},
        {"role": "user", "content": "So?"},
    ]
    tools = [{"type": "function", "function": tool}]
    wanted = server.post("/tokenize", messages=chat, tools=tools)[1]
    assert counted.input_tokens == wanted["count"]
    assert ask(client, messages=CALLED, tools=TOOLS).usage.output_tokens > 0


def test_a_long_conversation_is_counted_too(client: Any, server: RunningServer) -> None:
    long = [message for _ in range(200) for message in CALLED]
    counted = client.messages.count_tokens(model="demo", messages=long)
    short = client.messages.count_tokens(model="demo", messages=CALLED)
    assert counted.input_tokens > 150 * short.input_tokens


def test_what_the_assistant_has_begun_is_gone_on_with(client: Any, server: RunningServer) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "Once upon"}]
    counted = client.messages.count_tokens(model="demo", messages=begun)
    wanted = server.post("/tokenize", messages=begun, continue_final_message=True)[1]
    assert counted.input_tokens == wanted["count"]


def test_an_answer_matches_its_schema(client: Any) -> None:
    form = {"format": {"type": "json_schema", "schema": CITY}}
    answer = ask(client, max_tokens=200, extra_body={"output_config": form, "seed": 2})
    assert list(json.loads(answer.content[0].text)) == ["city"]


TEMPLATE = (
    "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    "{% if enable_thinking %}<think>{% endif %}{# </think> #}"
)


@pytest.fixture(scope="module")
def thinker() -> Iterator[RunningServer]:
    llm = AsyncLLM(
        demo_model_path(),
        num_threads=1,
        kv_cache_memory_bytes=2**23,
        chat_template=TEMPLATE,
        reasoning_config={"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"},
    )
    with running_server(llm, ["demo"]) as server:
        yield server
    llm.close()


def test_what_a_model_thinks_is_a_block_of_its_own_where_it_is_asked_for(
    thinker: RunningServer,
) -> None:
    client = client_of(thinker)
    body = {
        "model": "demo",
        "messages": HELLO,
        "max_tokens": 200,
        "extra_body": {"output_config": {"format": {"type": "json_schema", "schema": CITY}}},
    }
    thinking = {"type": "enabled", "budget_tokens": 8}
    answer = client.messages.create(**body, thinking=thinking)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert list(json.loads(answer.content[1].text)) == ["city"]
    with client.messages.stream(**body, thinking=thinking) as stream:
        kinds = [event.type for event in stream]
    assert "thinking" in kinds
    plain = client.messages.create(**body, thinking={"type": "disabled"})
    assert [block.type for block in plain.content] == ["text"]


def test_the_key_may_be_in_anthropics_header(demo: AsyncLLM) -> None:
    with running_server(demo, ["demo"], api_key="alpha") as server:
        assert ask(client_of(server, api_key="alpha"), max_tokens=2).usage.output_tokens
        with pytest.raises(anthropic.AuthenticationError) as caught:
            ask(client_of(server, api_key="beta"))
        assert caught.value.body["error"]["type"] == "authentication_error"
        status, answer, _ = server.request("GET", "/v1/models", headers={"x-api-key": "alpha"})
        assert status == 200, answer


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": []}, "messages"),
        ({"tools": [{"type": "web_search_20260209", "name": "w"}]}, "web_search"),
        ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "budget_tokens"),
        ({"thinking": {"type": "often"}}, "thinking.type"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_token": 5}, "did you mean 'max_tokens'"),
        ({"stop_sequences": [""]}, "stop"),
    ],
)
def test_what_is_wrong_is_named_in_anthropics_words(
    server: RunningServer, fields: dict[str, Any], named: str
) -> None:
    body = {"model": "demo", "messages": HELLO, "max_tokens": 5, **fields}
    status, answer = server.post("/v1/messages", **body)
    assert (status, answer["type"]) == (400, "error")
    assert answer["error"]["type"] == "invalid_request_error"
    assert named in answer["error"]["message"]


def test_a_model_that_is_not_here_is_not_found(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        ask(client, model="claude")
    assert caught.value.body["error"]["type"] == "not_found_error"
