"""llama.cpp's own protocol: POST /completion."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from serving import RunningServer, data_of, events

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
    lines = data_of(events(server.open_stream(ROUTE, **body)))
    assert "".join(line["content"] for line in lines) == answer["content"]
    assert [line["stop"] for line in lines] == [*[False] * (len(lines) - 1), True]
    assert lines[-1]["tokens_predicted"] == 12


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
