"""Granite 3: <|tool_call|> and a list of {"name": ..., "arguments": {...}}. Granite 4 writes as
Hermes does."""

from llmserve.parsers.call_parser import JsonStyle

STYLE = JsonStyle(
    name="granite",
    aliases=("granite-20b-fc",),
    begin="<|tool_call|>",
    other_begins=("<tool_call>", "<function_call>"),
    is_list=True,
    section=("<|tool_call|>[", "]"),
    separator=", ",
    signs=("<|tool_call|>", "<tool_call>", "<function_call>"),
    hints=("<|tool_call|>", "<function_call>"),
)
