"""What /v1/responses keeps, so that a conversation may go on from it."""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

# The oldest go first, and of what is asked for the one asked for longest ago.
MAX_BYTES = 2**26
# Of one of them: what it takes to read it holds up the loop.
_MAX_SHARE = 1 / 16


class StoredResponse(msgspec.Struct):
    """One response, and what a conversation that goes on from it begins with."""

    document: dict[str, Any]
    input_items: list[dict[str, Any]]  # of this response's own input, as they are listed
    messages: list[dict[str, Any]]  # of the whole conversation, without instructions


@dataclass(slots=True)
class _Kept:
    tenant: str
    data: bytes


class StoredResponses:
    """Of all clients; each sees those of its own key. Kept as JSON, whose bytes are bounded. Used
    on any thread."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def put(self, tenant: str, response: StoredResponse) -> bool:
        """Keeps it under its document's id, unless it alone is too large. Whether it is kept."""
        data = msgspec.json.encode(response)
        if len(data) > self._max_bytes * _MAX_SHARE:
            return False
        response_id = response.document["id"]
        with self._lock:
            if (before := self._kept.pop(response_id, None)) is not None:
                self.num_bytes -= len(before.data)
            self._kept[response_id] = _Kept(tenant, data)
            self.num_bytes += len(data)
            while self.num_bytes > self._max_bytes:
                _, oldest = self._kept.popitem(last=False)
                self.num_bytes -= len(oldest.data)
        return True

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """None for what is not kept, or is another key's."""
        with self._lock:
            kept = self._kept.get(response_id)
            if kept is None or kept.tenant != tenant:
                return None
            self._kept.move_to_end(response_id)
        return msgspec.json.decode(kept.data, type=StoredResponse)

    def delete(self, tenant: str, response_id: str) -> bool:
        """Whether there was one."""
        with self._lock:
            kept = self._kept.get(response_id)
            if kept is None or kept.tenant != tenant:
                return False
            del self._kept[response_id]
            self.num_bytes -= len(kept.data)
        return True
