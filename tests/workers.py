"""Engines and runners of several workers, each of which computes everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llmserve import LLM, _core, _core_testing


def use_workers(monkeypatch: pytest.MonkeyPatch, num_workers: int) -> None:
    """Of every LLM made after it. What the workers compute is compared, bit by bit."""

    def engine(
        loading: _core.LoadingModel, vocabulary: _core.Vocabulary | None = None
    ) -> _core.Engine:
        return _core_testing.faulty_engine(
            loading.config, vocabulary=vocabulary, num_workers=num_workers
        )

    monkeypatch.setattr(_core, "Engine", engine)


def engine_config(path: Path, **options: Any) -> _core.EngineConfig:
    """What an LLM with these options gives its engine."""
    defaults = {"max_model_len": 128, "num_gpu_blocks_override": 64, "num_threads": 1}
    with LLM(str(path), dtype="float32", **{**defaults, **options}) as llm:
        return llm._config
