"""A tiny model, for the tests of `LLM` and the command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import checkpoints
import pytest
from llmserve import LLM


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """Read-only: copy it to damage it."""
    return checkpoints.checkpoint("llama")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, num_threads=1, kv_cache_memory_bytes=2**22) as llm:
        yield llm
