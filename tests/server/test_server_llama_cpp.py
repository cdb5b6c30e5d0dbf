"""llama.cpp's own protocol: POST /completion."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from serving import RunningServer, data_of

ROUTE, PROMPT = "/completion", "Once upon a time"
GREEDY = {"temperature": 0.0, "n_predict": 12}


def ask(server: RunningServer, **fields: Any) -> Any:
    status, answer = server.post(ROUTE, **{"prompt": PROMPT, **GREEDY, **fields})
    assert status == 200, answer
    return answer


def test_a_completion_is_openais_whole_and_streamed(server: RunningServer) -> None:
    wanted = server.post("/v1/completions", prompt=PROMPT, temperature=0, max_tokens=12)[1]
    answer = ask(server, return_tokens=True)
    assert answer["content"] == wanted["choices"][0]["text"]
    assert (answer["stop"], answer["stop_type"], answer["model"]) == (True, "limit", "demo")
    assert (answer["tokens_evaluated"], answer["tokens_predicted"]) == (4, 12)
    assert len(answer["tokens"]) == answer["timings"]["predicted_n"] == 12
    assert answer["prompt"] == PROMPT
    body = {"prompt": PROMPT, **GREEDY, "stream": True}
    lines = data_of(server.request("POST", ROUTE, body)[1].splitlines())
    assert "".join(line["content"] for line in lines) == answer["content"]
    assert [line["stop"] for line in lines] == [*[False] * (len(lines) - 1), True]
    assert lines[-1]["tokens_predicted"] == 12
    # The text ends before the last event, and each token is in one of those before it.
    assert (lines[-1]["content"], lines[-1]["tokens"]) == ("", [])
    assert [t for line in lines for t in line["tokens"]] == answer["tokens"]


def test_parts_of_an_answer_are_asked_for_by_their_paths(server: RunningServer) -> None:
    wanted = ["content", "generation_settings/n_predict", "generation_settings/mirostat", "nothing"]
    found = ask(server, response_fields=wanted)
    assert list(found) == wanted[:3]
    assert (found[wanted[1]], found[wanted[2]]) == (12, 0)
    assert "timings" in ask(server, response_fields=[])


def test_prompts_are_objects_or_token_ids_with_texts_among_them(server: RunningServer) -> None:
    text = ask(server)["content"]
    assert ask(server, prompt={"prompt_string": PROMPT})["content"] == text
    token_ids = server.post("/tokenize", content=PROMPT)[1]["tokens"]
    both = ask(server, prompt=[token_ids, {"prompt_string": PROMPT}, PROMPT])
    assert [result["content"] for result in both] == [text] * 3
    half = server.post("/tokenize", content=" upon a time")[1]["tokens"]
    assert ask(server, prompt=["Once", *half])["content"] == text
    image = {"prompt_string": "x", "multimodal_data": ["aGk="]}
    status, answer = server.post(ROUTE, prompt=image)
    assert (status, answer["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("is_dict", [False, True])
def test_a_text_is_banned_by_all_of_its_tokens(server: RunningServer, is_dict: bool) -> None:
    words = re.findall(r" \w+", ask(server)["content"])[:2]
    bias: Any = {word: -100 for word in words} if is_dict else [[word, False] for word in words]
    found = ask(server, logit_bias=bias)["content"]
    assert not any(word + " " in found for word in words)


def test_several_prompts_have_a_result_each(server: RunningServer) -> None:
    results = ask(server, prompt=[PROMPT, [5, 6, 7]], n=2)
    assert [result["index"] for result in results] == [0, 1, 2, 3]
    assert results[0]["content"] == ask(server)["content"]


def test_why_it_ended_is_told(server: RunningServer) -> None:
    text = ask(server)["content"]
    stopped = ask(server, stop=[text[4:7]])
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", text[4:7])
    ended = ask(server, grammar='root ::= "yes" | "no"', n_predict=-1)
    assert (ended["stop_type"], ended["stopping_word"]) == ("eos", "")
    assert ended["content"] in ("yes", "no")


def test_a_text_matches_its_schema_and_bans_tokens(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    found = json.loads(ask(server, json_schema=schema, n_predict=60)["content"])
    assert found["a"] in (1, 2)
    first = ask(server, return_tokens=True)["tokens"][0]
    assert first not in ask(server, return_tokens=True, logit_bias=[[first, False]])["tokens"]


def test_probabilities_are_told(server: RunningServer) -> None:
    answer = ask(server, n_probs=3)
    rows = answer["completion_probabilities"]
    assert len(rows) == 12
    assert all(len(row["top_logprobs"]) == 3 for row in rows)
    assert "".join(row["token"] for row in rows) == answer["content"]
    assert all(row["id"] >= 0 for row in rows)
    assert all(top["id"] >= 0 for row in rows for top in row["top_logprobs"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n_predict": 0}, "n_predict"),
        ({"mirostat": 2}, "mirostat"),
        ({"samplers": ["top_k"]}, "samplers"),
        ({"lora": [{"id": 0}]}, "lora"),
        ({"grammar": "x", "json_schema": {}}, "grammar"),
        ({"n_predicts": 3}, "n_predicts"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_what_is_wrong_is_named(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    status, answer = server.post(ROUTE, **{"prompt": "x", **fields})
    assert (status, answer["error"]["param"]) == (400, param)


def test_what_says_how_llama_cpp_runs_a_model_changes_nothing(server: RunningServer) -> None:
    more = {"id_slot": 3, "n_keep": 2, "cache_prompt": True, "mirostat": 0, "typical_p": 1.0}
    assert ask(server, **more)["content"] == ask(server)["content"]
    assert re.match(r"[0-9.e+-]+$", str(ask(server)["timings"]["predicted_per_second"]))
