"""What becomes of the KV blocks of a request that is handed over."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlocksOf:
    """A request's blocks."""

    send_to: int | None = None  # the lease under which they are kept for another engine
    receive_from: tuple[int, int] | None = None  # a peer's number, and the lease there
