"""The notebooks run from top to bottom, show their figures, and are kept without outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import llmserve
import pytest
from notebook_kernel import Kernel

FOLDER = Path(__file__).parents[3] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells(notebook: Path, kind: str) -> list[dict[str, object]]:
    content = json.loads(notebook.read_text(encoding="utf-8"))
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    return [cell for cell in content["cells"] if cell["cell_type"] == kind]


def test_there_are_four() -> None:
    names = [notebook.stem for notebook in NOTEBOOKS]
    assert names == ["01_first_steps", "02_paged_attention", "03_scheduler", "04_speculation"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_its_figures(notebook: Path) -> None:
    pytest.importorskip("matplotlib")
    kernel = Kernel()
    try:
        # The package under test, wherever pytest found it.
        kernel.run(f"import sys; sys.path.insert(0, {str(Path(llmserve.__file__).parents[1])!r})")
        sources = ["".join(cell["source"]) for cell in cells(notebook, "code")]
        for source in sources:
            kernel.run(source)
        shown = sum(len(re.findall(r"^(plt\.show|\w+\.plot)\(\)$", s, re.M)) for s in sources)
        assert kernel.num_figures >= shown > 0
    finally:
        kernel.stop()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_clean(notebook: Path) -> None:
    for cell in cells(notebook, "code"):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
    text = "".join("".join(cell["source"]) for cell in cells(notebook, "markdown"))
    assert re.match(r"# [^\n]*\?\n", text), "a notebook asks one question"
    assert not re.search(r"(?<![\w.])/(home|root|work|opt|tmp|usr)/", notebook.read_text("utf-8"))
