"""Requests of tests that have an engine and no `LLM`."""

from __future__ import annotations

from typing import Any

from llmserve import _core


def add_request(
    engine: _core.Engine, prompt_token_ids: list[int], params: _core.SamplingParams, **fields: Any
) -> int:
    """Adds one, and returns its id."""
    (request_id,) = engine.add_requests([_core.EngineRequest(prompt_token_ids, params, **fields)])
    return request_id
