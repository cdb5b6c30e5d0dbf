"""DeepSeek V3 and R1: the type, the name, and the arguments in a block of Markdown."""

# ruff: noqa: RUF001  # its tokens have wide bars
import re

from llmserve.parsers.named_parser import NamedStyle

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"

STYLE = NamedStyle(
    name="deepseek_v3",
    aliases=("deepseekv3",),
    begin=_BEGIN,
    end=_END,
    call_begin=_CALL,
    call_end=_CALL_END,
    head=re.compile(rf"\s*\w+\s*{_SEPARATOR}\s*(?P<name>[\w.:-]+)\s*(```(json)?)?\s*"),
    tail="```",
    written_head=(f"function{_SEPARATOR}", "\n```json\n"),
    section=(_BEGIN, _END),
    call=(_CALL, f"\n```{_CALL_END}"),
    separator="\n",
    signs=(_BEGIN, _END, _CALL, _CALL_END, _SEPARATOR),
    hints=((_SEPARATOR, "```json"),),
)
