"""Chat templates in the styles of published models, written for the tests, and conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

_FOLDER = Path(__file__).parent / "templates"
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in _FOLDER.glob("*.jinja")}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Météo — 天気 <b>'now'</b>",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "A city"},
                    "days": {"type": ["integer", "string"]},
                    "units": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "time", "parameters": {"properties": {}}}},
]

_TEXT = st.text(alphabet="ab é日😀\n\t {}%<>&'\"", max_size=12) | st.sampled_from(
    ["", " padded ", "<think>\nhm\n</think>\n\nyes", "{{ 1 }}", "<|im_end|>", "line\nline\n"]
)
_ARGUMENTS = st.dictionaries(
    st.sampled_from(["city", "days"]),
    st.one_of(_TEXT, st.integers(-5, 5), st.booleans(), st.none(), st.floats(-1, 1, width=16)),
    max_size=2,
)


def _assistant(text: str, calls: list[dict[str, Any]], reasoning: str | None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": f"call{i:05}", "type": "function", "function": {"name": "weather", **call}}
            for i, call in enumerate(calls)
        ]
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return message


_CALLS = st.lists(st.fixed_dictionaries({"arguments": _ARGUMENTS}), max_size=2)
_USER = st.fixed_dictionaries({"role": st.just("user"), "content": _TEXT})
_ASSISTANT = st.builds(_assistant, _TEXT, _CALLS, st.none() | _TEXT)
_PLAIN_ASSISTANT = st.builds(_assistant, _TEXT, st.just([]), st.none())
_SYSTEM = st.fixed_dictionaries({"role": st.just("system"), "content": _TEXT})
_TOOL = st.fixed_dictionaries({"role": st.just("tool"), "content": _TEXT, "name": st.just("x")})


@st.composite
def alternating(draw: st.DrawFn) -> list[dict[str, Any]]:
    """What strict templates take: perhaps a system message, then user and assistant in turn."""
    messages = [draw(_SYSTEM)] if draw(st.booleans()) else []
    for turn in range(draw(st.integers(1, 5))):
        messages.append(draw(_USER if turn % 2 == 0 else _PLAIN_ASSISTANT))
    return messages


CONVERSATIONS = alternating() | st.lists(
    st.one_of(_SYSTEM, _USER, _ASSISTANT, _TOOL), min_size=1, max_size=6
)
