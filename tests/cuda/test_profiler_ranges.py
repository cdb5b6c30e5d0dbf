"""What a profiler of NVTX is told: by a stand-in that writes down what it hears."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
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
  (void)stream;
  fprintf(heard, "stream %s\n", name);
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
from llmserve import LLM, SamplingParams, demo_model_path
with LLM(demo_model_path(), device="cuda", kv_cache_memory_bytes=2**22, max_model_len=64) as llm:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    llm.generate([[5, 6, 7]], params, use_tqdm=False)
"""


def test_steps_are_ranges_and_streams_have_names(tmp_path):
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
    environment = {"NVTX_INJECTION64_PATH": str(tmp_path / "profiler.so"), "HEARD": str(heard)}
    subprocess.run([sys.executable, "-c", RUN], check=True, env={**os.environ, **environment})
    lines = Path(heard).read_text().splitlines()
    assert {"stream llmserve ops", "stream llmserve transfers"} <= set(lines)
    steps = [line for line in lines if not line.startswith("stream")]
    assert steps == ["push Prefill", "pop", *["push Decode", "pop"] * 2]
