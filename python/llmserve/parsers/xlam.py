"""xLAM: a list of {"name": ..., "arguments": {...}}, by itself or between signs of others: a fence
of Markdown among them."""

from llmserve.parsers.call_parser import JsonStyle

STYLE = JsonStyle(
    name="xlam",
    begin="[TOOL_CALLS]",
    other_begins=("<tool_call>", "```json\n", "```\n"),
    ends=("</tool_call>", "```"),
    is_list=True,
    is_bare=True,
    section=("[", "]"),
    separator=", ",
)
