"""python/llmserve/_core.pyi says what the module has: classes, functions, members, arguments."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import llmserve
from llmserve import _core

STUB = ast.parse((Path(llmserve.__file__).parent / "_core.pyi").read_text(encoding="utf-8"))


def stub_names(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    names: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = node
    return names


def public_names(thing: object) -> set[str]:
    return {name for name in vars(thing) if not name.startswith("_")}


def documented_arguments(function: object) -> list[str]:
    """Argument names in the signature that pybind11 writes into the docstring's first line."""
    signature = (inspect.getdoc(function) or "").split("->")[0]
    return re.findall(r"[(,] ?\*{0,2}(\w+)(?=[:,)])", signature)


def stub_arguments(node: ast.FunctionDef) -> list[str]:
    arguments = node.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return names + ([arguments.kwarg.arg] if arguments.kwarg else [])


def test_the_module_has_what_the_stub_says_and_nothing_else() -> None:
    assert public_names(_core) == {name for name in stub_names(STUB.body) if name[0] != "_"}


def test_every_class_has_the_members_that_the_stub_says() -> None:
    for name, node in stub_names(STUB.body).items():
        if isinstance(node, ast.ClassDef):
            members = {member for member in stub_names(node.body) if member[0] != "_"}
            assert public_names(getattr(_core, name)) == members, name


def test_every_function_has_the_arguments_that_the_stub_says() -> None:
    num_compared = 0
    for name, node in stub_names(STUB.body).items():
        if isinstance(node, ast.FunctionDef):
            assert documented_arguments(getattr(_core, name)) == stub_arguments(node), name
            num_compared += 1
        elif isinstance(node, ast.ClassDef):
            for member, method in stub_names(node.body).items():
                if not isinstance(method, ast.FunctionDef) or method.decorator_list:
                    continue
                bound = getattr(getattr(_core, name), member)
                assert documented_arguments(bound) == stub_arguments(method), f"{name}.{member}"
                num_compared += 1
    assert num_compared > 10
