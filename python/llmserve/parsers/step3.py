"""Step 3: each call in signs of its own, its name and arguments as XML, in a section."""

# ruff: noqa: RUF001  # its signs have wide bars
from llmserve.parsers.keyed_parser import KeyedStyle

_BEGIN, _END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>"

STYLE = KeyedStyle(
    name="step3",
    begin=_BEGIN,
    end=_END,
    function=(
        f'{_CALL}function{_SEPARATOR}<steptml:invoke name="',
        '">',
        f"</steptml:invoke>{_CALL_END}",
    ),
    key=('<steptml:parameter name="', '">'),
    value=("", "</steptml:parameter>"),
    section=(_BEGIN, _END),
    signs=(_BEGIN, _END, _CALL, _CALL_END, _SEPARATOR),
    hints=("<steptml:invoke",),
)
