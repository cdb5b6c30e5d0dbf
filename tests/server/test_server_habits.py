"""What clients of other servers are used to, and the settings that have a server do as they do."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llmserve import AsyncLLM, InvalidArgument, demo_model_path
from llmserve.cli.serve import _named_models
from llmserve.server.app import ROUTES
from llmserve.server.models import ServedModel
from llmserve.server.peer_routes import PEER_ROUTES
from llmserve.server.routes.chat_parser import served_reasoning_style
from llmserve.server.routes.vllm_fields import FIELDS
from llmserve.server.settings import LENIENCIES, ServerSettings
from serving import RunningServer, data_of, events, running_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: list[Any] = [{"role": "user", "content": "Tell me a story."}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 4}}}
FORM = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_as_many_tokens_as_the_context_holds_may_be_asked_for(
    server: RunningServer, route: str
) -> None:
    body = {"messages": HELLO} if route == CHAT else {"prompt": "Once"}
    stop = {"structured_outputs": {"regex": "[a-c]{300}"}}  # more than the model's own 256
    status, answer = server.post(route, **body, max_tokens=-1, **stop)
    assert status == 200, answer
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_a_stream_counts_its_tokens_at_the_end_or_in_every_chunk(
    server: RunningServer, route: str
) -> None:
    body = {"messages": HELLO} if route == CHAT else {"prompt": "Once"}
    for every in (False, True):
        options = {"include_usage": True, "continuous_usage_stats": every}
        given = {**body, "stream": True, "max_tokens": 6, "stream_options": options}
        *chunks, last = data_of(events(server.open_stream(route, **given)))
        assert last["choices"] == []
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")]
        assert counts == sorted(counts)
        assert counts[:1] == ([int(route == COMPLETIONS)] if every else [])  # none with the role
        assert bool(counts) == every
        assert not every or counts[-1] == last["usage"]["completion_tokens"] == 6


def test_a_chat_without_limits_ends_with_its_context(demo: AsyncLLM) -> None:
    llm = AsyncLLM(
        demo_model_path(),
        num_threads=1,
        kv_cache_memory_bytes=2**23,
        max_model_len=64,
        generation_config="vllm",
    )
    with running_server(llm) as server:
        status, answer = server.post(CHAT, messages=HELLO, ignore_eos=True)
        assert (status, answer["usage"]["total_tokens"]) == (200, 64)
        long = [{"role": "user", "content": "a " * 100}]
        status, answer = server.post(CHAT, messages=long)
        assert answer["error"]["code"] == "context_length_exceeded"
        assert answer["error"]["param"] == "messages"
        start = "This model's maximum context length is 64 tokens. However, "
        assert answer["error"]["message"].startswith(start)
    llm.close()


def test_a_request_id_that_the_client_chose_is_given_back(server: RunningServer) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    for path, sent, status in (
        (COMPLETIONS, body, 200),
        (COMPLETIONS, body, 200),
        (CHAT, {"messages": HELLO, "max_tokens": 1, "stream": True}, 200),
        (COMPLETIONS, {}, 400),
        ("/nope", {}, 404),
    ):
        given = {"X-Request-Id": "my-request.1"}
        got, answer, headers = server.request("POST", path, sent, given)
        assert (got, headers["x-request-id"]) == (status, "my-request.1")
        if status == 200:
            assert "cmpl-my-request.1" in str(answer)
    for odd in ("x" * 129, "\xe4", "a b"):
        headers = server.request("POST", COMPLETIONS, body, {"X-Request-Id": odd})[2]
        assert headers["x-request-id"].startswith("cmpl-")


def test_a_whole_answer_has_the_null_fields_of_vllms(server: RunningServer) -> None:
    chat = server.post(CHAT, messages=HELLO, max_tokens=2)[1]
    names = ("service_tier", "system_fingerprint", "kv_transfer_params")
    for name in (*names, "prompt_logprobs", "prompt_token_ids"):
        assert chat[name] is None
    (choice,) = chat["choices"]
    assert choice["stop_reason"] is choice["token_ids"] is choice["logprobs"] is None
    for name in ("refusal", "annotations", "audio", "function_call", "reasoning"):
        assert choice["message"][name] is None
    assert "tool_calls" not in choice["message"]
    assert chat["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    completion = server.post(COMPLETIONS, prompt="x", max_tokens=2)[1]
    assert all(completion[name] is None for name in names)
    for name in ("token_ids", "prompt_logprobs", "prompt_token_ids"):
        assert completion["choices"][0][name] is None


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_the_first_token_is_an_event_of_its_own(server: RunningServer, route: str) -> None:
    """Also where others come with it: here the whole answer is there before anybody reads."""
    body = {"messages": HELLO} if route == CHAT else {"prompt": "Once"}
    body |= {"max_tokens": 12, "return_token_ids": True, "stream": True, "logprobs": 1}
    if route == CHAT:
        body |= {"logprobs": True}
    for _ in range(5):
        chunks = data_of(events(server.open_stream(route, **body)))
        ids = [c["token_ids"] for d in chunks for c in d["choices"] if "token_ids" in c]
        assert len(next(filter(None, ids))) == 1


def test_objects_are_closed_under_strict_and_by_a_setting(
    demo: AsyncLLM, server: RunningServer
) -> None:
    def keys(server: RunningServer, form: dict[str, Any]) -> set[str]:
        """Of answers that would rather go on with other properties."""
        (quote,) = server.post("/tokenize", prompt='"')[1]["tokens"]
        found: set[str] = set()
        for seed in range(4):
            body = {"messages": HELLO, "seed": seed, "max_tokens": 60, "temperature": 1.5}
            answer = server.post(CHAT, **body, response_format=form, logit_bias={str(quote): 5})[1]
            found |= set(answer["choices"][0]["message"]["content"].split('"')[1::2])
        return found

    strict = {**FORM, "json_schema": {**FORM["json_schema"], "strict": True}}  # type: ignore[dict-item]
    first = {key[:4] for key in keys(server, FORM)}
    assert first - {"city"}, "an open schema lets other names in"
    text = server.post(CHAT, messages=HELLO, max_tokens=60, response_format=strict, seed=1)[1]
    content = text["choices"][0]["message"]["content"]
    assert set(json.loads(content)) <= {"city"}
    with running_server(demo, ["demo"], leniency="closed_schemas") as closed:
        answer = closed.post(CHAT, messages=HELLO, max_tokens=60, response_format=FORM, seed=1)[1]
        assert set(json.loads(answer["choices"][0]["message"]["content"])) <= {"city"}


def test_fields_that_are_not_known_may_be_left_out(demo: AsyncLLM) -> None:
    body = {"prompt": "x", "max_tokens": 1, "stream": True, "best_friend": [1]}
    options = {"include_usage": True, "include_weather": True}
    with running_server(demo, ["demo"], leniency="unknown_fields") as server:
        chunks = data_of(events(server.open_stream(COMPLETIONS, **body, stream_options=options)))
        assert chunks[-1]["usage"]["completion_tokens"] == 1
        assert server.post(COMPLETIONS, prompt="x", max_tokens="x", best_friend=1)[0] == 400
        answer = server.post("/api/generate", model="demo", prompt="x", options={"num_coffee": 1})
        assert answer[0] == 200
    status, answer = 0, {}
    with running_server(demo, ["demo"]) as server:
        status, answer = server.post(COMPLETIONS, **body)
    assert (status, answer["error"]["param"]) == (400, "best_friend")


def test_any_model_name_may_be_taken(demo: AsyncLLM) -> None:
    with running_server(demo, ["demo"], leniency="stream_usage") as server:
        for route, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "x"})):
            with closing(server.open_stream(route, **body, stream=True)) as sock:
                assert data_of(list(events(sock)))[-1]["usage"]["completion_tokens"] > 0
            asked = {"stream": True, "stream_options": {"include_usage": False}}
            with closing(server.open_stream(route, **body, **asked)) as sock:
                assert "usage" not in data_of(list(events(sock)))[-1]
    with running_server(demo, ["demo"], leniency="any_model_name") as server:
        answer = server.post(COMPLETIONS, model="gpt-5", prompt="x", max_tokens=1)[1]
        assert answer["model"] == "demo"


def test_metrics_may_be_open(demo: AsyncLLM) -> None:
    with running_server(demo, api_key="alpha", leniency="open_metrics") as server:
        assert server.request("GET", "/metrics")[0] == 200
        assert server.request("GET", "/load")[0] == 401
    with running_server(demo, api_key="alpha") as server:
        assert server.request("GET", "/metrics")[0] == 401


def test_settings_name_what_they_take() -> None:
    every = ",".join(LENIENCIES)
    assert all(map(ServerSettings(leniency=every).is_lenient, LENIENCIES))
    assert not any(map(ServerSettings().is_lenient, LENIENCIES))
    with pytest.raises(InvalidArgument, match="any_model_name"):
        ServerSettings(leniency="all")
    for given in ("*", '["*"]'):
        assert ServerSettings(allowed_origins=given).origins == ["*"]
    both = '["https://a.example", "https://b.example"]'
    assert len(ServerSettings(allowed_origins=both).origins) == 2
    with pytest.raises(InvalidArgument, match="allowed_origins"):
        ServerSettings(allowed_origins="[5]")


def test_no_reasoning_is_looked_for_where_that_is_set() -> None:
    tokenizer = SimpleNamespace(chat_template_source="<think>{{ thought }}</think>")
    thinker: Any = SimpleNamespace(tokenizer=lambda: tokenizer)
    for name in ("none", "identity"):
        assert served_reasoning_style(thinker, ServerSettings(reasoning_parser=name)) is None
    assert served_reasoning_style(thinker, ServerSettings()) is not None
    with pytest.raises(InvalidArgument, match="reasoning_parser"):
        ServerSettings(reasoning_parser="nobody")


def test_a_call_of_a_tool_that_was_not_offered_is_the_clients_to_judge(demo: AsyncLLM) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {"zone": 1}}\n</tool_call>'
    asked = {"messages": HELLO, "tools": [TOOL], "structured_outputs": {"choice": [call]}}
    with running_server(demo, ["demo"], tool_call_parser="hermes") as server:
        (choice,) = server.post(CHAT, **asked, max_tokens=100)[1]["choices"]
        assert choice["finish_reason"] == "tool_calls"
        (made,) = choice["message"]["tool_calls"]
        assert made["function"] == {"name": "now", "arguments": '{"zone": 1}'}
        (choice,) = server.post(CHAT, **asked, max_tokens=100, tool_choice="none")[1]["choices"]
        assert choice["finish_reason"] == "stop"


def test_where_a_model_lies_is_told_nowhere(tmp_path: Path, demo: AsyncLLM) -> None:
    folder = tmp_path / "tale"
    folder.symlink_to(demo_model_path())
    ((names, path),) = _named_models([str(folder)], [])
    assert names == [demo_model_path().resolve().name]
    assert _named_models(["org/tale"], []) == [(["org/tale"], "org/tale")]
    with running_server(demo, ["other"], others=[]) as server:
        assert server.post(COMPLETIONS, model=path, prompt="x")[0] == 404
    served = ServedModel(names, demo, aliases=[path])
    with running_server(demo, ["first"], others=[served]) as server:
        answer = server.post(COMPLETIONS, model=path, prompt="x", max_tokens=1)[1]
        assert answer["model"] == names[0]
        listed = server.request("GET", "/v1/models")[1]
        error = server.post(COMPLETIONS, model="no", prompt="x")[1]
        text = server.request("GET", "/metrics")[1]
        assert str(tmp_path) not in json.dumps([listed, error, text])


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_fields_of_vllms_bodies_are_taken_or_refused_by_name(
    server: RunningServer, route: str
) -> None:
    body: dict[str, Any] = {"messages": HELLO} if route == CHAT else {"prompt": "Once"}
    body |= {"max_tokens": 2, "request_id": "mine"}
    neutral = {name: field.neutral[0] for name, field in FIELDS.items() if field.neutral}
    status, answer = server.post(route, **body, **neutral, session_id="s", stream_interval=4)
    assert status == 200, answer
    assert answer["id"].endswith("cmpl-mine")
    for name, value in (
        ("truncation_side", "right"),
        ("kv_transfer_params", {"do_remote_decode": True}),
        ("vllm_xargs", {"a": 1}),
        ("mm_processor_kwargs", {"a": 1}),
    ):
        status, answer = server.post(route, **body, **{name: value})
        assert (status, answer["error"]["param"]) == (400, name)
        assert answer["error"]["message"].startswith(name + ": ")


def test_tokens_may_be_called_by_their_ids(server: RunningServer) -> None:
    asked = {"max_tokens": 3, "temperature": 0, "return_token_ids": True}
    asked["return_tokens_as_token_ids"] = True
    (choice,) = server.post(COMPLETIONS, prompt="Once", **asked, logprobs=1)[1]["choices"]
    names = [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    assert all(n in top for n, top in zip(names, choice["logprobs"]["top_logprobs"], strict=True))
    answer = server.post(CHAT, messages=HELLO, **asked, logprobs=True, return_prompt_text=True)[1]
    (choice,) = answer["choices"]
    found = [row["token"] for row in choice["logprobs"]["content"]]
    assert found == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert answer["prompt_text"].startswith("<|im_start|>user")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("guided_choice", ["red", "grey"], "red|grey"),
        ("guided_regex", "[ab]{3}", "[ab]{3}"),
        ("guided_grammar", 'start: "x" "y"', "xy"),
        ("guided_json", {"enum": [5]}, "5"),
    ],
)
def test_older_names_for_what_a_text_must_match_work(
    server: RunningServer, name: str, value: object, text: str
) -> None:
    for route, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "x"})):
        (choice,) = server.post(route, **body, **{name: value})[1]["choices"]
        found = choice["text"] if route == COMPLETIONS else choice["message"]["content"]
        assert re.fullmatch(text, found)
        both = {name: value, "structured_outputs": {"choice": ["a"]}}
        status, answer = server.post(route, **body, **both)
        assert (status, answer["error"]["param"]) == (400, name)


LLAMA = {"n_predict": 3, "cache_prompt": True, "repeat_penalty": 1.1, "mirostat": 0, "id_slot": -1}


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_llama_cpps_names_work_on_openais_routes(server: RunningServer, route: str) -> None:
    body: dict[str, Any] = {"messages": HELLO} if route == CHAT else {"prompt": "Once"}
    body |= {"temperature": 0}
    status, theirs = server.post(route, **body, **LLAMA, verbosity="low", ttl=300)
    assert status == 200, theirs
    _, ours = server.post(route, **body, max_tokens=3, repetition_penalty=1.1)
    assert theirs["choices"] == ours["choices"]
    for name, value, text in (
        ("grammar", 'root ::= "yes" | "no"', "yes|no"),
        ("json_schema", {"enum": [5]}, "5"),
        ("response_format", {"type": "json_object", "schema": {"enum": [7]}}, "7"),
    ):
        (choice,) = server.post(route, **body, **{name: value})[1]["choices"]
        found = choice["text"] if route == COMPLETIONS else choice["message"]["content"]
        assert re.fullmatch(text, found)
    for more, param in (
        ({"mirostat": 2}, "mirostat"),
        ({"samplers": ["top_k"]}, "samplers"),
        ({"grammar": 'root ::= "a"', "guided_choice": ["a"]}, "guided_choice"),
    ):
        status, answer = server.post(route, **body, **more)
        assert (status, answer["error"]["param"]) == (400, param)


def test_llama_cpps_tokenize_works_by_its_names(server: RunningServer) -> None:
    _, ours = server.post("/tokenize", prompt="Once upon", add_special_tokens=False)
    _, theirs = server.post("/v1/tokenize", content="Once upon", with_pieces=True)
    assert [token["id"] for token in theirs["tokens"]] == ours["tokens"]
    assert "".join(token["piece"] for token in theirs["tokens"]) == "Once upon"
    assert server.post("/detokenize", tokens=ours["tokens"])[1]["content"] == "Once upon"
    assert server.post("/tokenize", content="a", prompt="b")[0] == 400


def test_lm_studios_routes_are_openais(server: RunningServer) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "temperature": 0}
    (ours,) = server.post(CHAT, **body)[1]["choices"]
    (theirs,) = server.post("/api/v0/chat/completions", **body)[1]["choices"]
    assert theirs == ours
    status, listed, _ = server.request("GET", "/api/v0/models")
    assert (status, listed["data"][0]["id"]) == (200, "demo")
    assert server.post("/api/v0/completions", prompt=7)[1]["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("POST", "/v1/score", "compare vectors of /v1/embeddings"),
        ("POST", "/rerank", "compare vectors"),
        ("POST", "/v1/load_lora_adapter", "merge them into the checkpoint"),
        ("POST", "/v1/audio/transcriptions", "reads and writes text"),
        ("POST", "/generate", "use /v1/completions"),
        ("GET", "/slots", "/debug/requests"),
        ("GET", "/get_model_info", "/props"),
        ("POST", "/reset_prefix_cache", "skip_reading_prefix_cache"),
        ("GET", "/v1/files/file-1", "engine batches"),
    ],
)
def test_a_route_that_is_another_servers_says_what_to_use(
    server: RunningServer, method: str, path: str, said: str
) -> None:
    status, answer, _ = server.request(method, path, {} if method == "POST" else None)
    assert (status, answer["error"]["code"]) == (404, "not_supported")
    assert answer["error"]["message"].startswith(f"{method} {path} is not supported: ")
    assert said in answer["error"]["message"]
    assert "there is no route" in server.request(method, "/nothing")[1]["error"]["message"]


def test_no_route_of_another_server_is_one_of_ours() -> None:
    ours = {route.path.removeprefix("/v1") for route in ROUTES}
    assert not ours & set(PEER_ROUTES)


def test_a_conversation_becomes_a_vector(server: RunningServer) -> None:
    _, written = server.post("/apply-template", messages=HELLO, add_generation_prompt=False)
    _, text = server.post("/v1/embeddings", input=written["prompt"])
    status, chat = server.post("/v1/embeddings", messages=HELLO)
    assert status == 200, chat
    assert chat["data"] == text["data"]
    for body in ({}, {"input": "x", "messages": HELLO}):
        status, answer = server.post("/v1/embeddings", **body)
        assert (status, answer["error"]["param"]) == (400, "input")
