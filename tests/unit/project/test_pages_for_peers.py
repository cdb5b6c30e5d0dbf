"""The pages for users of other libraries: every example of llmserve's runs, and there is one beside
each of theirs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
PAGES = {
    "from-llama-cpp.md": "# llama-cpp-python",
    "from-openvino.md": "# OpenVINO GenAI",
    "from-transformers.md": "# transformers",
}


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_each_task_is_there_in_both(page: str) -> None:
    theirs, ours = examples(page)[::2], examples(page)[1::2]
    assert len(theirs) == len(ours) >= 5
    assert all(example.startswith(PAGES[page]) for example in theirs)
    assert all(example.startswith("# llmserve") for example in ours)


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_llmserve_run(page: str) -> None:
    names: dict[str, object] = {}
    for example in examples(page)[1::2]:
        exec(example, names)


@pytest.mark.parametrize("page", PAGES)
def test_theirs_are_python(page: str) -> None:
    for example in examples(page)[::2]:
        compile(example, page, "exec")
