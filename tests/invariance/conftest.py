"""LLMSERVE_TEST_RANKS=2 pytest tests/invariance: every model is cut among as many ranks."""

from __future__ import annotations

import os

import pytest
from ranks import use_ranks

NUM_RANKS = int(os.environ.get("LLMSERVE_TEST_RANKS", "1"))


@pytest.fixture(autouse=True, scope="session")
def _ranks() -> None:
    if NUM_RANKS > 1:
        use_ranks(pytest.MonkeyPatch(), NUM_RANKS)
