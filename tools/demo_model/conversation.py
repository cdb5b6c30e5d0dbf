"""Chats, and how they are written down: the same text that the chat template renders."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

TOOLS_INTRO = "# Tools\n\nYou can call these functions:\n<tools>"
TOOLS_OUTRO = (
    "</tools>\n\nTo call one, reply with its name and arguments:\n"
    '<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>'
)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a chat offers; `parameters` maps each name to its JSON type."""

    name: str
    description: str
    parameters: Mapping[str, str]

    def schema(self) -> dict[str, object]:
        """Return the tool as the OpenAI API spells it."""
        properties = {name: {"type": kind} for name, kind in self.parameters.items()}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {
                    "type": "object",
                    "properties": properties,
                    "required": list(self.parameters),
                },
            },
        }


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. role: system, user, assistant or tool."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """A whole chat."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = field(default=())


def tool_call(name: str, arguments: Mapping[str, object]) -> str:
    """Return what the assistant writes to call a tool (Hermes style)."""
    call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def render(chat: Conversation) -> str:
    """Return the text of `chat`, equal to what `chat_template.jinja` makes of it."""
    messages = list(chat.messages)
    if chat.tools:
        system = ""
        if messages[0].role == "system":
            system = messages.pop(0).content + "\n\n"
        schemas = "".join(
            "\n" + json.dumps(tool.schema(), ensure_ascii=False) for tool in chat.tools
        )
        messages.insert(0, Message("system", f"{system}{TOOLS_INTRO}{schemas}\n{TOOLS_OUTRO}"))
    return "".join(f"{TURN_START}{m.role}\n{m.content}{TURN_END}\n" for m in messages)
