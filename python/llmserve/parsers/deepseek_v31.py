"""DeepSeek V3.1: the name and the arguments, with a sign between them."""

# ruff: noqa: RUF001  # its tokens have wide bars
import re

from llmserve.parsers.named_parser import NamedStyle

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"

STYLE = NamedStyle(
    name="deepseek_v31",
    aliases=("deepseekv31",),
    begin=_BEGIN,
    end=_END,
    call_begin=_CALL,
    call_end=_CALL_END,
    head=re.compile(rf"\s*(?P<name>[\w.:-]+)\s*{_SEPARATOR}\s*"),
    written_head=("", _SEPARATOR),
    section=(_BEGIN, _END),
    call=(_CALL, _CALL_END),
    signs=(_BEGIN, _END, _CALL, _CALL_END, _SEPARATOR),
    hints=(_SEPARATOR,),
)
