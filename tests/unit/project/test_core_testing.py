"""The testing bindings are a module beside the core, with a copy of the core of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import llmserve
import pytest
from llmserve import _core, _core_testing, errors

PACKAGE = Path(llmserve.__file__).parent
TESTS = Path(__file__).parents[2]


def test_the_core_itself_has_nothing_for_tests() -> None:
    assert not hasattr(_core, "testing")


def test_their_exceptions_are_those_of_the_package() -> None:
    with pytest.raises(errors.NotSupported, match="tpu"):
        _core_testing.make_backend("tpu")
    with pytest.raises(errors.InvalidArgument, match="no format"):
        _core_testing.dequantize("no", b"")
    with pytest.raises(errors.CorruptFile, match=r"f\.json"):
        _core_testing.parse_json("f.json", b"{")
    cache = _core_testing.KvCacheManager(2, 1)
    table = _core_testing.BlockTable(0)
    cache.allocate(table, 0, 1)
    with pytest.raises(errors.InternalError):
        cache.check_integrity([])  # a block without the table that holds it


def test_their_types_are_those_of_the_core() -> None:
    config = _core.EngineConfig(
        cache=_core.CacheConfig(num_blocks=8), scheduler=_core.SchedulerConfig(max_model_len=64)
    )
    engine = _core_testing.oracle_engine(config, _core_testing.OracleOptions())
    assert type(engine) is _core.Engine


def test_without_them_the_tests_say_what_to_build(tmp_path: Path) -> None:
    package = tmp_path / "llmserve"
    package.mkdir()
    for entry in PACKAGE.iterdir():
        if not entry.name.startswith(("_core_testing.", "__pycache__")):
            (package / entry.name).symlink_to(entry)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "unit/common/test_units.py",
        ],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, output
    assert "pip install '.[test]' -C cmake.define.LLMSERVE_TESTING=ON" in output
    assert "Traceback" not in output
