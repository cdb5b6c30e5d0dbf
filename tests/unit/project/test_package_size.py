"""What an installation brings with it: a wheel of a few MB, and few packages beside it."""

from __future__ import annotations

import importlib.metadata
import re

import pytest
from package_files import CUDA_LIBRARY, packaged_files, wheel_bytes

MAX_WHEEL_BYTES = 20e6
MAX_REQUIRED = 30  # packages, with all that they require in turn


def test_a_wheel_for_the_cpu_stays_small() -> None:
    files = [file for file in packaged_files() if file != CUDA_LIBRARY]
    assert any(file.name.startswith("_core.") for file in files)
    assert 1e6 < wheel_bytes(files) < MAX_WHEEL_BYTES


def required_by(name: str, found: set[str]) -> set[str]:
    """Adds to `found` what is installed of the packages that `name` needs without an extra."""
    if name in found:
        return found
    found.add(name)
    for requirement in importlib.metadata.requires(name) or ():
        text, _, marker = requirement.partition(";")
        match = re.match(r"[\w.-]+", text.strip())
        assert match, requirement
        needed = match[0].lower().replace("_", "-")
        is_installed = any(importlib.metadata.distributions(name=needed))
        if "extra" not in marker and is_installed:  # or its marker is of another system
            required_by(needed, found)
    return found


def test_installing_brings_few_packages_and_no_torch() -> None:
    try:
        required = required_by("llmserve", set())
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("not installed: the package of a source tree")
    assert {"numpy", "tokenizers", "jinja2", "tqdm"} < required
    assert not {"torch", "transformers", "nvidia-cublas"} & required
    assert len(required) < MAX_REQUIRED, sorted(required)
