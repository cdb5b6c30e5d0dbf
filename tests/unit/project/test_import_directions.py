"""The package's rooms import in one direction only, and no two modules import each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "python" / "llmserve"

# Modules at the top of a folder, by the room that they make up. A folder is a room by itself.
TOP = {
    "_version": "errors",
    "errors": "errors",
    "beam_search_params": "parameters",
    "pooling_params": "parameters",
    "prompts": "parameters",
    "sampling_params": "parameters",
    "structured_outputs": "parameters",
    "beam_search": "outputs",
    "outputs": "outputs",
    "pooling_outputs": "outputs",
    "async_llm": "llm",
    "llm": "llm",
    "llm_base": "llm",
    "llm_engine": "llm",
    "llm_insight": "llm",
    "model_config": "outputs",
    "ops": "llm",
    "scheduler": "llm",
    "support_matrix": "llm",
    "server/settings": "server/settings",
    "server/tiers": "server/settings",
    "server/models": "server/models",
    "server/context": "server/context",
    "server/gpu_metrics": "server/context",
    "server/metrics": "server/context",
    "server/request_metrics": "server/context",
    "server/stored_responses": "server/context",
    "server/tracing": "server/context",
}
# The one table of who may include whom: direct imports, those for types as well. Every room
# may import itself and _core.
_CHECKPOINT = {"errors", "common", "checkpoint"}
_TOKENIZATION = _CHECKPOINT | {"chat", "tokenization"}
_OPTIONS = _CHECKPOINT | {"options"}
_REQUESTS = _TOKENIZATION | {"parameters", "outputs", "requests"}
_LLM = _REQUESTS | {"insight", "options", "plan", "llm"}
_RUNNING = _LLM | {"server/settings", "server/models", "server/http", "server/running"}
_ROUTES = _RUNNING | {"parsers", "server/context", "server/routes"}
MAY_IMPORT = {
    "errors": set(),
    "common": {"errors"},
    "checkpoint": _CHECKPOINT,
    "chat": _CHECKPOINT,
    "tokenization": _TOKENIZATION,
    "parameters": _CHECKPOINT,
    "outputs": {"errors", "common"},
    "insight": {"errors", "common"},
    "options": _OPTIONS,
    "plan": _CHECKPOINT,
    "sim": {"errors", "common", "plan", "sim"},
    "requests": _REQUESTS,
    "llm": _LLM,
    "parsers": {"errors", "common", "parameters"},
    "bench": _LLM,
    "quantization": _LLM | {"bench", "quantization"},
    "server/settings": {"errors", "common", "parsers"},
    "server/http": {"errors", "common", "server/settings"},
    "server/models": _LLM | {"server/http"},
    "server/running": _RUNNING,
    "server/context": _RUNNING,
    "server/routes": _ROUTES,
    "server/routes/anthropic": _ROUTES,
    "server/routes/llama_cpp": _ROUTES,
    "server/routes/ollama": _ROUTES,
    "server/routes/responses": _ROUTES,
}
# What stands above all: the rest of the server, the command line, the package's own face.
ANYTHING = {"server", "route", "ray", "cli", ""}

MODULES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("__init__").rstrip("/"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imports(path: Path) -> Iterator[str]:
    """The modules of the package that a file imports, at any place of it and for types as well."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] != "llmserve" or "_core" in parts[:2]:
                continue
            while (module := "/".join(parts[1:])) not in MODULES:
                parts.pop()  # what is imported from a module is none itself
            yield module


IMPORTS = {module: set(imports(path)) for module, path in MODULES.items()}


def room(module: str) -> str:
    is_folder = MODULES[module].name == "__init__.py"
    folder = module if is_folder else module.rpartition("/")[0]
    return TOP.get(module, folder)


def is_allowed(source: str, target: str) -> bool:
    from_room, to_room = room(source), room(target)
    return from_room in ANYTHING or from_room == to_room or to_room in MAY_IMPORT[from_room]


def assert_no_circle(graph: Mapping[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_two_modules_import_each_other() -> None:
    assert_no_circle(IMPORTS)


def test_no_two_rooms_import_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for source, targets in IMPORTS.items():
        others = {room(target) for target in targets} - {room(source)}
        graph.setdefault(room(source), set()).update(others)
    assert_no_circle(graph)


def test_every_room_imports_only_what_lies_below_it() -> None:
    wrong = [
        f"{source} imports {target}"
        for source, targets in IMPORTS.items()
        for target in sorted(targets)
        if not is_allowed(source, target)
    ]
    assert wrong == []


def test_every_room_is_in_the_table_and_every_row_is_a_room() -> None:
    assert {room(module) for module in MODULES} == MAY_IMPORT.keys() | ANYTHING
    assert TOP.keys() <= MODULES.keys()


def test_the_table_catches_a_wrong_direction() -> None:
    assert not is_allowed("requests/state", "llm")
    assert not is_allowed("server/http/errors", "server/running/activity")
    assert not is_allowed("chat/chat_template", "tokenization/tokenizer")
    assert is_allowed("llm", "requests/state")
    with pytest.raises(pytest.fail.Exception):
        assert_no_circle({"a": {"b"}, "b": {"a"}})
