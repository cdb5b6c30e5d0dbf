#!/usr/bin/env bash
# Everything that needs a GPU, in stages of less than nine minutes each, with no network:
#
#   benchmarks/run_on_gpu.sh build      the extension module and the CUDA backend, in place
#   benchmarks/run_on_gpu.sh test       pytest -m cuda over the folders that have such tests
#   benchmarks/run_on_gpu.sh test-wgmma the same of kernels by wgmma and TMA, which a GPU that has not run them yet may hang in
#   benchmarks/run_on_gpu.sh sanitize   memcheck and racecheck of compute-sanitizer over the op tests, steps ahead
#                                       and graphs
#   benchmarks/run_on_gpu.sh sanitize-more   the same of integers, FP8, experts, speculation, and ranks on one GPU
#   benchmarks/run_on_gpu.sh bench      against what the GPU was measured to do and PyTorch, in parts of as much time
#                                       each: OPS; products (bf16 and prompts, by each kernel); formats (products of weights
#                                       of all kinds); MODELS below; floats and integers (an 8B model by the form of
#                                       its weights and cache); server-MODEL; ranks (two GPUs, or two ranks on one with
#                                       NCCL_MULTI_RANK_GPU_ENABLE=1); peers (vLLM and SGLang, from a folder of their
#                                       wheels LLMSERVE_PEER_WHEELS, nothing without one). `bench ops` runs one
#   benchmarks/run_on_gpu.sh all        one after another, whatever fails but the build; called again, those that are
#                                       not in OUT yet, have failed, or are of another commit
#
# Each stage writes <stage>.json to the folder OUT (build/gpu unless set), and results.json there merges all that are
# there. Needs nvcc 13, a C++20 compiler, CMake, ninja and Python >= 3.10 (PYTHON) with pybind11, numpy, tokenizers,
# jinja2, tqdm and pytest; hypothesis, safetensors, gguf, torch and transformers for the tests, which run side by side if
# there is pytest-xdist. What the Python there lacks comes from a folder of wheels, filled beforehand where there is a
# network, for that Python's version and platform:
#
#   pip download --only-binary=:all: --no-deps -d wheels 'pybind11>=3' pytest pytest-xdist execnet hypothesis \
#     sortedcontainers tokenizers
#   LLMSERVE_WHEELS=wheels benchmarks/run_on_gpu.sh build
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stage=${1:-all}
out=${OUT:-build/gpu}
python=${PYTHON:-python3}
limit=${LLMSERVE_STAGE_SECONDS:-520}
OPS="attention ops"
MODELS="qwen3-0.6b llama-3.2-1b llama-3.1-8b"
PARTS="$OPS formats $MODELS floats integers server-qwen3-0.6b server-llama-3.1-8b ranks peers products"
WGMMA="wgmma or fastest"
mkdir -p "$out"

if [ -n "${LLMSERVE_WHEELS:-}" ]; then
  site=$PWD/build/gpu-site
  [ -d "$site" ] || "$python" -m pip install --quiet --no-index --no-deps --target "$site" "$LLMSERVE_WHEELS"/*.whl
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
  export PATH=$site/bin:$PATH
fi
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$PWD/python
export PYTHONUNBUFFERED=1
# cuBLASLt of the nvidia-cublas wheel, which is looked for beside an installed package and not beside this tree.
libraries=$("$python" -c 'import nvidia; print(*(f"{path}/cu13/lib" for path in nvidia.__path__), sep=":")' 2>/dev/null || true)
[ -z "$libraries" ] || export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$libraries

# What takes too long is interrupted, so that pytest still writes down what it has.
limited() { timeout -s INT -k 15 "$@"; }
record() { "$python" benchmarks/gpu_stages.py record --out "$out" "$@"; }

build() {
  local archs=${LLMSERVE_CUDA_ARCHS:-}
  [ -n "$archs" ] || archs=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d '. ')-real
  local start=$SECONDS status=0
  {
    cmake --preset cuda -DLLMSERVE_CUDA_ARCHS="$archs" -DPython_EXECUTABLE="$(command -v "$python")" \
      -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" &&
      limited "$limit" cmake --build --preset cuda -j "$(nproc)"
  } >"$out/build.log" 2>&1 || status=$?
  [ "$status" = 0 ] || tail -40 "$out/build.log"
  record --stage build --status "$status" --seconds $((SECONDS - start))
  return "$status"
}

# run_tests STAGE EXPRESSION: the tests that it names.
run_tests() {
  local start=$SECONDS status=0 workers=()
  # A process each for half of the cores: what runs on the host beside the GPU has threads of its own.
  if "$python" -c "import xdist" 2>/dev/null; then workers=(-n $((($(nproc) + 1) / 2))); fi
  limited "$limit" "$python" -m pytest -m cuda -q -rs --durations=5 ${workers[@]+"${workers[@]}"} \
    --junitxml="$out/$1.xml" -k "$2" tests/cuda tests/parity 2>&1 | tee "$out/$1.log" | tail -60 || status=$?
  record --stage "$1" --status "$status" --seconds $((SECONDS - start)) --junit "$out/$1.xml"
  return "$status"
}

# sanitized STAGE EXPRESSION FILES...: memcheck and racecheck over the tests of FILES that EXPRESSION names.
sanitized() {
  local stage=$1 expression=$2 start=$SECONDS status=0 tool suffix=${1#sanitize}
  for tool in memcheck racecheck; do
    limited $((limit / 2)) compute-sanitizer --tool "$tool" --error-exitcode 9 \
      --log-file "$out/$tool$suffix.log" "$python" -m pytest -m cuda -q -x "${@:3}" -k "$expression" 2>&1 |
      tee "$out/$tool$suffix.txt" | tail -15 || status=$?
  done
  record --stage "$stage" --status "$status" --seconds $((SECONDS - start))
  return "$status"
}

# The plain kernels over the smaller cases of every op, and what takes their place where it can: the tools run them
# some fifty times slower.
sanitize() {
  local plain="cuda-plain and not any_combination and not agrees_with_ref and not follow and not finite and not 70001"
  local auto="cuda-auto and (linear_ or attention_ or prepared)"
  local invariant="cuda-invariant and (linear_ or every_tile)"
  local decoding="few_rows and (1000 or 2-2-80 or 8-1-128) or sampling_shapes and 4100 or row_kernels and not 8196"
  local attention="wgmma_attention and not chunks or wgmma_linear or decode_spans and 64 and window"
  local kernels="($plain) or ($auto) or ($invariant) or ($decoding) or ($attention)"
  sanitized sanitize "($kernels or in_flight or graphs or (padding and auto)) and not 193 and not 1184" \
    tests/parity/test_{ops,fused_ops,op_invariance,sampling_op,sampling_edits,wgmma_attention,wgmma_linear}.py \
    tests/cuda/test_{two_in_flight,graphs,padding_rows,few_rows,sampling_shapes,row_kernels,decode_spans}.py
}

# Integers of a few formats, E4M3, experts, latents, heads and draft models, and two ranks on a GPU: few cases of each.
sanitize_more() {
  local integers="cuda-auto and (8-33 or shorter or extreme_values) and (int4 or int8)"
  local formats="cuda-auto and columns_in_another_order"
  local fp8="rounded_as_numpy and 24-200 or odd_rows or norms_and_gates"
  local experts="cuda-auto and (odd_depths or add_up or idle)"
  local columns="column_attention and matches and (16-1 or 8-2)"
  local models="a_head_of_no_use or is_the_target or may_share_a_gpu"
  sanitized sanitize-more "($integers) or ($formats) or ($fp8) or ($experts) or ($columns) or ($models)" \
    tests/parity/test_{quantized_linear,linear_formats,fp8_products,grouped_linear,experts_op,column_attention}.py \
    tests/cuda/test_{cuda_speculation,ranks_on_gpus,graphs_among_ranks}.py
}

# LLMSERVE_BENCH_FLAGS=--small tries a part where there is an emulator and no GPU.
bench_part() {
  local part=$1 start=$SECONDS status=0 command
  case $part in
    attention | ops | products) command=(benchmarks/bench_cuda.py "$part") ;;
    formats) command=(benchmarks/bench_cuda_formats.py) ;;
    floats | integers) command=(benchmarks/bench_cuda_forms.py "$part") ;;
    server-*) command=(benchmarks/bench_cuda_server.py "${part#server-}") ;;
    ranks) command=(benchmarks/bench_cuda_ranks.py "${LLMSERVE_RANKS_MODEL:-qwen3-0.6b}") ;;
    peers) command=(benchmarks/bench_cuda_peers.py "${LLMSERVE_PEER_MODEL:-llama-3.1-8b}") ;;
    *) command=(benchmarks/bench_cuda_models.py "$part") ;;
  esac
  # shellcheck disable=SC2086
  limited "$limit" "$python" "${command[@]}" ${LLMSERVE_BENCH_FLAGS:-} --json "$out/bench-$part.rows.json" 2>&1 |
    tee "$out/bench-$part.log" || status=$?
  record --stage "bench-$part" --status "$status" --seconds $((SECONDS - start)) --rows "$out/bench-$part.rows.json"
  return "$status"
}

bench() {
  local part status=0
  for part in "$@"; do bench_part "$part" || status=$?; done
  return "$status"
}

# unless_done STAGE COMMAND...
unless_done() {
  "$python" benchmarks/gpu_stages.py is-done --out "$out" --stage "$1" || "${@:2}"
}

all() {
  local part status=0
  build || return
  unless_done test run_tests test "not ($WGMMA)" || status=$?
  for part in $PARTS; do
    [ "$part" != products ] || unless_done test-wgmma run_tests test-wgmma "$WGMMA" || status=$?
    unless_done "bench-$part" bench_part "$part" || status=$?
  done
  unless_done sanitize sanitize || status=$?
  unless_done sanitize-more sanitize_more || status=$?
  return "$status"
}

case $stage in
  build) build ;;
  test) run_tests test "not ($WGMMA)" ;;
  test-wgmma) run_tests test-wgmma "$WGMMA" ;;
  sanitize) sanitize ;;
  sanitize-more) sanitize_more ;;
  bench) if [ $# -gt 1 ]; then bench "${@:2}"; else bench $PARTS; fi ;;
  all) all ;;
  *) sed -n '2,18p' "$0"; exit 2 ;;
esac
