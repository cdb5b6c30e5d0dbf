"""The contract, by the official client."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any, Literal

import openai
import pydantic
import pytest
from llmserve import LLM, AsyncLLM, RequestOutput, SamplingParams
from llmserve.outputs import Logprob
from llmserve.server.routes.logprobs import CompletionLogprobs
from serving import RunningServer, events, running_server

CHAT = "/v1/chat/completions"
PROMPT = "Once upon a time"
MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story."}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return server.openai()


def text_of(offline: LLM, prompt: object, params: SamplingParams = GREEDY) -> list[str]:
    outputs = offline.generate(prompt, params, use_tqdm=False)  # type: ignore[arg-type]
    return [c.text for output in outputs for c in output.outputs]


def test_models_are_listed_under_all_their_names(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo", "alias"]
    assert client.models.retrieve("alias") == list(client.models.list())[1]
    assert client.models.retrieve("alias").max_model_len == 2048  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")


def test_a_completion_is_what_the_offline_engine_gives(client: openai.OpenAI, offline: LLM) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=12, temperature=0)
    assert [choice.text for choice in answer.choices] == text_of(offline, PROMPT)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens) == (12, 4)


def test_a_streamed_completion_is_the_whole_one_in_pieces(
    client: openai.OpenAI, offline: LLM
) -> None:
    chunks = list(
        client.completions.create(
            model="demo",
            prompt=PROMPT,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True, "include_obfuscation": False},
        )
    )
    pieces = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(pieces) == text_of(offline, PROMPT)[0]
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_several_prompts_and_samples_are_numbered_prompt_by_prompt(
    client: openai.OpenAI, offline: LLM
) -> None:
    prompts = [PROMPT, "The fox", [5, 6, 7]]
    defaults = offline.get_default_sampling_params()  # as the server's
    params = dataclasses.replace(defaults, n=2, seed=4, max_tokens=6, temperature=1.0)
    wanted = [text_of(offline, [p], params) for p in prompts]
    texts = ["The fox", PROMPT]
    answer = client.completions.create(
        model="demo", prompt=texts, n=2, seed=4, max_tokens=6, temperature=1.0
    )
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert [c.text for c in answer.choices] == [*wanted[1], *wanted[0]]
    by_index = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(
        model="demo", prompt=texts, n=2, seed=4, max_tokens=6, temperature=1.0, stream=True
    ):
        for choice in chunk.choices:
            by_index[choice.index] += choice.text
    assert list(by_index.values()) == [c.text for c in answer.choices]
    ids = client.completions.create(
        model="demo", prompt=[[5, 6, 7]], n=2, seed=4, max_tokens=6, temperature=1.0
    )
    assert [c.text for c in ids.choices] == wanted[2]


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI, offline: LLM) -> None:
    answer = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=0, echo=True, logprobs=2
    )
    (choice,) = answer.choices
    assert choice.text == PROMPT
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    (output,) = offline.generate(PROMPT, params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    assert choice.logprobs is not None
    wanted = [next(iter(row.values())).logprob for row in output.prompt_logprobs if row]
    assert choice.logprobs.token_logprobs == [None, *wanted]
    assert "".join(choice.logprobs.tokens or []) == PROMPT
    assert choice.logprobs.text_offset == [0, 4, 9, 11]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


UNCOMMON = "größe 日本語 😀 x"  # the demo's tokens for most of it are bytes


def test_an_offset_counts_characters_of_the_text(server: RunningServer, offline: LLM) -> None:
    asked = {"max_tokens": 9, "echo": True, "logprobs": 0, "structured_outputs": {"regex": "é😀?a"}}
    for prompt in (UNCOMMON, offline.get_tokenizer().encode(UNCOMMON), UNCOMMON + "é"):
        (choice,) = server.post("/v1/completions", prompt=prompt, **asked)[1]["choices"]
        text, words = choice["text"], choice["logprobs"]
        parts = {place: b"" for place in words["text_offset"]}
        for token, place in zip(words["tokens"], words["text_offset"], strict=True):
            if token.startswith("bytes:"):
                parts[place] += bytes.fromhex(token[6:].replace("\\x", ""))
            else:
                parts[place] += token.encode()
        if choice["finish_reason"] == "stop":  # by a token that is not in the text
            assert parts.popitem() == (len(text), b"<|endoftext|>")
        places = [*parts, len(text)]
        shown = [text[a:b].encode() for a, b in itertools.pairwise(places)]
        assert shown == list(parts.values())
    rows = CompletionLogprobs(0, (), offline.get_tokenizer())
    byte = {n: offline.get_tokenizer().encode("é")[n] for n in (0, 1)}
    ids = [byte[0], byte[0], byte[1], *offline.get_tokenizer().encode("a"), byte[1], 0]
    found = rows.rows([{token_id: Logprob(-1.0, 1, "\ufffd")} for token_id in ids])
    assert found["text_offset"] == [0, 1, 1, 2, 3, 4], "of \ufffdéa\ufffd and a special token"


def test_tokens_that_are_bytes_have_names_of_their_own(server: RunningServer) -> None:
    named = server.post("/tokenize", prompt="😀é日")[1]["tokens"]
    (choice,) = server.post(
        "/v1/completions",
        prompt="x",
        max_tokens=4,
        structured_outputs={"regex": "😀"},
        logprobs=0,
        logprob_token_ids=named,
    )[1]["choices"]
    words = choice["logprobs"]
    assert words["tokens"] == [f"bytes:\\x{byte:02x}" for byte in "😀".encode()]
    for token, logprob, top in zip(
        words["tokens"], words["token_logprobs"], words["top_logprobs"], strict=True
    ):
        assert top[token] == logprob
        assert len(top) == len(set(named))


def test_the_sampled_token_keeps_its_value_beside_others_of_its_text() -> None:
    row = {7: Logprob(-2.0, 2, "a"), 5: Logprob(-1.0, 1, "a"), 6: Logprob(-3.0, 3, "a")}
    assert CompletionLogprobs(3, ()).rows([row])["top_logprobs"] == [{"a": -2.0}]


def test_an_echo_with_logprobs_is_streamed_too(server: RunningServer) -> None:
    body = {**PLAIN, "prompt": [PROMPT, UNCOMMON], "echo": True, "logprobs": 2, "n": 2}
    for fields in ({}, {"max_tokens": 0}):
        whole = server.post("/v1/completions", **{**body, **fields})[1]
        lines = events(server.open_stream("/v1/completions", **{**body, **fields}, stream=True))
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        found = assembled(chunks)
        assert len(found) == len(whole["choices"]) == 4
        for choice in whole["choices"]:
            own = found[choice["index"]]
            assert own["text"] == choice["text"]
            assert own["rows"] == rows_of(choice["logprobs"])


@pytest.mark.parametrize("is_gathered", [False, True])
@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("route", ["/v1/completions", CHAT])
def test_what_came_with_an_error_is_streamed_before_it(
    demo: AsyncLLM, route: str, is_plain: bool, is_gathered: bool
) -> None:
    """After the last b nothing may be drawn."""
    letters = [demo.get_tokenizer().encode(letter)[0] for letter in "ab"]
    body: dict[str, Any] = {
        "max_tokens": 60,
        "structured_outputs": {"regex": "(ab){15}[c-f]"},
        "allowed_token_ids": letters,
        "stream": True,
    }
    body |= {"messages": MESSAGES} if route == CHAT else {"prompt": PROMPT}
    if not is_plain:
        body |= {"logprobs": True if route == CHAT else 0, "return_token_ids": True}
    flush = {"stream_flush_tokens": 100, "stream_flush_interval": 0.0} if is_gathered else {}
    with running_server(demo, ["demo"], **flush) as server:
        lines = [line[6:] for line in events(server.open_stream(route, **body)) if line]
    *chunks, error, end = lines
    assert (json.loads(error)["error"]["code"], end) == ("invalid_value", "[DONE]")
    found = assembled(list(map(json.loads, chunks)))[0]
    assert found["text"] == "ab" * 15
    assert found["token_ids"] == ([] if is_plain else letters * 15)
    assert len(found["rows"]) == (0 if is_plain else 30)
    assert "finish_reason" not in found


@pytest.mark.parametrize("seed", [-2, -(2**63)])
def test_a_negative_seed_is_one_modulo_2_to_the_64(
    server: RunningServer, offline: LLM, seed: int
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 1.0}
    texts = {
        server.post("/v1/completions", **body, seed=number)[1]["choices"][0]["text"]
        for number in (seed, seed + 2**64)
    }
    params = dataclasses.replace(
        offline.get_default_sampling_params(), seed=seed, max_tokens=8, temperature=1.0
    )
    assert texts == {*text_of(offline, PROMPT, params)}
    status, answer = server.post("/v1/completions", **body, seed=-(2**63) - 1)
    assert (status, answer["error"]["param"]) == (400, "seed")


def test_an_echo_without_logprobs_leaves_those_of_the_prompt(server: RunningServer) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 1}
    plain, echoed = (
        server.post("/v1/completions", **asked, echo=echo)[1]["choices"][0]["prompt_logprobs"]
        for echo in (False, True)
    )
    assert echoed == plain is not None


def test_tokens_that_are_named_have_their_logprobs_too(server: RunningServer, offline: LLM) -> None:
    named = [5, 6]
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=1, logprob_token_ids=named)
    texts = [offline.get_tokenizer().token_text(token_id) for token_id in named]
    body = {"max_tokens": 3, "temperature": 0, "logprob_token_ids": named}

    def wanted(output: RequestOutput) -> list[dict[str, float]]:
        rows = output.outputs[0].logprobs
        assert rows is not None
        return [{str(t.decoded_token): t.logprob for t in row.values()} for row in rows]

    (output,) = offline.generate(PROMPT, params, use_tqdm=False)
    answer = server.post("/v1/completions", prompt=PROMPT, logprobs=1, **body)[1]
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == wanted(output)
    (output,) = offline.chat(MESSAGES, params, use_tqdm=False)
    for num_top in (0, 1):
        fields = {"logprobs": True, "top_logprobs": num_top, **body}
        answer = server.post("/v1/chat/completions", messages=MESSAGES, **fields)[1]
        rows = [
            {top["token"]: top["logprob"] for top in entry["top_logprobs"]}
            for entry in answer["choices"][0]["logprobs"]["content"]
        ]
        if num_top:
            assert rows == wanted(output)
        assert all(row.keys() >= set(texts) for row in rows)
        assert {len(row) for row in rows} == {num_top + 2}


def test_minus_one_gives_the_logprobs_of_all_tokens() -> None:
    row = {token_id: Logprob(-token_id, 4 - token_id, f"<{token_id}>") for token_id in (2, 3, 1)}
    (top,) = CompletionLogprobs(-1, ()).rows([row])["top_logprobs"]
    assert top == {"<3>": -3, "<2>": -2, "<1>": -1}


def test_a_request_may_leave_the_prefix_cache_unread(server: RunningServer) -> None:
    def num_cached(**fields: Any) -> int:
        answer = server.post("/v1/completions", prompt=[9] * 64, max_tokens=1, **fields)[1]
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    num_cached()
    assert num_cached() > 0
    assert num_cached(skip_reading_prefix_cache=True) == 0


@pytest.mark.parametrize("is_streamed", [False, True])
def test_chat_gives_what_the_offline_engine_gives(
    client: openai.OpenAI, offline: LLM, is_streamed: bool
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2)
    (output,) = offline.chat(MESSAGES, params, use_tqdm=False)
    wanted = output.outputs[0]
    arguments: dict[str, Any] = {
        "model": "demo",
        "messages": MESSAGES,
        "max_completion_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    if is_streamed:
        chunks = list(client.chat.completions.create(stream=True, **arguments))
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        content = [
            e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content
        ]
        reason = chunks[-1].choices[0].finish_reason
    else:
        (choice,) = client.chat.completions.create(**arguments).choices
        text, content = choice.message.content, choice.logprobs.content
        reason = choice.finish_reason
    assert (text, reason) == (wanted.text, wanted.finish_reason)
    assert wanted.logprobs is not None
    rows = [list(row.values()) for row in wanted.logprobs]
    assert [entry.logprob for entry in content] == [row[0].logprob for row in rows]
    assert [len(entry.top_logprobs) for entry in content] == [2] * len(content)
    assert b"".join(bytes(e.bytes) for e in content).decode().startswith(wanted.text)


def test_a_message_can_be_continued(client: openai.OpenAI, offline: LLM) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "There was"}]
    (output,) = offline.chat(
        messages, GREEDY, False, add_generation_prompt=False, continue_final_message=True
    )
    answer = client.chat.completions.create(
        model="demo",
        messages=messages,
        max_tokens=12,
        temperature=0,
        extra_body={"continue_final_message": True, "echo": True},
    )
    assert answer.choices[0].message.content == "There was" + output.outputs[0].text
    parts = [{"type": "text", "text": "There"}, {"type": "text", "text": "was"}]
    answer = client.chat.completions.create(
        model="demo",
        messages=[*MESSAGES, {"role": "assistant", "content": parts}],
        max_tokens=1,
        extra_body={"continue_final_message": True, "echo": True},
    )
    assert (answer.choices[0].message.content or "").startswith("There\nwas")


PLAIN: dict[str, Any] = {"max_tokens": 20, "seed": 3, "temperature": 1.0}


def assembled(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """What a stream said of each of its choices."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            own = choices.setdefault(choice["index"], {"text": "", "rows": [], "token_ids": []})
            assert "finish_reason" not in own, "nothing comes after the end"
            own["text"] += (
                choice["text"] if "text" in choice else choice["delta"].get("content", "")
            )
            own["rows"] += rows_of(choice["logprobs"])
            own["token_ids"] += choice.get("token_ids", [])
            if choice["finish_reason"] is not None:
                own |= {name: choice[name] for name in ("finish_reason", "stop_reason")}
    return choices


def of_prompts(documents: list[dict[str, Any]]) -> list[str]:
    """What documents and their choices say of prompts, in any order."""
    names = ("prompt_token_ids", "prompt_logprobs")
    places = [place for document in documents for place in (document, *document["choices"])]
    return sorted(json.dumps([n, place[n]]) for n in names for place in places if place.get(n))


def rows_of(logprobs: dict[str, Any] | None) -> list[Any]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    return list(zip(*(logprobs[name] for name in sorted(logprobs)), strict=True))


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3},
        {"n": 2, "stop": ["e", "the girl"]},
        {"stop": [" "], "include_stop_str_in_output": True},
        {"logprobs": 2, "n": 2, "stop": ["a"]},
        {"logprobs": 0, "return_token_ids": True},
        {"n": 2, "return_token_ids": True, "min_tokens": 5},
        {"structured_outputs": {"regex": "[ab]{3}é?[ab]{9}"}, "logprobs": 1},
        {"max_tokens": 1},
        {"n": 2, "return_token_ids": True, "prompt_logprobs": 1},
    ],
    ids=str,
)
def test_a_stream_says_what_the_whole_answer_says(
    server: RunningServer, route: str, fields: dict[str, Any]
) -> None:
    body = {**PLAIN, **fields}
    if route == "/v1/completions":
        body["prompt"] = ["Once upon a time", "The fox"]
    else:
        body["messages"] = MESSAGES
        if "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    status, whole = server.post(route, **body)
    assert status == 200, whole
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    lines = list(events(server.open_stream(route, **body)))
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert chunks[-1]["choices"] == []
    assert not any("usage" in chunk for chunk in chunks[:-1])
    cached = "prompt_tokens_details"  # the second of them finds the first
    assert {**chunks[-1]["usage"], cached: 0} == {**whole["usage"], cached: 0}
    assert of_prompts(chunks) == of_prompts([whole])
    assert bool(of_prompts(chunks[:1])) == bool(of_prompts(chunks))
    found = assembled(chunks)
    assert len(found) == len(whole["choices"])
    for choice in whole["choices"]:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert found[choice["index"]] == {
            "text": text,
            "rows": rows_of(choice["logprobs"]),
            "token_ids": choice["token_ids"] or [],
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
        }


class Trip(pydantic.BaseModel):
    city: Literal["Rome", "Oslo"]
    days: int = pydantic.Field(ge=1, le=9)


def test_the_clients_own_helpers_parse_an_answer(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {
        "model": "demo",
        "messages": MESSAGES,
        "max_tokens": 200,
        "seed": 1,
    }
    answer = client.chat.completions.parse(response_format=Trip, **arguments)
    assert isinstance(answer.choices[0].message.parsed, Trip)
    with client.chat.completions.stream(response_format=Trip, **arguments) as stream:
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert parsed == answer.choices[0].message.parsed
    tool = openai.pydantic_function_tool(Trip)
    answer = client.chat.completions.parse(tools=[tool], tool_choice="required", **arguments)
    (call, *_) = answer.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Trip)


def test_a_conversation_with_a_tools_answer_goes_on(client: openai.OpenAI) -> None:
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "The weather in Rome?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def test_a_stop_string_ends_the_text_and_is_named(client: openai.OpenAI, offline: LLM) -> None:
    whole = text_of(offline, PROMPT)[0]
    stop = whole.split()[2]
    answer = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=12, temperature=0, stop=[stop]
    )
    (choice,) = answer.choices
    assert choice.text == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.model_extra is not None
    assert choice.model_extra["stop_reason"] == stop


def test_cached_tokens_are_reported_and_a_salt_keeps_them_apart(client: openai.OpenAI) -> None:
    prompt = [[7 + i % 50 for i in range(100)]]

    def cached(**extra: object) -> int:
        answer = client.completions.create(
            model="demo", prompt=prompt, max_tokens=1, extra_body=extra
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert [cached(), cached(), cached(cache_salt="a"), cached(cache_salt="a")] == [0, 96, 0, 96]


def test_the_fields_that_vllm_adds_reach_the_sampler(client: openai.OpenAI, offline: LLM) -> None:
    params = dataclasses.replace(
        offline.get_default_sampling_params(),
        seed=3, top_k=5, min_p=0.1, repetition_penalty=1.3, min_tokens=4, max_tokens=8,
        ignore_eos=True, stop_token_ids=[11], bad_words=["girl"],
    )  # fmt: skip
    extra = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.3, "min_tokens": 4, "ignore_eos": True,
        "stop_token_ids": [11], "bad_words": ["girl"], "return_token_ids": True,
    }  # fmt: skip
    answer = client.completions.create(
        model="demo", prompt=PROMPT, seed=3, max_tokens=8, extra_body=extra
    )
    (output,) = offline.generate(PROMPT, params, use_tqdm=False)
    assert answer.choices[0].model_extra is not None
    assert answer.choices[0].model_extra["token_ids"] == output.outputs[0].token_ids
    assert answer.choices[0].model_extra["prompt_token_ids"] == output.prompt_token_ids


def test_an_effort_that_a_template_does_not_know_changes_nothing(server: RunningServer) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    answers = [server.post(CHAT, **body, reasoning_effort=effort)[1] for effort in (None, "high")]
    assert answers[0]["prompt_token_ids"] == answers[1]["prompt_token_ids"]
