"""gpt-oss over HTTP: prompts by its template, channels as reasoning, calls and content, and the
tokens that end an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import openai
import pytest
import tokenizers
from checkpoints import checkpoint, copy_checkpoint, edit_config
from gguf_files import add_bpe, write_gguf
from llmserve import LLM, AsyncLLM
from serving import running_server

SIGNS = tuple(
    f"<|{name}|>"
    for name in ("start", "channel", "message", "end", "call", "return", "constrain", "endoftext")
)
# As gpt-oss's own: analysis of earlier turns is left out, calls are commentary to a function.
TEMPLATE = """
{{- "<|start|>system<|message|>You answer." }}
{%- if tools %}{{- " Tools: " + (tools | tojson) }}{% endif %}{{- "<|end|>" }}
{%- for message in messages %}
  {%- if message.tool_calls %}
    {%- set call = message.tool_calls[0].function %}
    {{- "<|start|>assistant<|channel|>commentary to=functions." + call.name }}
    {{- " <|constrain|>json<|message|>" + (call.arguments | tojson) + "<|call|>" }}
  {%- elif message.role == "assistant" %}
    {%- if message.thinking and loop.last %}
      {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
    {%- endif %}
    {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
  {%- else %}
    {{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{% endif %}
"""
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
THOUGHT = '<|channel|> "analysis" <|message|> "I ask." <|end|> <|start|> "assistant" '
CALL = (
    '<|channel|> "commentary to=functions.weather " <|constrain|> "json" <|message|> '
    '"{\\"city\\": \\"Rome\\"}" <|call|>'
)
FINAL = '<|channel|> "final" <|message|> "Mild." <|return|>'


def with_signs(folder: Path) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([tokenizers.AddedToken(sign, special=True) for sign in SIGNS])
    return tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt-oss")
    copy_checkpoint(checkpoint("gpt_oss", vocab_size=328, max_position_embeddings=2048), folder)
    tokenizer = with_signs(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|return|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE.strip())
    edit_config(folder, eos_token_id=tokenizer.token_to_id("<|return|>"))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[openai.OpenAI]:
    llm = AsyncLLM(model, num_threads=1, kv_cache_memory_bytes=2**22)
    with running_server(llm, ["demo"]) as server:
        yield server.openai()
    llm.close()


def ask(client: openai.OpenAI, grammar: str = "", **fields: Any) -> Any:
    given = {"model": "demo", "messages": ASK, "max_tokens": 200, "seed": 1, **fields}
    if grammar:
        # The client's grammar is the whole text, whose signs it has to ask for.
        given["extra_body"] = {
            "structured_outputs": {"grammar": f"start: {grammar}"},
            "skip_special_tokens": False,
        }
    return client.chat.completions.create(**given)


def told(client: openai.OpenAI, is_streamed: bool, **fields: Any) -> tuple[str, str, Any, str]:
    """Reasoning, content, [name, arguments] of calls, and why it ended."""
    answer = ask(client, stream=is_streamed, **fields)
    if not is_streamed:
        (choice,) = answer.choices
        message = choice.message
        calls = [[c.function.name, c.function.arguments] for c in message.tool_calls or ()]
        thought = message.model_extra.get("reasoning_content") or ""
        return thought, message.content or "", calls, choice.finish_reason
    reasoning = content = end = ""
    streamed: list[list[str]] = []
    for chunk in answer:
        choice = chunk.choices[0]
        reasoning += choice.delta.model_extra.get("reasoning_content") or ""
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.function.name:
                streamed.append([call.function.name, ""])
            streamed[-1][1] += call.function.arguments or ""
        end = choice.finish_reason or end
    return reasoning, content, streamed, end


@pytest.mark.parametrize("is_streamed", [False, True])
def test_channels_are_told_apart(client: openai.OpenAI, is_streamed: bool) -> None:
    thought = told(client, is_streamed, grammar=THOUGHT + FINAL)
    assert thought == ("I ask.", "Mild.", [], "stop")
    called = told(client, is_streamed, grammar=THOUGHT + CALL, tools=[TOOL])
    assert called == ("I ask.", "", [["weather", '{"city": "Rome"}']], "tool_calls")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_call_that_is_asked_for_is_made(client: openai.OpenAI, is_streamed: bool) -> None:
    _, _, calls, end = told(client, is_streamed, tools=[TOOL], tool_choice="required")
    assert end == "tool_calls"
    assert calls
    for name, arguments in calls:
        assert name == "weather"
        assert json.loads(arguments)["city"] in ("Rome", "Oslo")


def test_the_end_of_a_message_is_not_the_end_of_an_answer(model: Path, tmp_path: Path) -> None:
    """Neither of a checkpoint, whose config names <|return|> alone, nor of a GGUF file."""
    tokenizer = with_signs(model)

    def extra(writer: gguf.GGUFWriter) -> None:
        add_bpe(writer, tokenizer, "gpt-4o")

    path = write_gguf(tmp_path / "model.gguf", model, extra=extra)
    expected = {tokenizer.token_to_id(sign) for sign in ("<|call|>", "<|return|>")}
    for source in (model, path):
        with LLM(source, num_threads=1, max_model_len=256) as llm:
            ends = set(llm._config.scheduler.eos_token_ids)
        assert expected <= ends
        assert tokenizer.token_to_id("<|end|>") not in ends
