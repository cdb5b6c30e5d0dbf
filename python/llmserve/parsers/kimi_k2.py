"""Kimi K2: functions.NAME:0 and the arguments, with a sign between them. The first part is the
call's id: the model finds its calls again by it."""

import re

from llmserve.parsers.named_parser import NamedStyle

_BEGIN, _END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"

STYLE = NamedStyle(
    name="kimi_k2",
    begin=_BEGIN,
    end=_END,
    call_begin=_CALL,
    call_end=_CALL_END,
    head=re.compile(
        rf"\s*(?P<id>(functions\.)?(?P<name>[\w.-]+):\d+)\s*{re.escape(_ARGUMENTS)}\s*"
    ),
    written_head=("functions.", _ARGUMENTS),
    has_number=True,
    section=(_BEGIN, _END),
    call=(_CALL, _CALL_END),
    signs=(_BEGIN, _END, _CALL, _CALL_END, _ARGUMENTS),
    hints=(_ARGUMENTS, "<|im_system|>tool_declare<|im_middle|>"),
)
