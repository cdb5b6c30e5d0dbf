"""OpenAI's responses, by the official client."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from llmserve import AsyncLLM, demo_model_path
from llmserve.server import stored_responses
from llmserve.server.stored_responses import StoredResponse, StoredResponses
from serving import DEADLINE_S, RunningServer, running_server

MakeOracle = Callable[..., AsyncLLM]

ROUTE = "/v1/responses"
HELLO = "Tell me a story."
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "name": "weather", "parameters": CITY, "strict": True}]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return server.openai()


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    given = {"model": "demo", "input": HELLO, "max_output_tokens": 24, "extra_body": {"seed": 1}}
    return client.responses.create(**{**given, **fields})


def test_a_response_is_the_chats_answer(client: openai.OpenAI, server: RunningServer) -> None:
    answer = ask(client, instructions="Be brief.", temperature=0)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": HELLO}]
    chat = server.post("/v1/chat/completions", messages=messages, max_tokens=24, temperature=0)[1]
    assert answer.output_text == chat["choices"][0]["message"]["content"]
    assert (answer.object, answer.model, answer.temperature) == ("response", "demo", 0.0)
    assert (answer.id[:5], answer.output[0].id[:4]) == ("resp_", "msg_")
    counts = answer.usage
    assert counts.output_tokens == chat["usage"]["completion_tokens"]
    assert counts.total_tokens == chat["usage"]["total_tokens"]
    is_cut = chat["choices"][0]["finish_reason"] == "length"
    assert answer.status == ("incomplete" if is_cut else "completed")


def test_a_response_that_was_cut_is_incomplete(client: openai.OpenAI) -> None:
    answer = ask(client, max_output_tokens=2)
    assert answer.status == answer.output[0].status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_a_streamed_response_is_the_whole_one_in_events(client: openai.OpenAI) -> None:
    whole = ask(client)
    events = list(ask(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


def test_the_clients_own_stream_gathers_calls(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
    with client.responses.stream(
        model="demo", input=HELLO, max_output_tokens=200, parallel_tool_calls=False, **body
    ) as stream:
        deltas = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    (call,) = final.output
    assert call.type == "function_call"
    assert (final.status, call.name, call.arguments) == ("completed", "weather", "".join(deltas))
    assert list(json.loads(call.arguments)) == ["city"]
    named = ask(
        client,
        max_output_tokens=200,
        tools=TOOLS,
        tool_choice={"type": "function", "name": "weather"},
    )
    assert [item.type for item in named.output] == ["function_call"]


def test_only_tools_that_are_allowed_are_called(client: openai.OpenAI) -> None:
    tools = [*TOOLS, {"type": "function", "name": "now", "parameters": {"type": "object"}}]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"name": "weather"}]}
    answer = ask(client, tools=tools, tool_choice=allowed, max_output_tokens=200)
    assert {item.name for item in answer.output} == {"weather"}


class Trip(pydantic.BaseModel):
    city: Literal["Rome", "Oslo"]
    days: int = pydantic.Field(ge=1, le=9)


def test_the_clients_own_helper_parses_a_record(client: openai.OpenAI) -> None:
    answer = client.responses.parse(
        model="demo", input=HELLO, text_format=Trip, max_output_tokens=200
    )
    assert isinstance(answer.output_parsed, Trip)


def test_a_conversation_goes_on_from_what_was_stored(
    client: openai.OpenAI, server: RunningServer
) -> None:
    first = ask(client, instructions="Be brief.")
    second = ask(client, input="Go on.", previous_response_id=first.id)
    messages = [
        {"role": "user", "content": HELLO},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Go on."},
    ]
    count = server.post("/tokenize", messages=messages)[1]["count"]
    assert second.usage.input_tokens == count, "without the first one's instructions"
    assert second.previous_response_id == first.id
    third = ask(client, input="And on.", previous_response_id=second.id)
    assert third.usage.input_tokens > count


def test_a_stored_response_is_given_and_forgotten(client: openai.OpenAI) -> None:
    answer = ask(client)
    assert client.responses.retrieve(answer.id) == answer
    (item,) = client.responses.input_items.list(answer.id).data
    assert (item.role, item.content[0].text) == ("user", HELLO)
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, previous_response_id=answer.id)
    assert caught.value.code == "previous_response_not_found"
    unkept = ask(client, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)
    *_, last = ask(client, stream=True)
    assert client.responses.retrieve(last.response.id) == last.response


def test_what_was_called_goes_back_into_the_conversation(
    client: openai.OpenAI, server: RunningServer
) -> None:
    called = {"id": "call_1", "type": "function"}
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    given: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Is it warm?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "call_1", **function},
        {"type": "function_call_output", "call_id": "call_1", "output": "18 degrees"},
    ]
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Is it warm?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{**called, "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees"},
    ]
    count = server.post("/tokenize", messages=chat)[1]["count"]
    counted = client.responses.input_tokens.count(model="demo", input=given)
    assert counted.input_tokens == count
    assert ask(client, input=given).usage.input_tokens == count


def test_logprobs_are_told_with_the_text(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = ask(client, **asked)
    part = answer.output[0].content[0]
    assert "".join(row.token for row in part.logprobs).startswith(part.text)
    assert {len(row.top_logprobs) for row in part.logprobs} == {2}


OPEN = "{% for m in messages %}{{ m.content }}\n{% endfor %}<think>\n"


@pytest.fixture(scope="module")
def thinker() -> Iterator[RunningServer]:
    llm = AsyncLLM(
        demo_model_path(),
        num_threads=1,
        kv_cache_memory_bytes=2**23,
        chat_template=OPEN,
        reasoning_config={"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"},
    )
    with running_server(llm, ["demo"], reasoning_parser="think") as server:
        yield server
    llm.close()


def test_what_a_model_thinks_is_an_item_of_its_own(thinker: RunningServer) -> None:
    client = thinker.openai()
    form = {"format": {"type": "json_schema", "name": "city", "schema": CITY}}
    extra = {"thinking_token_budget": 6, "seed": 3}
    answer = ask(client, text=form, max_output_tokens=200, extra_body=extra)
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert list(json.loads(answer.output_text)) == ["city"]
    assert 6 <= answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    events = list(ask(client, text=form, max_output_tokens=200, extra_body=extra, stream=True))
    thought = "".join(e.delta for e in events if e.type == "response.reasoning_text.delta")
    assert thought == answer.output[0].content[0].text
    assert events[-1].response.usage == answer.usage.model_copy(
        update={"input_tokens_details": events[-1].response.usage.input_tokens_details}
    )
    chat = thinker.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": HELLO}],
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": form["format"]},
        **extra,
    )[1]
    message, usage = chat["choices"][0]["message"], chat["usage"]
    assert message["reasoning"] == message["reasoning_content"] == thought
    details = answer.usage.output_tokens_details
    assert usage["completion_tokens_details"] == {"reasoning_tokens": details.reasoning_tokens}


def test_each_key_sees_its_own_responses(demo: AsyncLLM) -> None:
    with running_server(demo, ["demo"], api_key="alpha,beta") as server:
        mine, other = (server.openai(api_key=key) for key in ("alpha", "beta"))
        answer = ask(mine)
        assert mine.responses.retrieve(answer.id).id == answer.id
        for call in (other.responses.retrieve, other.responses.delete):
            with pytest.raises(openai.NotFoundError):
                call(answer.id)
        with pytest.raises(openai.NotFoundError):
            ask(other, previous_response_id=answer.id)


def test_the_oldest_responses_go_where_there_is_no_room() -> None:
    stored = StoredResponses(max_bytes=4000)
    for number in range(60):
        messages = [{"role": "user", "content": "x" * 100}]
        stored.put("", StoredResponse({"id": f"r{number}"}, [], messages))
        stored.get("", "r0")  # which is thereby kept
    assert stored.num_bytes <= 4000
    assert stored.get("", "r0")
    assert stored.get("", "r59")
    assert stored.get("", "r1") is None
    stored.put("", StoredResponse({"id": "huge"}, [], [{"content": "x" * 1000}]))
    assert stored.get("", "huge") is None
    assert stored.get("", "r59"), "for which nothing else had to go"
    assert stored.delete("", "r59")
    assert not stored.delete("", "r59")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"background": True, "store": False}, "background"),
        ({"background": True, "stream": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "some"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"max_output_token": 3}, "max_output_token"),
    ],
)
def test_what_is_wrong_is_named(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    status, answer = server.post(ROUTE, **{"input": "x", "max_output_tokens": 3, **fields})
    assert (status, answer["error"]["param"]) == (400, param), answer


def ended(client: openai.OpenAI, response_id: str) -> Any:
    """Of a response that runs in the background, once it does so no more."""
    until = time.monotonic() + DEADLINE_S
    while (found := client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


def test_a_response_runs_on_in_the_background(client: openai.OpenAI, server: RunningServer) -> None:
    whole = ask(client)
    begun = ask(client, background=True)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    found = ended(client, begun.id)
    assert (found.id, found.output_text) == (begun.id, whole.output_text)
    assert (found.status, found.usage.total_tokens) == (whole.status, whole.usage.total_tokens)
    again = ask(client, input="And then?", previous_response_id=begun.id)
    assert again.usage.input_tokens > found.usage.total_tokens
    assert client.responses.cancel(begun.id).status == found.status  # as it ended
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(whole.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_none")


def test_a_response_in_the_background_is_cancelled(make_oracle: MakeOracle) -> None:
    with running_server(make_oracle(step_us=2000)) as server:
        client = server.openai()
        begun = [ask(client, background=True, max_output_tokens=1500) for _ in range(2)]
        server.wait_until(lambda: len(server.activity.runs) == 2, "both run")
        assert client.responses.retrieve(begun[0].id).status == "in_progress"
        with pytest.raises(openai.BadRequestError, match="has not ended"):
            ask(client, previous_response_id=begun[0].id)
        assert client.responses.cancel(begun[0].id).status == "cancelled"
        client.responses.delete(begun[1].id)
        server.wait_until_idle()
        assert client.responses.retrieve(begun[0].id).status == "cancelled"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(begun[1].id)


def test_a_response_in_the_background_that_fails_says_why(make_oracle: MakeOracle) -> None:
    with running_server(make_oracle(fail_at_step=3, num_failures=1)) as server:
        client = server.openai()
        found = ended(client, ask(client, background=True).id)
        assert found.status == "failed"
        assert found.error.message.startswith("the engine failed at this request")


def test_a_response_that_is_too_large_to_be_kept_is_told_so(
    server: RunningServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(stored_responses, "_MAX_SHARE", 2500 / stored_responses.MAX_BYTES)
        found = ended(client, ask(client, background=True, instructions="x" * 1200).id)
        assert found.status == "failed"
        assert "too large" in found.error.message
