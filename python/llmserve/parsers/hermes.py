"""Hermes, Qwen and many others: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, once a
call."""

from llmserve.parsers.call_parser import ToolStyle

STYLE = ToolStyle(name="hermes", begin="<tool_call>", end="</tool_call>", hints=("<tool_call>",))
