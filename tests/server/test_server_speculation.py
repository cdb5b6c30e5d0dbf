"""What a server tells of tokens that were guessed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from llmserve import AsyncLLM, demo_model_path
from serving import RunningServer, running_server

CONFIG = {"model": "demo", "num_speculative_tokens": 4, "adaptive": False}


@pytest.fixture(scope="module")
def drafted() -> Iterator[RunningServer]:
    llm = AsyncLLM(
        demo_model_path(), num_threads=1, kv_cache_memory_bytes=2**23, speculative_config=CONFIG
    )
    with running_server(llm, ["demo"]) as server:
        yield server
    llm.close()


def test_usage_counts_guesses_as_openai_has_them(
    drafted: RunningServer, server: RunningServer
) -> None:
    """In both routes, and at the end of a stream; a server without guesses says nothing of them."""
    text = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}
    chat = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": 40,
        "temperature": 0,
    }
    client = drafted.openai()
    plain = server.openai().completions.create(**text)
    found = client.completions.create(**text)
    assert found.choices[0].text == plain.choices[0].text
    assert plain.usage.completion_tokens_details is None
    streamed = [
        *client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True})
    ][-1]
    whole = client.chat.completions.create(**chat)
    for answer in (found, streamed, whole):
        details = answer.usage.completion_tokens_details
        assert details.accepted_prediction_tokens > 0
        assert details.rejected_prediction_tokens >= 0
        assert details.accepted_prediction_tokens < answer.usage.completion_tokens
    status, metrics, _ = drafted.request("GET", "/metrics")
    assert status == 200
    assert "llmserve:spec_decode_num_accepted_tokens_total" in metrics
