"""The CUDA backend is a library of its own: all else works without it, a GPU or a driver."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from llmserve import LLM, _core, _core_testing, demo_model_path
from llmserve.errors import NotSupported
from package_files import CUDA_LIBRARY, PACKAGE, packaged_files, wheel_bytes

PLUGIN = CUDA_LIBRARY.relative_to(PACKAGE)
MAX_WHEEL_BYTES = 150e6
REASON = _core_testing.unavailable_reason("cuda")
without_gpu = pytest.mark.skipif(not REASON, reason="there is a GPU here")


def needed(library):
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    text = subprocess.run(
        ["readelf", "-d", library], check=True, capture_output=True, text=True
    ).stdout
    return re.findall(r"\(NEEDED\).*\[(.*)\]", text)


def is_cuda(name):
    return re.match(r"lib(cu|nv|nccl)", name) is not None


def test_the_module_needs_nothing_of_cuda():
    libraries = needed(_core.__file__)
    assert any(name.startswith("libc.so") for name in libraries)
    assert not [name for name in libraries if is_cuda(name)]


def test_the_cuda_backend_needs_neither_driver_nor_cuda_libraries():
    if not CUDA_LIBRARY.exists():
        pytest.skip("built without LLMSERVE_CUDA")
    assert not [name for name in needed(CUDA_LIBRARY) if is_cuda(name)]
    symbols = subprocess.run(
        ["readelf", "--dyn-syms", "-W", CUDA_LIBRARY], check=True, capture_output=True, text=True
    ).stdout
    ours = [line.split()[-1] for line in symbols.splitlines() if "llmserve" in line]
    assert ours == ["llmserve_cuda_plugin"]


def test_a_wheel_with_the_backend_stays_small():
    if not CUDA_LIBRARY.exists():
        pytest.skip("built without LLMSERVE_CUDA")
    assert wheel_bytes(packaged_files()) < MAX_WHEEL_BYTES


@without_gpu
def test_asking_for_cuda_says_why_it_cannot_be_had_and_what_to_do():
    with pytest.raises(NotSupported, match=r"device 'cuda' cannot be used: .*device='cpu'"):
        LLM(demo_model_path(), device="cuda")


@without_gpu
def test_auto_takes_the_cpu_where_there_is_no_gpu():
    with LLM(demo_model_path(), device="auto") as llm:
        assert " on cpu/" in repr(llm)


def load_beside(tmp_path, source):
    """What the loader says of a library made from C source, in a copy of the package."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    package = tmp_path / "llmserve"
    (package / "lib").mkdir(parents=True)
    for entry in PACKAGE.iterdir():
        if entry.name not in ("lib", "__pycache__"):
            (package / entry.name).symlink_to(entry)
    (tmp_path / "plugin.c").write_text(source)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", package / PLUGIN, tmp_path / "plugin.c"], check=True
    )
    code = "from llmserve import _core_testing; print(_core_testing.unavailable_reason('cuda'))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
    ).stdout


def test_a_library_of_another_build_is_refused_before_it_is_used(tmp_path):
    said = load_beside(
        tmp_path,
        'struct { unsigned abi; const char* id; void* calls[4]; } plugin = {5, "another"};\n'
        "void* llmserve_cuda_plugin(void) { return &plugin; }\n",
    )
    assert "is of another build than this module (another, not " in said


def test_a_library_that_is_no_backend_is_refused(tmp_path):
    assert "is of another build" in load_beside(tmp_path, "int nothing;\n")
