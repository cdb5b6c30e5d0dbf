"""Seed-OSS: as Qwen3-Coder, between <seed:tool_call> and </seed:tool_call>."""

from llmserve.parsers.keyed_parser import KeyedStyle

STYLE = KeyedStyle(
    name="seed_oss",
    begin="<seed:tool_call>",
    end="</seed:tool_call>",
    function=("<function=", ">", "</function>"),
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    call=("<seed:tool_call>\n", "\n</seed:tool_call>"),
    separator="\n",
    signs=("<seed:tool_call>", "</seed:tool_call>"),
    hints=("<seed:tool_call>",),
)
