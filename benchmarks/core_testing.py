"""llmserve's testing bindings, which benchmarks of single parts call: `testing`."""

from typing import Any

from llmserve import _core

try:
    from llmserve import _core_testing

    testing: Any = _core_testing
except ImportError as error:
    # by_turns.py also measures builds from before, which have them inside the module.
    testing = getattr(_core, "testing", None)
    if testing is None:
        raise SystemExit(
            "this benchmark needs llmserve's testing bindings: "
            "pip install '.[test]' -C cmake.define.LLMSERVE_TESTING=ON"
        ) from error
