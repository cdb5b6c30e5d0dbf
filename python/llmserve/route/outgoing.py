"""A request as it goes to a replica: as its client sent it, or in what a router says of it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

_RUN = "/replica/run"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """relay: fields of the server's Relay; None where there is nothing to say."""

    method: str
    path: str  # of the client's request, with its query
    data: bytes
    relay: Mapping[str, Any] | None = None
    is_resumed: bool = False  # it goes on after tokens that have come

    @property
    def bare_path(self) -> str:
        """Without its query."""
        return self.path.partition("?")[0]

    def relayed(self, **fields: Any) -> "Outgoing":
        """With more that is said of it."""
        return replace(self, relay={**(self.relay or {}), **fields})

    def with_ticket(self, ticket: str) -> "Outgoing":
        """Its prompt's blocks are fetched."""
        return self.relayed(hand_over_ticket=ticket)

    def prompt_only(self, ticket: str) -> "Outgoing":
        """Its prompt, whose blocks are kept under the ticket."""
        return self.relayed(hand_over_ticket=ticket, is_prompt_only=True, has_frames=False)

    def sent(self) -> tuple[str, bytes]:
        """The path and the body."""
        if self.relay is None:
            return self.path, self.data
        path = canonical(self.bare_path)
        fields = {**self.relay, "path": path, "body": msgspec.Raw(self.data)}
        return _RUN, msgspec.json.encode(fields)


def canonical(path: str) -> str:
    """Of a route that has several paths, the one that a relay names."""
    if path.startswith("/api/v0/"):
        return path.replace("/api/v0/", "/v1/", 1)
    has_prefix = path.startswith(("/v1/", "/api/")) or path == "/completion"
    return path if has_prefix else "/v1" + path
