"""What a profiler of NVTX is told: by a stand-in that writes down what it hears."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from checkpoints import checkpoint
from gpu_ranks import need_gpus
from llmserve import _core_testing

REASON = _core_testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]

PROFILER = r"""
#include <nvtx3/nvToolsExt.h>
#include <nvtx3/nvToolsExtCudaRt.h>
#include <stdio.h>
#include <stdlib.h>

static FILE* heard;
static int push(const char* name) { fprintf(heard, "push %s\n", name); fflush(heard); return 0; }
static int pop(void) { fprintf(heard, "pop\n"); fflush(heard); return 0; }
static void name_stream(cudaStream_t stream, const char* name) {
  fprintf(heard, "stream %s %zu\n", name, (size_t)stream);
  fflush(heard);
}

int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get) {
  const NvtxExportTableCallbacks* table = get(NVTX_ETID_CALLBACKS);
  NvtxFunctionTable functions;
  unsigned size;
  heard = fopen(getenv("HEARD"), "a");
  if (!table->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &functions, &size)) return 0;
  *functions[NVTX_CBID_CORE_RangePushA] = (NvtxFunctionPointer)push;
  *functions[NVTX_CBID_CORE_RangePop] = (NvtxFunctionPointer)pop;
  if (!table->GetModuleFunctionTable(NVTX_CB_MODULE_CUDART, &functions, &size)) return 0;
  *functions[NVTX_CBID_CUDART_NameCudaStreamA] = (NvtxFunctionPointer)name_stream;
  return 1;
}
"""

RUN = """
import json, os
from llmserve import LLM, SamplingParams, demo_model_path
options = {"device": "cuda", "kv_cache_memory_bytes": 2**22, "max_model_len": 64}
options |= json.loads(os.environ["OPTIONS"])
with LLM(os.environ.get("MODEL") or demo_model_path(), **options) as llm:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    llm.generate([[5, 6, 7]], params, use_tqdm=False)
    llm.open_hand_over("a key that both sides know", [])
"""
# Of streams, from the device that is emulated: the smaller number goes first.
PRIORITIES = """
import ctypes, pathlib, llmserve
library = ctypes.CDLL(pathlib.Path(llmserve.__file__).parent / "lib" / "libllmserve_cuda.so")
try:
    library.llmserve_emulator_priority.argtypes = [ctypes.c_size_t]
except AttributeError:
    streams = []
else:
    streams = [line for line in open(os.environ["HEARD"]) if line.startswith("stream")]
for line in streams:
    _, *name, handle = line.split()
    print(*name, library.llmserve_emulator_priority(int(handle)))
"""


def hear(tmp_path, options=None, **environment):
    """What the profiler writes down, and the lines that the process prints."""
    compiler, nvcc = shutil.which("cc") or shutil.which("gcc"), shutil.which("nvcc")
    if compiler is None or nvcc is None:
        pytest.skip("there is no C compiler, or no CUDA toolkit")
    dry_run = subprocess.run(
        [nvcc, "--dryrun", "x.cu"], capture_output=True, text=True, check=False
    )
    (top,) = (line.split("=")[1] for line in dry_run.stderr.splitlines() if "TOP=" in line)
    (tmp_path / "profiler.c").write_text(PROFILER)
    subprocess.run(
        [
            *(compiler, "-shared", "-fPIC", "-I", f"{top.strip()}/include"),
            *("-o", tmp_path / "profiler.so", tmp_path / "profiler.c"),
        ],
        check=True,
    )
    heard = tmp_path / "heard"
    environment["OPTIONS"] = json.dumps(options or {})
    environment |= {"NVTX_INJECTION64_PATH": str(tmp_path / "profiler.so"), "HEARD": str(heard)}
    told = subprocess.run(
        [sys.executable, "-c", RUN + PRIORITIES],
        check=True,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    return heard.read_text().splitlines(), told.stdout.splitlines()


def test_steps_are_ranges_and_streams_have_names_and_priorities(tmp_path):
    lines, told = hear(tmp_path)
    names = [line.rsplit(" ", 1)[0] for line in lines if line.startswith("stream")]
    assert set(names) == {"stream compute", "stream transfer", "stream hand-over transfer"}
    assert names.count("stream hand-over transfer") == 4
    steps = [line for line in lines if not line.startswith("stream")]
    assert steps == ["push Prefill", "pop", *["push Decode", "pop"] * 2]
    priorities = dict(line.rsplit(" ", 1) for line in told)
    if priorities:
        assert priorities == {"compute": "-5", "transfer": "0", "hand-over transfer": "0"}


# Columns of layers, hidden states of stages, and rows of experts that stand whole.
@pytest.mark.parametrize(
    ("family", "options", "ranges"),
    [
        ("", {"tensor_parallel_size": 2}, {"Gather of columns", "Broadcast"}),
        ("", {"pipeline_parallel_size": 2}, {"Send", "Receive"}),
        (
            "qwen3_moe",
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            {"All-to-all communication"},
        ),
    ],
)
def test_exchanges_among_gpus_are_ranges_within_each_ranks_steps(tmp_path, family, options, ranges):
    need_gpus(2)
    model = {"MODEL": str(checkpoint(family))} if family else {}
    lines, _ = hear(tmp_path, options, **model)
    names = [line.rsplit(" ", 1)[0] for line in lines if line.startswith("stream")]
    assert set(names) == {"stream compute", "stream transfer", "stream hand-over transfer"}
    assert names.count("stream hand-over transfer") == 8
    assert {f"push {name}" for name in ranges} <= set(lines)
    assert lines.count("push Prefill") == 2  # each rank's
    assert lines.count("pop") == sum(line.startswith("push") for line in lines)
