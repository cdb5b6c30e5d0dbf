"""The ticks of the support matrix: each is left by the test that shows it.

docs/support-ticks.json has, for each architecture, "<device>/<weights>". A test that has shown one
calls `tick`; it fails where the file does not have it, and with LLMSERVE_RECORD_TICKS=1 it writes
it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

PATH = Path(__file__).parents[1] / "docs" / "support-ticks.json"


def ticks() -> dict[str, list[str]]:
    return json.loads(PATH.read_text()) if PATH.exists() else {}


def tick(architecture: str, shown: str, *, is_expected: bool = True) -> None:
    """`is_expected` false: of a device that whoever adds an architecture may not have."""
    recorded = ticks()
    if os.environ.get("LLMSERVE_RECORD_TICKS"):
        recorded[architecture] = sorted({*recorded.get(architecture, []), shown})
        PATH.write_text(json.dumps(dict(sorted(recorded.items())), indent=1) + "\n")
        return
    assert not is_expected or shown in recorded.get(architecture, []), (
        "this works and docs/support-ticks.json does not say so: run the test with "
        "LLMSERVE_RECORD_TICKS=1, then make the page again (docs/adding-a-model.md)"
    )
