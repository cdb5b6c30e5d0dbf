"""Server-sent events."""

import msgspec

# After the last event of OpenAI's streams.
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def event(data: object) -> bytes:
    """One event."""
    return b"data: " + _encode(data) + b"\n\n"


def named_event(name: str, data: object) -> bytes:
    """One event of this type."""
    return b"event: %b\n%b" % (name.encode(), event(data))
