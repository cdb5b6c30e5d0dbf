"""Ollama's protocol, by its official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from llmserve import LLM, AsyncLLM, demo_model_path
from serving import RunningServer, running_server

ollama = pytest.importorskip("ollama", reason="Ollama's client is not installed")

HELLO: list[Any] = [{"role": "user", "content": "Tell me a story."}]
GREEDY = {"temperature": 0.0, "num_predict": 24}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[Any]:
    client = ollama.Client(host=f"http://127.0.0.1:{server.port}")
    yield client
    client._client.close()


def chat_text(server: RunningServer, messages: list[Any]) -> str:
    answer = server.post("/v1/chat/completions", messages=messages, max_tokens=24, temperature=0)
    return str(answer[1]["choices"][0]["message"]["content"])


def test_a_chat_is_the_chats_answer_whole_and_in_lines(client: Any, server: RunningServer) -> None:
    wanted = chat_text(server, HELLO)
    whole = client.chat(model="demo:latest", messages=HELLO, options=GREEDY)
    assert (whole.message.role, whole.message.content) == ("assistant", wanted)
    assert whole.done
    lines = list(client.chat(model="demo", messages=HELLO, options=GREEDY, stream=True))
    assert "".join(line.message.content for line in lines) == wanted
    assert [line.done for line in lines] == [*[False] * (len(lines) - 1), True]
    for end in (whole, lines[-1]):
        assert end.done_reason == "length" if end.eval_count == 24 else "stop"
        assert end.eval_count > 0
        assert end.prompt_eval_count > 0
        assert end.total_duration >= end.prompt_eval_duration >= 0
    assert lines[-1].eval_count == whole.eval_count


def test_a_stream_is_lines_of_json(server: RunningServer) -> None:
    body = {"model": "demo", "messages": HELLO, "options": GREEDY}  # a stream unless told
    status, text, headers = server.request("POST", "/api/chat", body)
    assert (status, headers["content-type"]) == (200, "application/x-ndjson")
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines[-1]["done"] is True
    assert all(line["message"]["content"] and not line["done"] for line in lines[:-1])


def test_a_generation_answers_a_prompt_or_goes_on_with_it(
    client: Any, server: RunningServer
) -> None:
    answer = client.generate(model="demo", prompt="Hi.", system="Be brief.", options=GREEDY)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
    assert answer.response == chat_text(server, messages)
    prompt = "Once upon a time"
    raw = client.generate(model="demo", prompt=prompt, raw=True, options=GREEDY)
    completion = server.post("/v1/completions", prompt=prompt, max_tokens=24, temperature=0)[1]
    assert raw.response == completion["choices"][0]["text"]
    pieces = client.generate(model="demo", prompt=prompt, raw=True, options=GREEDY, stream=True)
    assert "".join(piece.response for piece in pieces) == raw.response
    assert client.generate(model="demo").done_reason == "load"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_matches_its_format(client: Any, is_streamed: bool) -> None:
    body = {"messages": HELLO, "options": {"seed": 2, "num_predict": 200}}
    for form, keys in ((CITY, ["city"]), ("json", None)):
        answer = client.chat(model="demo", format=form, stream=is_streamed, **body)
        lines = list(answer) if is_streamed else [answer]
        if lines[-1].done_reason == "stop":
            found = json.loads("".join(line.message.content for line in lines))
            assert keys in (None, list(found))


FORCED = "{% for m in messages %}{{ m.content }}\n{% endfor %}<think>\n{# <tool_call> </think> #}"


@pytest.fixture(scope="module")
def thinker() -> Iterator[RunningServer]:
    llm = AsyncLLM(
        demo_model_path(),
        num_threads=1,
        kv_cache_memory_bytes=2**23,
        chat_template=FORCED,
        reasoning_config={"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"},
    )
    with running_server(llm, ["demo"]) as server:
        yield server
    llm.close()


@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_a_model_thinks_and_calls_is_told_apart(
    thinker: RunningServer, is_streamed: bool
) -> None:
    client = ollama.Client(host=f"http://127.0.0.1:{thinker.port}")
    options = {"seed": 1, "num_predict": 300, "temperature": 1.5}
    asked = {"model": "demo", "messages": HELLO, "format": CITY, "options": options}
    for tools in (None, [TOOL]):
        answer = client.chat(**asked, tools=tools, think=True, stream=is_streamed)
        lines = list(answer) if is_streamed else [answer]
        assert any(line.message.thinking for line in lines)
        text = "".join(line.message.content for line in lines)
        calls = [call for line in lines for call in line.message.tool_calls or ()]
        if lines[-1].done_reason == "length":
            continue
        if not calls:
            assert list(json.loads(text)) == ["city"]
        for call in calls:
            assert tools
            assert (call.function.name, list(call.function.arguments)) == ("weather", ["city"])
    client._client.close()


def test_calls_go_back_into_the_conversation(client: Any, server: RunningServer) -> None:
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    messages = [
        {"role": "user", "content": "Is it warm?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        {"role": "tool", "content": "18 degrees", "tool_name": "weather"},
    ]
    answer = client.chat(model="demo", messages=messages, options={"num_predict": 2})
    called = {"type": "function", "function": {**function, "arguments": '{"city": "Rome"}'}}
    chat = [messages[0], {**messages[1], "tool_calls": [called]}, messages[2]]
    assert answer.prompt_eval_count == server.post("/tokenize", messages=chat)[1]["count"]


def test_models_are_told_of(client: Any) -> None:
    names = [model.model for model in client.list().models]
    assert names == ["demo", "alias"]
    (first, _) = client.ps().models
    assert (first.name, first.context_length) == ("demo", 2048)
    assert first.size > 0
    shown = client.show("demo:latest")
    assert shown.modelinfo["llama.context_length"] == 2048
    assert {"completion", "tools"} <= set(shown.capabilities)
    assert "messages" in shown.template
    with pytest.raises(ollama.ResponseError) as caught:
        client.show("other")
    assert caught.value.status_code == 404


def test_somebody_is_there(server: RunningServer) -> None:
    assert server.request("HEAD", "/")[0] == 200
    assert "llmserve" in server.request("GET", "/")[1]


def test_a_body_need_not_say_that_it_is_json_unless_a_page_sends_it(server: RunningServer) -> None:
    body = json.dumps({"model": "demo", "prompt": "Hi", "stream": False, "options": GREEDY})
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert server.request("POST", "/api/generate", body.encode(), form)[0] == 200
    form["Origin"] = "http://example.org"
    status, answer, _ = server.request("POST", "/api/generate", body.encode(), form)
    assert status == 415
    assert "application/json" in answer["error"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"options": {"mirostat": 2}}, "mirostat"),
        ({"options": {"temprature": 1}}, "temprature"),
        ({"options": {"num_predict": "x"}}, "max_tokens"),
        ({"options": {"top_p": 7}}, "top_p"),
        ({"format": "xml"}, "format"),
        ({"format": {"type": 5}}, "response_format"),
        ({"images": ["aGk="]}, "images"),
        ({"context": [1, 2]}, "context"),
        ({"suffix": "x"}, "suffix"),
        ({"prompts": "x"}, "did you mean 'prompt'"),
    ],
)
def test_what_is_wrong_is_named(server: RunningServer, fields: dict[str, Any], named: str) -> None:
    status, answer = server.post("/api/generate", **{"model": "demo", "prompt": "x", **fields})
    assert status == 400
    assert named in answer["error"]


def test_options_that_say_how_ollama_runs_a_model_change_nothing(client: Any) -> None:
    options = {**GREEDY, "num_ctx": 64, "num_gpu": 1, "mirostat": 0, "tfs_z": 1.0}
    answers = [
        client.generate(model="demo", prompt="Hi", options=given) for given in (GREEDY, options)
    ]
    assert answers[0].response == answers[1].response


def test_texts_become_the_vectors_that_other_routes_give(
    client: Any, server: RunningServer, offline: LLM
) -> None:
    texts = ["Once upon a time", "The fox"]
    expected = [list(o.outputs.embedding) for o in offline.embed(texts, use_tqdm=False)]
    found = client.embed(model="demo:latest", input=texts, options={"num_ctx": 64})
    assert [list(vector) for vector in found.embeddings] == [pytest.approx(v) for v in expected]
    assert found.model == "demo"
    assert found.prompt_eval_count == sum(len(offline.get_tokenizer().encode(t)) for t in texts)
    one = client.embed(model="demo", input=texts[0], dimensions=None)
    assert list(one.embeddings[0]) == pytest.approx(expected[0])
    old = client.embeddings(model="demo", prompt=texts[1])
    assert list(old.embedding) == pytest.approx(expected[1])
    assert server.post("/api/embed", model="demo", input=[])[1]["embeddings"] == []


def test_a_text_that_is_too_long_is_cut_unless_that_is_not_wanted(server: RunningServer) -> None:
    long = "a fox " * 3000
    status, answer = server.post("/api/embed", model="demo", input=long)
    assert status == 200
    assert answer["prompt_eval_count"] == server.llm.max_model_len
    status, answer = server.post("/api/embed", model="demo", input=long, truncate=False)
    assert status == 400
    assert "maximum context length" in answer["error"]
    status, answer = server.post("/api/embed", model="demo", input="x", options={"temprature": 1})
    assert (status, "temprature" in answer["error"]) == (400, True)


def test_models_are_pulled_where_they_are_served_and_nothing_is_changed(
    client: Any, server: RunningServer
) -> None:
    assert client.pull("demo").status == "success"
    assert server.post("/api/pull", name="nobody")[0] == 404
    for method, path in (("POST", "create"), ("POST", "copy"), ("DELETE", "delete")):
        status, answer, _ = server.request(method, f"/api/{path}", {"model": "demo"})
        assert status == 400
        assert answer["error"].startswith(f"/api/{path} is not supported: the models of a server")
