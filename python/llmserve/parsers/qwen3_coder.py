"""Qwen3-Coder: <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>,
each on lines of its own."""

from llmserve.parsers.keyed_parser import KeyedStyle

STYLE = KeyedStyle(
    name="qwen3_coder",
    aliases=("qwen3_xml", "step3p5", "mimo"),
    begin="<tool_call>",
    end="</tool_call>",
    function=("<function=", ">", "</function>"),
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    pads_values=True,
    may_omit_begin=True,
    call=("<tool_call>\n", "\n</tool_call>"),
    separator="\n",
    signs=("<tool_call>", "</tool_call>"),
    hints=(("<function=", "<parameter=", "<tool_call>"),),
)
