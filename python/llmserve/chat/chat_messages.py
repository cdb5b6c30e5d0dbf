"""Conversations as callers give them, brought to plain data that a template may see."""

from collections.abc import Mapping, Sequence
from typing import TypeGuard

from llmserve.common.arguments import describe
from llmserve.errors import InvalidArgument

ChatMessage = Mapping[str, object]
Conversation = Sequence[ChatMessage]

# JSON of tools and documents is nested a dozen deep at most.
_MAX_DEPTH = 64


def parse_conversations(messages: object) -> tuple[list[list[dict[str, object]]], bool]:
    """The conversations of `messages`, and whether it is a list of them and not a single one.

    Messages are copies of plain JSON data; keys without a value are left out. Raises
    InvalidArgument that names the message.
    """
    if not _is_list(messages) or not messages:
        raise InvalidArgument(
            f"messages must be a conversation, a list of dicts with 'role' and 'content', or a "
            f"list of conversations, of at least one message; got {describe(messages)}"
        )
    if not _is_list(messages[0]):
        return [_conversation("messages", messages)], False
    return [_conversation(f"messages[{i}]", item) for i, item in enumerate(messages)], True


def plain_data(label: str, value: object, depth: int = 0) -> object:
    """A copy in which there are only None, bool, int, float, str, list and dict, so that nothing
    that a template can reach has methods of its own."""
    if depth > _MAX_DEPTH:
        raise InvalidArgument(f"{label} is nested deeper than {_MAX_DEPTH}")
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidArgument(f"{label}: keys must be strings, got {describe(key)}")
        return {str(k): plain_data(f"{label}[{k!r}]", v, depth + 1) for k, v in value.items()}
    if _is_list(value):
        return [plain_data(f"{label}[{i}]", item, depth + 1) for i, item in enumerate(value)]
    raise InvalidArgument(
        f"{label} must be text, a number, a list or a dict (JSON data), got {describe(value)}"
    )


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _conversation(label: str, messages: object) -> list[dict[str, object]]:
    if not _is_list(messages) or not messages:
        raise InvalidArgument(f"{label} must be a list of messages, got {describe(messages)}")
    return [_message(f"{label}[{idx}]", item) for idx, item in enumerate(messages)]


def _message(label: str, message: object) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise InvalidArgument(
            f"{label} must be a dict with 'role' and 'content', got {describe(message)}"
        )
    fields = {
        str(key): plain_data(f"{label}[{key!r}]", value)
        for key, value in message.items()
        if value is not None
    }
    if not isinstance(fields.get("role"), str):
        raise InvalidArgument(
            f"{label}['role'] must be a string such as 'user' or 'assistant', "
            f"got {describe(fields.get('role'))}"
        )
    if "content" in fields:
        fields["content"] = _content(f"{label}['content']", fields["content"])
    return _with_reasoning(fields)


def _content(label: str, content: object) -> object:
    """A text, or text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgument(f"{label} must be text or a list of parts, got {describe(content)}")
    return [_part(f"{label}[{idx}]", part) for idx, part in enumerate(content)]


def _part(label: str, part: object) -> dict[str, object]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if kind != "text" and isinstance(kind, str):
        raise InvalidArgument(
            f"{label} has type {kind!r}: llmserve runs the text part of a model alone; only parts "
            f"of type 'text' are supported"
        )
    if not isinstance(part, dict) or not isinstance(part.get("text"), str):
        raise InvalidArgument(
            f"{label} must be {{'type': 'text', 'text': ...}}, got {describe(part)}"
        )
    return part


_REASONING = ("reasoning_content", "thinking", "reasoning")


def _with_reasoning(fields: dict[str, object]) -> dict[str, object]:
    """Templates read an assistant's reasoning as `reasoning_content` or `thinking`, servers also
    call it `reasoning`; as transformers does, it is there under each of the first two."""
    for name in _REASONING:
        if (reasoning := fields.get(name)) is not None:
            return {"thinking": reasoning, **fields, "reasoning_content": reasoning}
    return fields
