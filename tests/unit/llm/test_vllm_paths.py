"""What scripts import from vLLM's modules is there by the same path."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import llmserve
import pytest
from llmserve import NotSupported
from llmserve.common.refused_names import REFUSED_NAMES
from llmserve.vllm_paths import PATHS, REFUSED


@pytest.mark.parametrize("path", PATHS)
def test_a_module_has_its_names(path: str) -> None:
    module = importlib.import_module(f"llmserve.{path}")
    assert dir(module) == sorted(PATHS[path])
    for name in PATHS[path]:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match=f"llmserve.{path} has no 'nonsense'; it has "):
        module.nonsense  # noqa: B018


# vllm.__all__, but for the hints of its linter.
EXPORTS = {
    *("__version__", "LLM", "ModelRegistry", "PromptType", "TextPrompt", "TokensPrompt"),
    *("SamplingParams", "RequestOutput", "CompletionOutput", "PoolingOutput", "PoolingParams"),
    *("PoolingRequestOutput", "EmbeddingOutput", "EmbeddingRequestOutput", "LLMEngine"),
    *("ClassificationOutput", "ClassificationRequestOutput", "ScoringOutput", "EngineArgs"),
    *("ScoringRequestOutput", "AsyncLLMEngine", "AsyncEngineArgs", "initialize_ray_cluster"),
}


def test_what_vllm_exports_is_here_or_says_why_not() -> None:
    assert {name for name in EXPORTS if not hasattr(llmserve, name)} == set()
    assert llmserve.PromptType is importlib.import_module("llmserve.inputs").PromptType


def test_what_is_the_same_thing_is_one_thing() -> None:
    from llmserve.engine.arg_utils import EngineArgs
    from llmserve.entrypoints.llm import LLM
    from llmserve.inputs import TokensPrompt
    from llmserve.v1.engine.async_llm import AsyncLLM

    assert (LLM, AsyncLLM) == (llmserve.LLM, llmserve.AsyncLLM)
    assert (TokensPrompt, EngineArgs) == (llmserve.TokensPrompt, llmserve.EngineArgs)


def test_a_module_is_an_attribute_as_well() -> None:
    script = "import llmserve; assert llmserve.engine.arg_utils.EngineArgs is llmserve.EngineArgs"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_module_that_is_nowhere_is_told_as_python_does() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'llmserve\.nowhere'"):
        importlib.import_module("llmserve.nowhere")


@pytest.mark.parametrize("path", REFUSED)
def test_a_module_whose_feature_is_not_here_says_why(path: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"llmserve has nothing of vllm.{path}: "):
        importlib.import_module(f"llmserve.{path}")


@pytest.mark.parametrize("name", REFUSED_NAMES)
def test_a_class_whose_feature_is_not_here_says_why_when_it_is_used(name: str) -> None:
    refused = getattr(llmserve, name)
    assert not isinstance(3, refused)
    message = f"^{name}.* is not supported: {re.escape(REFUSED_NAMES[name])}"
    with pytest.raises(NotSupported, match=message):
        refused("x", y=1)
    with pytest.raises(NotSupported, match=message):
        refused.register_model("x")
    assert getattr(llmserve.outputs, name) is refused


def test_importing_llmserve_makes_none_of_them() -> None:
    script = (
        "import sys, llmserve; late = [m for m in sys.modules if m in "
        "('argparse', 'llmserve.engine', 'llmserve.options.engine_args', 'llmserve.common.gbnf', "
        "'llmserve.requests.processor_classes')]; assert not late, late"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
