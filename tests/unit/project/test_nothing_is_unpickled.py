"""What comes from files or other machines is never unpickled, nor evaluated: that runs what it
says. Checkpoints in torch.save's format are read by csrc/io, which makes numbers of them alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import llmserve
import pytest

PACKAGE = Path(llmserve.__file__).parent
FORBIDDEN_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load"}


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def found_in(source: str) -> Iterator[str]:
    """What of the forbidden a module imports or calls."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call):
            called = _name(node.func)
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            allows = keywords.get("allow_pickle")
            if called in FORBIDDEN_CALLS or (
                isinstance(allows, ast.Constant) and allows.value is not False
            ):
                yield called
        yield from (name for name in names if name.partition(".")[0] in FORBIDDEN_MODULES)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "torch.load('x')",
        "np.load('x', allow_pickle=True)",
        "eval('1')",
    ],
)
def test_it_would_be_found(source: str) -> None:
    assert list(found_in(source))


def test_no_module_unpickles_or_evaluates() -> None:
    modules = list(PACKAGE.rglob("*.py"))
    assert len(modules) > 300
    found = {
        str(module.relative_to(PACKAGE)): names
        for module in modules
        if (names := list(found_in(module.read_text("utf-8"))))
    }
    assert found == {}
