"""Hermes, Qwen and many others: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, once a
call."""

from llmserve.parsers.call_parser import JsonStyle

STYLE = JsonStyle(
    name="hermes",
    aliases=("qwen", "qwen25", "qwen2_5", "granite4", "ernie45"),
    begin="<tool_call>",
    ends=("</tool_call>",),
    call=("<tool_call>\n", "\n</tool_call>"),
    separator="\n",
    signs=("<tool_call>", "</tool_call>"),
    hints=("<tool_call>",),
)
