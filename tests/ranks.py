"""Models that are cut among several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llmserve import LLM, _core


def use_ranks(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    """Of every LLM made after it: so many threads that share each layer."""
    real = _core.ConfigRequest

    def request(**settings: object) -> _core.ConfigRequest:
        return real(**{**settings, "tensor_parallel_size": num_ranks})

    monkeypatch.setattr(_core, "ConfigRequest", request)


def engine_config(path: Path, **options: Any) -> _core.EngineConfig:
    """What an LLM with these options gives its engine."""
    defaults = {"max_model_len": 128, "num_gpu_blocks_override": 64, "num_threads": 1}
    with LLM(str(path), dtype="float32", **{**defaults, **options}) as llm:
        return llm._config
