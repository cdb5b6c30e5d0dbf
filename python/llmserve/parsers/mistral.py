"""Mistral: [TOOL_CALLS] and a list of {"name": ..., "arguments": {...}}; from tokenizer v11 on
[TOOL_CALLS]name[ARGS]{...}, once a call."""

from llmserve.parsers.call_parser import ToolStyle

STYLE = ToolStyle(
    name="mistral",
    begin="[TOOL_CALLS]",
    is_list=True,
    name_end="[ARGS]",
    special_tokens=("[TOOL_CALLS]",),
    hints=("[TOOL_CALLS]",),
)
