"""Every architecture has the bits of one rank at two to five: any heads, norms and experts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILIES, checkpoint
from gguf_files import in_format, write_gguf
from llmserve import LLM, NotSupported
from test_family_invariance import PROMPTS, run
from test_format_invariance import GGUF_TYPES, QUANTIZATIONS
from test_invariance import Result


def results(path: Path | str, num_ranks: int, **options: Any) -> list[Result]:
    """In chunks, and the second half of the prompts from the cache of the first."""
    defaults = {"max_model_len": 112, "num_threads": 1, "num_gpu_blocks_override": 64}
    with LLM(
        path,
        tensor_parallel_size=num_ranks,
        max_num_batched_tokens=50,
        max_num_seqs=4,
        **{**defaults, **options},
    ) as llm:
        return run(llm, list(range(len(PROMPTS))))


def assert_ranks_change_no_bit(path: Path | str, num_ranks: list[int], **options: Any) -> None:
    one = results(path, 1, **options)
    for count in num_ranks:
        assert results(path, count, **options) == one, f"{count} ranks"


@pytest.mark.parametrize("family", FAMILIES)
def test_three_ranks_change_no_bit(family: str) -> None:
    assert_ranks_change_no_bit(checkpoint(family), [3], dtype="float32")


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_two_to_five_ranks_change_no_bit(family: str) -> None:
    assert_ranks_change_no_bit(checkpoint(family), [2, 4, 5], dtype="float32")
    assert_ranks_change_no_bit(checkpoint(family), [2, 4], dtype="bfloat16")


EXPERTS = [family for family in FAMILIES if "moe" in family] + [
    *("deepseek_v2", "deepseek_v3", "dots1", "glm4_moe_lite", "gpt_oss", "minimax_m2", "mixtral"),
    "olmoe",
]


@pytest.mark.parametrize("family", sorted(set(EXPERTS) & set(FAMILIES)))
def test_experts_that_stand_whole_on_ranks_change_no_bit(family: str) -> None:
    path = checkpoint(family)
    for dtype, num_ranks in (("float32", 2), ("bfloat16", 3)):
        one = results(path, 1, dtype=dtype)
        several = results(path, num_ranks, dtype=dtype, enable_expert_parallel=True)
        assert several == one, f"{num_ranks} ranks in {dtype}"


def test_routers_without_a_favourite_choose_alike_on_all_ranks(tmp_path: Path) -> None:
    """Every expert is as good as the others: a bit more on one rank, and it would choose others."""
    from safetensors.numpy import load_file, save_file

    path = tmp_path / "model"
    shutil.copytree(checkpoint("mixtral"), path)
    tensors = load_file(path / "model.safetensors")
    routers = [name for name in tensors if name.endswith("gate.weight")]
    assert routers
    for name in routers:
        tensors[name][:] = tensors[name][0]
    save_file(tensors, path / "model.safetensors")
    assert_ranks_change_no_bit(path, [2, 5], dtype="float32")
    assert_ranks_change_no_bit(path, [3], dtype="float32", enable_expert_parallel=True)


def test_more_ranks_than_experts_are_refused() -> None:
    with pytest.raises(NotSupported, match=r"enable_expert_parallel: the model has . experts, few"):
        results(checkpoint("mixtral"), 9, enable_expert_parallel=True)


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_ranks_change_no_bit_of_a_quantized_model(name: str) -> None:
    path = checkpoint("llama", hidden_size=128, intermediate_size=256)  # whole groups
    assert_ranks_change_no_bit(path, [2, 5], quantization=name)


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_ranks_change_no_bit_of_a_gguf_file(kind: str, tmp_path: Path) -> None:
    source = checkpoint("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    path = write_gguf(tmp_path / "model.gguf", source, in_format(kind))
    assert_ranks_change_no_bit(path, [3])


@pytest.mark.parametrize("options", [{"speculative_config": {"method": "ngram"}}, {"seed": 7}])
def test_ranks_change_no_bit_beside_other_options(options: dict[str, Any]) -> None:
    path = checkpoint("llama")
    assert_ranks_change_no_bit(path, [2, 4], kv_cache_dtype="fp8", block_size=8, **options)


def test_more_ranks_than_columns_are_refused() -> None:
    with pytest.raises(NotSupported, match="tensor_parallel_size=60: the model has 48 outputs of "):
        results(checkpoint("llama"), 60)


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_suite_holds_on_ranks(num_ranks: int) -> None:
    suite = Path(__file__).with_name("test_invariance.py")
    env = {**os.environ, "LLMSERVE_TEST_RANKS": str(num_ranks)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(suite)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]
