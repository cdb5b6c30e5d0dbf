"""Mistral: [TOOL_CALLS] and a list of {"name": ..., "arguments": {...}}; from tokenizer v11 on
[TOOL_CALLS]name[ARGS]{...}, once a call."""

from llmserve.parsers.call_parser import JsonStyle

STYLE = JsonStyle(
    name="mistral",
    begin="[TOOL_CALLS]",
    is_list=True,
    name_end="[ARGS]",
    section=("[TOOL_CALLS][", "]"),
    separator=", ",
    signs=("[TOOL_CALLS]", "[ARGS]"),
    hints=("[TOOL_CALLS]",),
)
