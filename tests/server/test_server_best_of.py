"""best_of and vLLM's use_beam_search: of several continuations the best come out."""

from __future__ import annotations

from typing import Any

import pytest
from llmserve import LLM, BeamSearchParams
from serving import RunningServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: list[Any] = [{"role": "user", "content": "Tell me a story."}]
ASKED = {"prompt": ["Once upon", "The fox"], "max_tokens": 6, "seed": 3}


def test_the_n_best_of_several_come_out_best_first(server: RunningServer) -> None:
    status, every = server.post(COMPLETIONS, **ASKED, n=6, logprobs=0)
    assert status == 200
    status, best = server.post(COMPLETIONS, **ASKED, n=2, best_of=6)
    assert status == 200, best
    assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"]  # all have run
    for prompt_idx in (0, 1):
        of_prompt = every["choices"][6 * prompt_idx :][:6]
        ranked = sorted(of_prompt, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
        got = best["choices"][2 * prompt_idx :][:2]
        assert [choice["text"] for choice in got] == [choice["text"] for choice in ranked[:2]]
        assert [choice["index"] for choice in got] == [2 * prompt_idx, 2 * prompt_idx + 1]
        assert all(choice["logprobs"] is None for choice in got)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"best_of": 4, "stream": True}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 1000}, "best_of"),
    ],
)
def test_what_cannot_be_ranked_is_refused(
    server: RunningServer, more: dict[str, Any], param: str
) -> None:
    status, answer = server.post(COMPLETIONS, **ASKED, **more)
    assert (status, answer["error"]["param"]) == (400, param)


def test_a_beam_search_gives_what_it_gives_offline(server: RunningServer, offline: LLM) -> None:
    found = offline.beam_search(
        ASKED["prompt"], BeamSearchParams(3, max_tokens=6, length_penalty=0.5), use_tqdm=False
    )
    status, answer = server.post(
        COMPLETIONS,
        **{**ASKED, "n": 3, "use_beam_search": True, "length_penalty": 0.5, "logprobs": 1},
    )
    assert status == 200, answer
    expected = [sequence for output in found for sequence in output.sequences]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    for choice, sequence in zip(answer["choices"], expected, strict=True):
        assert sequence.text is not None
        assert sequence.text.endswith(choice["text"])
        assert choice["finish_reason"] == sequence.finish_reason
        logprobs = choice["logprobs"]["token_logprobs"]
        assert sum(logprobs) == pytest.approx(sequence.cum_logprob, abs=1e-4)
    assert answer["usage"]["completion_tokens"] == sum(
        len(choice["logprobs"]["tokens"]) for choice in answer["choices"]
    )


def test_a_conversation_is_answered_by_beams(server: RunningServer) -> None:
    asked = {"messages": HELLO, "n": 2, "max_tokens": 8, "use_beam_search": True}
    status, answer = server.post(CHAT, **asked)
    assert status == 200, answer
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(texts)) == 2
    assert all("user" not in text for text in texts)  # without the prompt
    assert server.post(CHAT, **asked)[1]["choices"] == answer["choices"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"stream": True}, "stream"),
        ({"stop": ["."]}, "stop"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "use_beam_search"),
        ({"n": 100}, "use_beam_search"),
        ({"length_penalty": 0.5, "use_beam_search": False}, "length_penalty"),
    ],
)
def test_what_a_search_knows_nothing_of_is_refused_by_name(
    server: RunningServer, more: dict[str, Any], param: str
) -> None:
    for route, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "x"})):
        status, answer = server.post(
            route, **{**body, "max_tokens": 4, "use_beam_search": True, **more}
        )
        assert (status, answer["error"]["param"]) == (400, param)
    server.wait_until_idle()
