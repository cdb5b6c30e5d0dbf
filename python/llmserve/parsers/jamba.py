"""Jamba, Hunyuan and MiniMax-M1: a list of {"name": ..., "arguments": {...}}, or a line each,
between <tool_calls> and </tool_calls>."""

from llmserve.parsers.call_parser import JsonStyle

STYLE = JsonStyle(
    name="jamba",
    aliases=("hunyuan_a13b", "hunyuan", "minimax"),
    may_be_lines=True,
    begin="<tool_calls>",
    ends=("</tool_calls>",),
    is_list=True,
    section=("<tool_calls>[", "]</tool_calls>"),
    separator=", ",
    signs=("<tool_calls>", "</tool_calls>"),
    hints=("<tool_calls>",),
)
