"""The CUDA backend's tests over the emulator: real kernels and host code, threads run by the CPU.

What it cannot show: that a GPU's compiler and hardware agree, and what the order of a stream hides.
LLMSERVE_CUDA_EMULATED names the build folder: the module and the backend must be of one build.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import llmserve
import pytest

from benchmarks import gpu_stages

TESTS = Path(__file__).parents[1]
BUILD = Path(os.environ.get("LLMSERVE_CUDA_EMULATED", "")).absolute()
LIBRARY = BUILD / "tests" / "cuda" / "emulator"

pytestmark = pytest.mark.skipif(
    not os.environ.get("LLMSERVE_CUDA_EMULATED"),
    reason="LLMSERVE_CUDA_EMULATED does not name a build folder",
)


def environment(package):
    return {
        **os.environ,
        "PYTHONPATH": f"{package}:{TESTS}",
        "LD_LIBRARY_PATH": f"{LIBRARY / 'cublas'}:{LIBRARY / 'nccl'}",  # stand-ins
        "LLMSERVE_EMULATOR_DEVICES": "4",
        "LLMSERVE_CUDA_EMULATED": "",
    }


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The package with that build's module, and the emulated backend in place of the real one."""
    modules = [*(BUILD / "csrc").glob("_core.*.so"), *(BUILD / "csrc").glob("_core_testing.*.so")]
    built = [*modules, *LIBRARY.glob("libllmserve_cuda.so")]
    assert len(built) == 3, f"{BUILD}: build its target llmserve_cuda_emulated; has {built}"
    folder = tmp_path_factory.mktemp("emulated")
    package = folder / "llmserve"
    package.mkdir()
    (package / "lib").symlink_to(LIBRARY)
    for module in modules:
        (package / module.name).symlink_to(module)
    for entry in Path(llmserve.__file__).parent.iterdir():
        if entry.name not in ("lib", "__pycache__", *(module.name for module in modules)):
            (package / entry.name).symlink_to(entry)
    return folder


# A GPU of fibers is slow: the smaller cases of every op, and a model.
@pytest.mark.parametrize(
    ("files", "selection"),
    [
        (
            "test_ops.py",
            "cuda-plain and not 193 and not finite and not panels and not (attention and float32)"
            " and not embedding_of_blocks and not latent_rows",
        ),
        (
            "test_ops.py",
            "cuda-auto and not 193 and not 97 and (linear_ or (attention_ and bfloat16)) "
            "and not 33 and not 72 and not 4-7",
        ),
        (
            "test_op_invariance.py",
            "cuda-plain and (row_ops or sampled or (bfloat16 and 33-window))",
        ),
        ("test_ops.py", "cuda-cublaslt and linear_"),
        ("test_ops.py", "(cuda-invariant or cuda-fastest) and linear_ and bfloat16 and not 193"),
        ("test_fused_ops.py", "cuda-wgmma and (company or (64-256 and bfloat16))"),
        ("test_op_invariance.py", "cuda-invariant and every_tile"),
        (
            "test_fused_ops.py",
            "(cuda-auto or cuda-cublaslt) and not company and not 1184 and not 256-256 and not 592"
            " and not (cublaslt and what_is_prepared)",
        ),
        ("test_quantized_linear.py", "cuda-auto and not deep and not any_batch"),
        ("test_linear_formats.py", "cuda-auto"),
        ("test_fp8_products.py", ""),
        ("test_quantized_linear.py", "cuda-invariant and (deep or any_batch) and (int8 or Q4_K)"),
        (
            "test_op_invariance.py",
            "cuda-auto and (many_spans or (bfloat16 and 64) or 4-2-bfloat16-150)",
        ),
        ("test_fp8_cache.py", "cuda-plain and not bits and not 256 and not 128-2 and not chunks"),
        ("test_fp8_cache.py", "cuda-auto and (bits or chunks) and (64 or 256) and not 36"),
        ("test_fp8_cache.py", "cuda-auto and (ends_of_the_range or nan)"),
        (
            "test_sampling_op.py",
            "cuda-plain and (ties or extreme or numbers or capped or 5-params5)",
        ),
        (
            "test_sampling_edits.py",
            "cuda-plain and (batch_of_all or ranks or forced or number or agrees_with_ref)",
        ),
        (
            "test_models.py",
            "cuda and (test_logprobs_agree or bf16_logprobs) "
            "and (qwen3 or mistral-window or gpt_oss or deepseek_v3)",
        ),
        ("test_wgmma_attention.py", ""),
        ("test_column_attention.py", ""),
        ("test_wgmma_linear.py", ""),
        ("../cuda/test_decode_spans.py", ""),
        ("../cuda/test_prepared_attention.py", ""),
        ("../cuda/test_kernels_of_a_step.py", ""),
        ("../cuda/test_ops_on_device.py", ""),
        ("../cuda/test_transfers.py", ""),
        ("../cuda/test_device_copies.py", ""),
        ("../cuda/test_backend.py", "prompts_of_embeddings or split_in_parts or not_fit"),
        ("../cuda/test_profiler_ranges.py", ""),
        ("../cuda/test_two_in_flight.py", ""),
        ("../cuda/test_graphs.py", ""),
        ("../cuda/test_padding_rows.py", ""),
        ("../cuda/test_row_kernels.py", ""),
        ("../cuda/test_sampling_shapes.py", ""),
        ("test_grouped_linear.py", "cuda-auto or (cuda-invariant and odd_depths)"),
        ("test_experts_op.py", "cuda-auto"),
        ("../cuda/test_few_rows.py", ""),
        ("../cuda/test_device_expert_loads.py", ""),
        ("../cuda/test_quantized_on_device.py", "not 4096"),
        ("../cuda/test_cuda_speculation.py", ""),
        ("../cuda/test_nccl_on_device.py", ""),
        ("../cuda/test_ranks_on_gpus.py", ""),
        ("../cuda/test_graphs_among_ranks.py", ""),
        ("../cuda/test_hand_over_on_gpu.py", ""),
        ("../cuda/test_replicas_on_gpus.py", ""),
        ("../cuda/test_stages_on_gpus.py", ""),
        ("../cuda/test_experts_on_gpus.py", ""),
        ("../cuda/test_rank_cuts_on_gpus.py", ""),
        ("../cuda/test_nodes_on_gpus.py", ""),
    ],
)
def test_the_parity_tests_pass_on_emulated_kernels(package, files, selection):
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
            *("-m", "cuda", "-k", selection, str(TESTS / "parity" / files)),
        ],
        env=environment(package),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-5000:]
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout


def test_the_benchmarks_run_on_small_shapes_and_leave_their_rows(package, tmp_path):
    """What is wrong with them would otherwise be found on a GPU, where time is dear."""
    parts = ("attention", "ops", "products", "formats", "qwen3-0.6b", "floats", "integers")
    parts += ("server-qwen3-0.6b", "ranks", "peers")
    result = subprocess.run(
        ["benchmarks/run_on_gpu.sh", "bench", *parts],
        env={
            **environment(package),
            "PYTHON": sys.executable,
            "OUT": str(tmp_path),
            "LLMSERVE_BENCH_FLAGS": "--small",
        },
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    stages = json.loads((tmp_path / "results.json").read_text())
    assert {name: stage["status"] for name, stage in stages.items()} == {
        f"bench-{part}": 0 for part in parts
    }
    rows = [row for stage in stages.values() for row in stage["bench"]["rows"]]
    wanted = ["attention decode", "torch: attention decode", "invariant linear", "link to"]
    wanted += ["quantized int4", "quantized Q4_K", "quantized fp8 blocks", "load, weights"]
    wanted += ["all spans a warp: attention decode", "fastest: attention prefill"]
    wanted += ["merged by the last block: attention decode", "prepared by attention: "]
    wanted += ["fp8 cache: attention decode", "fp8 cache by registers: attention decode"]
    wanted += ["torch: attention pre", "hand-over from"]
    for kind in ("", "whole stretches: ", "plain: ", "torch: "):
        wanted += [f"{kind}latent attention decode", f"{kind}latent attention prefill"]
    wanted += [
        "linear bfloat16",
        *(f"{by}: linear bfloat16" for by in ("cublaslt", "wgmma", "invariant")),
    ]
    for kind in ("", "invariant: "):
        wanted += [f"{kind}decode batch 1,", f"{kind}prefill 16", f"{kind}the host's"]
        wanted += [f"{kind}nano-vllm workload, second"]
    wanted += ["torch with a CUDA graph: decode", "torch: prefill", "torch: nano-vllm"]
    for form in ("bf16", "fp8 cache", "fp8 rows", "fp8 blocks", "int8", "int4", "Q8_0"):
        wanted.append(f"{form}: decode batch 3, a step")
    wanted += [f"a step of 3 with {edit}" for edit in ("plain", "penalties", "a grammar")]
    wanted += [f"two ranks, {kind}: decode batch 1" for kind in ("graphs", "no graphs")]
    wanted += ["2 streams by the engine", "2 streams by the server", "llmserve: nano-vllm"]
    for part in wanted:
        assert any(row["name"].startswith(part) for row in rows), part
    assert all(row["us"] > 0 for row in rows)
    script = (TESTS.parent / "benchmarks" / "run_on_gpu.sh").read_text()
    named = " ".join(gpu_stages.BENCHES)
    for name, of in (("OPS", gpu_stages.OPS), ("MODELS", gpu_stages.MODELS)):
        assert f'{name}="{" ".join(of)}"' in script
        named = named.replace(" ".join(of), f"${name}")
    assert f'PARTS="{named}"' in script
