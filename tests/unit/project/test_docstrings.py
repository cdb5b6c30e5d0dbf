"""The examples in the docstrings run and give what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from importlib.util import find_spec
from pathlib import Path

import llmserve
import pytest
from llmserve import Array, BlockAllocator

MODULES = [
    module.name
    for module in pkgutil.walk_packages(llmserve.__path__, "llmserve.")
    if not module.name.endswith(("_core", "__main__"))
]
if find_spec("ray") is None:  # whose half a gigabyte few have
    MODULES = [name for name in MODULES if not name.startswith("llmserve.ray.")]


@pytest.mark.parametrize("name", ["llmserve", *MODULES])
def test_examples_of_a_module_give_what_they_say(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("thing", [Array, BlockAllocator], ids=lambda thing: thing.__name__)
def test_examples_of_the_extension_give_what_they_say(thing: type) -> None:
    tests = doctest.DocTestFinder().find(thing, thing.__name__, globs={})
    assert sum(len(test.examples) for test in tests) > 0
    runner = doctest.DocTestRunner()
    for test in tests:
        runner.run(test)
    assert runner.failures == 0


def test_examples_of_the_page_on_ops_run() -> None:
    pytest.importorskip("torch")
    page = Path(__file__).parents[3] / "docs" / "ops.md"
    examples = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        exec(example, {})


@pytest.mark.parametrize("name", llmserve.__all__)
def test_everything_public_is_documented(name: str) -> None:
    thing = getattr(llmserve, name)
    assert isinstance(thing, str) or (thing.__doc__ or "").strip()
