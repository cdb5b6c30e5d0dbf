"""Prefill and decode apart, as a server does it: what `role` and the other settings open."""

import secrets

from llmserve.async_llm import AsyncLLM
from llmserve.server.settings import ServerSettings


def open_hand_over(llm: AsyncLLM, settings: ServerSettings) -> None:
    """Nothing without a hand_over_key. Raises InvalidArgument, NotSupported."""
    if not settings.hand_over_key:
        return
    addresses = []
    if settings.role != "decode":  # whose blocks nobody fetches
        # Of this machine first: what others try before they take the network.
        addresses.append(f"shm:llmserve-kv-{secrets.token_hex(8)}")
        addresses.append(f"tcp:{settings.hand_over_address}")
    llm.open_hand_over(settings.hand_over_key, addresses, timeout=settings.hand_over_timeout)
