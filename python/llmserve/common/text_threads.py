"""The few threads for work on long texts and large answers, for which an event loop must not stand
still. All together are a few more than there are cores."""

import asyncio
import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

# Texts of more characters, tokens or bytes, which take some 60 ms and more, have threads of their
# own, and so have answers that take as long: what is short never waits for them.
MAX_SHORT_SIZE = 2**16
# Log-probabilities of more tokens, or more vectors, take a few milliseconds to make and to word.
MAX_ROWS_IN_LOOP = 64
# A row of two log-probabilities takes 10 us, one of 21 takes 80.
_CHARACTERS_A_ROW = 32

_NUM_CORES = os.cpu_count() or 1
_NUM_LONG = max(_NUM_CORES // 4, 1)
_LONG_TEXTS = ThreadPoolExecutor(_NUM_LONG, "llmserve-long-texts")
_LARGE_ANSWERS = ThreadPoolExecutor(_NUM_LONG, "llmserve-large-answers")
_SHORT = ThreadPoolExecutor(max(_NUM_CORES - _NUM_LONG, 1), "llmserve-texts")

# glibc's; others keep less.
_malloc_trim: Callable[[int], object] = getattr(ctypes.CDLL(None), "malloc_trim", int)

_Result = TypeVar("_Result")


async def on_text_thread(size: int, call: Callable[[], _Result]) -> _Result:
    """What `call` returns, which takes the time of a text of `size` characters, tokens or bytes. It
    is dropped where the task is cancelled before its turn."""
    if size <= MAX_SHORT_SIZE:
        return await _on(_SHORT, call)
    return await _on(_LONG_TEXTS, partial(_and_trim, call))


async def on_answer_thread(num_rows: int, call: Callable[[], _Result]) -> _Result:
    """As `on_text_thread`, of a call that takes the time of so many rows of an answer."""
    is_large = num_rows * _CHARACTERS_A_ROW > MAX_SHORT_SIZE
    return await _on(_LARGE_ANSWERS if is_large else _SHORT, call)


def _and_trim(call: Callable[[], _Result]) -> _Result:
    """The tokenizers library takes some 200 bytes for a byte of text, in small pieces of which the
    C library would give back nothing by itself."""
    try:
        return call()
    finally:
        _malloc_trim(0)


async def _on(threads: ThreadPoolExecutor, call: Callable[[], _Result]) -> _Result:
    return await asyncio.get_running_loop().run_in_executor(threads, call)
