"""DeepSeek V3.2: <｜DSML｜invoke name="NAME"> and <｜DSML｜parameter name="KEY" string="true">,
between <｜DSML｜function_calls> and its end."""

# ruff: noqa: RUF001, RUF002  # its signs have wide bars
from llmserve.parsers.keyed_parser import KeyedStyle

_BEGIN, _END = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"

STYLE = KeyedStyle(
    name="deepseek_v32",
    aliases=("deepseekv32",),
    begin=_BEGIN,
    end=_END,
    function=('<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>"),
    key=('<｜DSML｜parameter name="', '">'),
    value=("", "</｜DSML｜parameter>"),
    kinds=('" string="true', '" string="false'),
    section=(_BEGIN + "\n", "\n" + _END),
    separator="\n",
    signs=("｜DSML｜",),
    hints=("｜DSML｜",),
)
