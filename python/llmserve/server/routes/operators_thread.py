"""The thread of whoever runs the server: what they ask for waits for no request's work."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Result = TypeVar("_Result")

# /metrics and /debug, which take milliseconds. asyncio's own threads may all wait for grammars.
_OPERATORS = ThreadPoolExecutor(1, "llmserve-operators")


async def on_operators_thread(call: Callable[[], _Result]) -> _Result:
    """What `call` returns."""
    return await asyncio.get_running_loop().run_in_executor(_OPERATORS, call)
