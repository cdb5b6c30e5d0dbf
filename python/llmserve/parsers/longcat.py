"""LongCat: {"name": ..., "arguments": {...}} between <longcat_tool_call> and
</longcat_tool_call>, once a call."""

from llmserve.parsers.call_parser import JsonStyle

STYLE = JsonStyle(
    name="longcat",
    begin="<longcat_tool_call>",
    ends=("</longcat_tool_call>",),
    call=("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
    separator="\n",
    signs=("<longcat_tool_call>", "</longcat_tool_call>"),
    hints=("<longcat_tool_call>",),
)
