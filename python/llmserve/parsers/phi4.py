"""Phi-4 mini: functools and a list of {"name": ..., "arguments": {...}}, or one or the list between
<|tool_call|> and <|/tool_call|>."""

from llmserve.parsers.call_parser import JsonStyle

STYLE = JsonStyle(
    name="phi4_mini_json",
    begin="functools",
    other_begins=("<|tool_call|>",),
    ends=("<|/tool_call|>",),
    is_list=True,
    section=("functools[", "]"),
    separator=", ",
    signs=("<|tool_call|>", "<|/tool_call|>"),
    hints=("functools[", "<|/tool|>"),
)
