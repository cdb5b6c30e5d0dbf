"""A tiny model, for the tests of `LLM` and the command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import checkpoints
import pytest
from llmserve import LLM, _core, _core_testing


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """Read-only: copy it to damage it."""
    return checkpoints.checkpoint("llama")


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines on the token oracle, whose steps take 5 ms: 200 tokens take a second or more."""

    def engine(
        loading: _core.LoadingModel, vocabulary: _core.Vocabulary | None = None
    ) -> _core.Engine:
        options = _core_testing.OracleOptions(vocab_size=len(vocabulary or ()), step_us=5000)
        return _core_testing.oracle_engine(loading.config, options, vocabulary)

    monkeypatch.setattr(_core, "Engine", engine)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, num_threads=1, kv_cache_memory_bytes=2**22) as llm:
        yield llm
