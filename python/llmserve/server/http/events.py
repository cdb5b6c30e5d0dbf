"""Server-sent events."""

import msgspec

_encode = msgspec.json.Encoder().encode


def event(data: object) -> bytes:
    """One event."""
    return b"data: " + _encode(data) + b"\n\n"
