"""The two planes stay apart: the #includes are read against the table of who includes whom."""

from __future__ import annotations

import graphlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

CSRC = Path(__file__).parents[3] / "csrc"

# The one table of who may include whom: direct includes; a folder may include itself.
_LAYERS = {"core", "quant", "kernels", "comm", "io"}
_ALL_BELOW_ENGINE = _LAYERS | {
    "api",
    "text",
    "kv_cache",
    "scheduler",
    "layers",
    "models",
    "sampling",
}
MAY_INCLUDE = {
    "core": set(),
    "api": {"core"},
    "quant": {"core"},
    "comm": {"core"},
    "text": {"core", "api"},
    "kv_cache": {"core", "api"},
    "scheduler": {"core", "api", "text", "kv_cache"},
    "routing": {"core", "api"},
    "kernels": {"core", "quant"},
    "io": {"core", "quant"},
    "layers": _LAYERS,
    "models": _LAYERS | {"layers"},
    "sampling": {"core", "api", "kernels"},
    "speculation": _ALL_BELOW_ENGINE,
    "engine": _ALL_BELOW_ENGINE | {"speculation", "routing"},
    "testing": set(),
    "bindings": {"core", "api", "text", "kv_cache", "scheduler", "kernels", "sampling", "engine"}
    | {"routing", "speculation"},
}
# What exists for tests may look at anything, and so may what shows a checkpoint's insides.
ANYTHING = re.compile(
    r"testing/.*|bindings/(register_inspect|model_records|register_checkpoint)\.\w+"
)
CUDA = re.compile(r"cuda\w*\.h|cublas\w*\.h|nccl\w*\.h|cub/.*|cutlass/.*")
CUDA_PLACES = re.compile(r"kernels/cuda/.*|comm/nccl_api_check\.cpp")


def includes() -> Iterator[tuple[str, str]]:
    """(including file, included path), both relative to csrc."""
    for path in sorted(CSRC.rglob("*")):
        if path.suffix not in {".h", ".cpp", ".inc", ".cu", ".cuh"}:
            continue
        source = path.relative_to(CSRC).as_posix()
        for match in re.finditer(
            r'^\s*#\s*include\s*[<"]([^">]+)[">]', path.read_text(encoding="utf-8"), re.MULTILINE
        ):
            yield source, match.group(1)


def is_allowed(source: str, target: str) -> bool:
    if not (CSRC / target).exists():
        return True  # not of this project
    folder, target_folder = source.split("/")[0], target.split("/")[0]
    if folder == target_folder or ANYTHING.fullmatch(source):
        return True
    return target_folder in MAY_INCLUDE[folder]


def test_every_folder_includes_only_what_lies_below_it() -> None:
    wrong = [
        f"{source} includes {target}"
        for source, target in includes()
        if not is_allowed(source, target)
    ]
    assert wrong == []


def test_every_folder_is_in_the_table() -> None:
    folders = {path.name for path in CSRC.iterdir() if path.is_dir()}
    assert folders <= MAY_INCLUDE.keys()


def test_project_includes_are_written_from_csrc() -> None:
    wrong = []
    for source, target in includes():
        beside = (CSRC / source).parent / target
        if beside.exists() and not (CSRC / target).exists() and not target.endswith(".inc"):
            wrong.append(f"{source} includes {target}")
    assert wrong == []


def test_pybind11_stays_in_its_places() -> None:
    wrong = [
        s
        for s, target in includes()
        if target.startswith("pybind11/") and not s.startswith(("bindings/", "testing/"))
    ]
    assert wrong == []


def test_cuda_stays_in_its_places() -> None:
    wrong = [
        s for s, target in includes() if CUDA.fullmatch(target) and not CUDA_PLACES.fullmatch(s)
    ]
    assert wrong == []


def test_an_instruction_set_includes_nothing_from_outside_with_code_in_it() -> None:
    """Inline functions of a shared header would be merged by the linker across instruction sets."""
    allowed = re.compile(r"core/math/\w+\.inc|quant/formats/\w+\.inc|kernels/cpu/.*")
    wrong = [
        f"{source} includes {target}"
        for source, target in includes()
        if source.startswith("kernels/cpu/isa/")
        and (CSRC / target).exists()
        and not allowed.fullmatch(target)
    ]
    assert wrong == []


def circle_of(arrows: Iterable[tuple[str, str]]) -> list[str]:
    """Units on a circle of includes, or none. A unit is a header and the sources of its name."""
    graph: dict[str, set[str]] = defaultdict(set)
    for source, target in arrows:
        a, b = source.rsplit(".", 1)[0], target.rsplit(".", 1)[0]
        if a != b:
            graph[a].add(b)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_two_units_include_each_other_by_any_way() -> None:
    ours = [(source, target) for source, target in includes() if (CSRC / target).exists()]
    assert len(ours) > 500
    assert circle_of(ours) == []


def test_a_circle_through_a_source_file_is_found() -> None:
    arrows = [("a/x.cpp", "b/y.h"), ("b/y.cpp", "c/z.h"), ("c/z.h", "a/x.h")]
    assert set(circle_of(arrows)) == {"a/x", "b/y", "c/z"}
    assert circle_of(arrows[:2]) == []


def test_the_table_catches_a_wrong_direction() -> None:
    assert not is_allowed("core/tensor.h", "api/request.h")
    assert not is_allowed("scheduler/step_plan.h", "kernels/ops.h")
    assert not is_allowed("bindings/register_scheduler.cpp", "testing/token_oracle.h")
    assert is_allowed("scheduler/step_plan.h", "api/request.h")
    assert is_allowed("core/tensor.h", "cstdint")
