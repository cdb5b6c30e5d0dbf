"""What the docs say is supported is what the registries say."""

from __future__ import annotations

from pathlib import Path

import pytest
from llmserve import _core
from llmserve.support_matrix import support_matrix
from ticks import ticks

PAGE = Path(__file__).parents[3] / "docs" / "support-matrix.md"


def test_the_page_is_what_the_registries_say() -> None:
    said = PAGE.read_text(encoding="utf-8")
    command = "python -m llmserve.support_matrix docs/support-ticks.json > docs/support-matrix.md"
    assert said == support_matrix(ticks()), command


@pytest.mark.parametrize(
    "rows",
    [
        _core.supported_architectures(),
        _core.supported_backends(),
        _core.supported_checkpoint_formats(),
        _core.supported_policies(),
    ],
)
def test_every_row_has_a_name_of_its_own_and_a_summary(rows: list[tuple[str, str]]) -> None:
    assert rows
    assert len({name for name, _ in rows}) == len(rows)
    assert all(summary for _, summary in rows)
