"""Calls that a grammar asks for are found by the parser of the same style."""

from __future__ import annotations

import json
from collections.abc import Mapping

import jsonschema
import numpy as np
import pytest
from call_texts import STYLES, parsed
from llmserve import (
    LLM,
    InvalidArgument,
    SamplingParams,
    StructuredOutputsParams,
    demo_model_path,
)
from llmserve.parsers.registry import (
    TOOL_STYLES,
    tool_style,
)
from llmserve.parsers.tool_grammar import call_grammar, text_with_calls, tool_function

TOOLS: list[object] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 8},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"enum": [{}]}}},
]
# Where arguments are written one by one, a schema lists them.
BY_ONE = [
    "qwen3_coder",
    "glm45",
    "seed_oss",
    "minimax_m2",
    "deepseek_v32",
    "pythonic",
    "llama4_pythonic",
    "olmo3",
    "lfm2",
    "step3",
    "functiongemma",
]
NO_ARGUMENTS = ("now", {"properties": {}, "additionalProperties": False})


def functions_of(style: str) -> list[tuple[str, Mapping[str, object]]]:
    weather, now = (tool_function("tools", tool) for tool in TOOLS)
    return [weather, NO_ARGUMENTS if style in BY_ONE else now]


@pytest.mark.parametrize("is_parallel", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_a_forced_call_is_found_by_its_own_parser(style: str, is_parallel: bool) -> None:
    functions = functions_of(style)
    lark = call_grammar(tool_style(style), functions, is_parallel, lambda token: None)
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(grammar=lark),
        max_tokens=300,
        seed=3,
        n=4,
        temperature=1.0,
    )
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    with LLM(demo_model_path(), num_threads=1, num_gpu_blocks_override=256) as llm:
        (output,) = llm.chat(messages, params, use_tqdm=False, tools=TOOLS)  # type: ignore[arg-type]
    for sample in output.outputs:
        assert sample.finish_reason in ("stop", "length")
        content, calls = parsed(style, sample.text, dict(functions))
        if sample.finish_reason == "length":
            continue
        assert content == ""
        assert len(calls) == 1 or is_parallel
        for name, arguments in calls:
            schema = dict(functions)[name]
            jsonschema.validate(json.loads(arguments), schema)


@pytest.mark.parametrize("is_parallel", [False, True])
@pytest.mark.parametrize("style", [s.name for s in TOOL_STYLES if s.marks_calls])
def test_a_call_within_a_text_is_found_by_its_own_parser(style: str, is_parallel: bool) -> None:
    functions = functions_of(style)
    lark = text_with_calls(tool_style(style), functions, is_parallel, lambda token: None)
    with LLM(demo_model_path(), num_threads=1, num_gpu_blocks_override=256) as llm:
        tokenizer = llm.get_tokenizer()
        said = tokenizer.encode("Well, I ask. " + tool_style(style).begin)
        prompt = tokenizer.encode("What is the weather in Rome?")

        def says(token_ids: np.ndarray, logits: np.ndarray) -> None:
            num_new = len(token_ids) - len(prompt)
            if num_new < len(said):
                logits[said[num_new]] = 1e4

        params = SamplingParams(
            structured_outputs=StructuredOutputsParams(grammar=lark),
            logits_processors=[says],
            max_tokens=200,
            n=4,
            seed=3,
        )
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    for sample in output.outputs:
        content, calls = parsed(style, sample.text, dict(functions))
        assert content.startswith("Well, I ask.")
        if sample.finish_reason == "stop":
            assert calls
        for name, arguments in calls if sample.finish_reason == "stop" else calls[:-1]:
            jsonschema.validate(json.loads(arguments), dict(functions)[name])


def test_texts_of_arguments_end_at_special_tokens() -> None:
    ids = {"</arg_value>": 7, "<tool_call>": 8}.get
    schema = {"properties": {"city": {"type": "string"}}}
    lark = call_grammar(tool_style("glm45"), [("weather", schema)], True, ids)
    assert 'call: <[8]> tool "</tool_call>"' in lark
    assert '<[7]> "\\n"' in lark
    assert "suffix" not in lark


def test_a_grammar_of_calls_names_special_tokens_by_their_id() -> None:
    ids = {"[TOOL_CALLS]": 7}.get
    lark = call_grammar(tool_style("mistral"), [("now", {})], True, ids)
    assert lark.startswith('start: <[7]> "["')
    lark = text_with_calls(tool_style("mistral"), [("now", {})], True, ids)
    assert "before: TEXT <[7]>" in lark


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (3, r"tools\[0\] must be a tool"),
        ({"type": "function"}, r"tools\[0\] must be a tool"),
        ({"function": {"name": ""}}, r"tools\[0\] must be a tool"),
        ({"function": {"name": "a", "parameters": 3}}, r"tools\[0\]: parameters must be"),
    ],
)
def test_what_is_no_tool_is_refused(tool: object, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        tool_function("tools[0]", tool)
