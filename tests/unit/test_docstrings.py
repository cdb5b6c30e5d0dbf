"""The examples in the docstrings run and give what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import llmserve
import pytest
from llmserve import BlockAllocator

MODULES = [
    module.name
    for module in pkgutil.walk_packages(llmserve.__path__, "llmserve.")
    if not module.name.endswith(("_core", "__main__"))
]


@pytest.mark.parametrize("name", ["llmserve", *MODULES])
def test_examples_of_a_module_give_what_they_say(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_examples_of_the_extension_give_what_they_say() -> None:
    tests = doctest.DocTestFinder().find(BlockAllocator, "BlockAllocator", globs={})
    assert sum(len(test.examples) for test in tests) > 0
    runner = doctest.DocTestRunner()
    for test in tests:
        runner.run(test)
    assert runner.failures == 0


@pytest.mark.parametrize("name", llmserve.__all__)
def test_everything_public_is_documented(name: str) -> None:
    thing = getattr(llmserve, name)
    assert isinstance(thing, str) or (thing.__doc__ or "").strip()
