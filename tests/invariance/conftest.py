"""LLMSERVE_TEST_WORKERS=2 pytest tests/invariance: every engine computes on as many workers."""

from __future__ import annotations

import os

import pytest
from workers import use_workers

NUM_WORKERS = int(os.environ.get("LLMSERVE_TEST_WORKERS", "1"))


@pytest.fixture(autouse=True, scope="session")
def _workers() -> None:
    if NUM_WORKERS > 1:
        use_workers(pytest.MonkeyPatch(), NUM_WORKERS)
