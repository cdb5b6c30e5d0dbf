"""LLM.plan: what it says is what the engine then takes, and what does not fit is refused."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from llmserve import LLM, InvalidArgument, NotSupported, ResourceExhausted, SamplingParams, _core
from llmserve.common.units import human_bytes
from llmserve.options.engine_options import EngineOptions
from llmserve.plan import MemoryPlan

MIB = 2**20
TOLERANCE = 0.01  # of the promise: within 1%

SETTINGS: list[dict[str, Any]] = [
    {"num_gpu_blocks_override": 40},
    {"block_size": 8, "kv_cache_memory_bytes": MIB},
    {"block_size": 64, "max_num_batched_tokens": 64, "max_num_seqs": 3},
    {"max_num_batched_tokens": 2048, "kv_cache_dtype": "bfloat16", "max_model_len": 100},
    {"device": "ref", "num_gpu_blocks_override": 37},
    {"tensor_parallel_size": 3, "num_gpu_blocks_override": 40},
]


def check_equal(plan: MemoryPlan, use: _core.MemoryUse) -> None:
    assert plan.weight_bytes == use.weight_bytes
    assert plan.mapped_bytes == use.mapped_bytes
    assert plan.workspace_bytes == use.workspace_bytes
    assert plan.kv_cache_bytes == use.kv_cache_bytes


def cases() -> Iterator[Any]:
    """Each family with each type, and by turns with two of the settings; the long tier has all."""
    for number, family in enumerate(checkpoints.FAMILIES):
        for dtype, offset in (("float32", 0), ("float32", 2), ("bfloat16", 1)):
            turn = (number + offset) % len(SETTINGS)
            yield pytest.param(family, dtype, SETTINGS[turn], id=f"{family}-{dtype}-{turn}")
        for turn, settings in enumerate(SETTINGS):
            for dtype, offsets in (("float32", (0, 2)), ("bfloat16", (1,))):
                if (turn - number) % len(SETTINGS) not in offsets:
                    name = f"{family}-{dtype}-{turn}"
                    yield pytest.param(family, dtype, settings, id=name, marks=pytest.mark.long)


@pytest.mark.parametrize(("family", "dtype", "settings"), cases())
def test_the_plan_is_what_the_engine_allocates(
    family: str, dtype: str, settings: dict[str, Any]
) -> None:
    path = checkpoints.checkpoint(family, num_hidden_layers=4, intermediate_size=480)
    arguments = {"max_num_seqs": 4, "num_threads": 1, "dtype": dtype, **settings}
    plan = LLM.plan(path, **arguments)
    assert plan.refusal is None
    before = _core.host_allocations().num_bytes
    with LLM(path, **arguments) as llm:
        check_equal(plan, llm._open_engine().memory_use)
        measured = _core.host_allocations().num_bytes - before
        prompts = [{"prompt_token_ids": [7] * length} for length in (90, 1, 33)]
        params = SamplingParams(max_tokens=5, top_k=5, logprobs=3)
        llm.generate(prompts, params, use_tqdm=False)
        assert _core.host_allocations().num_bytes - before == measured  # no step takes more
    planned = plan.total_bytes - plan.mapped_bytes
    assert abs(measured - planned) <= TOLERANCE * planned
    assert _core.host_allocations().num_bytes == before


@pytest.mark.parametrize(
    ("family", "size"), [("deepseek_v3", 3), ("minicpm3", 6), ("llama", 3), ("gemma3_text", 3)]
)
def test_the_plan_of_ranks_that_keep_one_cache_is_what_they_allocate(
    family: str, size: int
) -> None:
    path = checkpoints.checkpoint(family, num_hidden_layers=4, intermediate_size=480)
    arguments: dict[str, Any] = {"max_num_seqs": 4, "num_threads": 1, "dtype": "float32"}
    arguments |= {"tensor_parallel_size": 6, "decode_context_parallel_size": size}
    plan = LLM.plan(path, num_gpu_blocks_override=40, **arguments)
    assert sum(rank.kv_cache_bytes for rank in plan.ranks) == plan.kv_cache_bytes
    before = _core.host_allocations().num_bytes
    with LLM(path, num_gpu_blocks_override=40, **arguments) as llm:
        check_equal(plan, llm._open_engine().memory_use)
        measured = _core.host_allocations().num_bytes - before
    assert abs(measured - plan.total_bytes + plan.mapped_bytes) <= TOLERANCE * plan.total_bytes


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss", "qwen2_moe"])
def test_the_plan_of_ranks_with_whole_experts_is_what_they_allocate(family: str) -> None:
    path = checkpoints.checkpoint(family)
    arguments: dict[str, Any] = {"max_model_len": 100, "max_num_seqs": 4, "num_threads": 2}
    arguments |= {"num_gpu_blocks_override": 40, "tensor_parallel_size": 2}
    arguments |= {"enable_expert_parallel": True}
    plan = LLM.plan(path, **arguments)
    assert len(plan.ranks) == 2
    assert sum(rank.weight_bytes for rank in plan.ranks) == plan.weight_bytes
    assert sum(rank.kv_cache_bytes for rank in plan.ranks) == plan.kv_cache_bytes
    assert "rank 1" in str(plan)
    before = _core.host_allocations().num_bytes
    with LLM(path, **arguments) as llm:
        check_equal(plan, llm._open_engine().memory_use)
        measured = _core.host_allocations().num_bytes - before
        prompts = [{"prompt_token_ids": [7] * length} for length in (90, 1, 33)]
        llm.generate(prompts, SamplingParams(max_tokens=5), use_tqdm=False)
        assert _core.host_allocations().num_bytes - before == measured  # no step takes more


_MEASURE = """
import sys
from pathlib import Path
from llmserve import LLM, SamplingParams

def resident():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])

arguments = dict(max_num_seqs=4, num_threads=1, num_gpu_blocks_override=128)
params = SamplingParams(max_tokens=1)
prompt = [5] * 2000
LLM(sys.argv[2], **arguments).generate([prompt], params, use_tqdm=False)  # what Python takes once
before = resident()
plan = LLM.plan(sys.argv[1], **arguments)
llm = LLM(sys.argv[1], **arguments)
llm.generate([prompt], params, use_tqdm=False)  # touches nearly all of the pool
print(resident() - before, plan.total_bytes - plan.mapped_bytes)
"""
# The tokenizer's copy, thread stacks, malloc's arenas and what is not touched.
RESIDENT_SLACK_BYTES = 6 * MIB


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_the_plan_is_what_becomes_resident() -> None:
    sizes = dict(hidden_size=512, intermediate_size=1024, max_position_embeddings=2048)
    model = checkpoints.checkpoint(
        "llama", num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=8, **sizes
    )
    small = checkpoints.checkpoint("llama", max_position_embeddings=2048)
    package = str(Path(sys.modules["llmserve"].__file__ or "").parents[1])
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(model), str(small)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": package},
    )
    resident, planned = (int(number) for number in done.stdout.split())
    assert planned > 80 * MIB
    assert abs(resident - planned) < RESIDENT_SLACK_BYTES


def test_groups_rows_and_kinds_add_up() -> None:
    path = checkpoints.checkpoint(
        "qwen2", use_sliding_window=True, sliding_window=32, max_window_layers=1
    )
    plan = LLM.plan(path, num_gpu_blocks_override=64)
    assert sum(group.num_bytes for group in plan.weights) == plan.weight_bytes
    assert sum(kind.bytes_per_token for kind in plan.kv_layers) == plan.kv_bytes_per_token
    assert {kind.window for kind in plan.kv_layers} == {0, 32}
    assert plan.num_tokens == 64 // 2 * 16  # windowed and full layers have blocks of their own
    assert plan.kv_cache_bytes == plan.num_tokens * plan.kv_bytes_per_token
    assert plan.pool_bound == "num_gpu_blocks_override"
    row = next(row for row in plan.rows if row.dtype == plan.kv_cache_dtype)
    assert (row.num_blocks, row.bytes_per_token) == (64, plan.kv_bytes_per_token)


def test_users_are_counted_in_whole_blocks_for_every_kv_dtype() -> None:
    path = checkpoints.checkpoint("llama")
    # 384 bytes a token: 2 layers, 2 KV heads, 12 + 12 elements of 4 bytes
    plan = LLM.plan(path, kv_cache_memory_bytes=384 * 16 * 64, contexts=[1, 16, 17, 256])
    assert [plan.num_users(context) for context in (1, 16, 17, 256)] == [64, 64, 32, 4]
    assert plan.num_users(256, "bfloat16") == 8
    assert plan.num_users(256, "int8") == 16
    assert plan.num_users(256, "fp8") == 384 * 16 * 64 // (2 * 2 * (12 + 4 + 12 + 4) * 256) == 12
    assert plan.num_users(256, "int4") == 32
    supported = {row.dtype for row in plan.rows if row.is_supported}
    assert supported == {"float32", "bfloat16", "fp8"}


def test_a_kv_dtype_that_is_only_planned_does_not_run() -> None:
    for name in ("int8", "float16", "fp8_e5m2"):
        with pytest.raises(NotSupported, match=f"auto, float32, bfloat16 or fp8, got .{name}"):
            LLM(checkpoints.checkpoint("llama"), kv_cache_dtype=name)


def test_a_plan_in_fp8_is_what_the_engine_takes() -> None:
    path = checkpoints.checkpoint("llama")
    for name in ("fp8", "fp8_e4m3"):
        settings = {"kv_cache_dtype": name, "num_gpu_blocks_override": 64}
        plan = LLM.plan(path, **settings)
        assert plan.kv_cache_dtype == "fp8"
        assert plan.kv_bytes_per_token == 2 * 2 * (12 + 4 + 12 + 4)
        with LLM(path, **settings) as llm:
            assert llm._open_engine().memory_use.kv_cache_bytes == plan.kv_cache_bytes
            assert "in fp8" in repr(llm)


def test_heads_that_fp8_does_not_take_are_refused_before_anything_is_loaded() -> None:
    path = checkpoints.checkpoint("llama", head_dim=6)
    with pytest.raises(NotSupported, match=r"'fp8' takes heads of a multiple of 4 .* keys of 6"):
        LLM.plan(path, kv_cache_dtype="fp8")


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_config_alone_plans_as_its_checkpoint(family: str, dtype: str) -> None:
    path = checkpoints.checkpoint(family, dtype=dtype)
    settings = {"num_gpu_blocks_override": 40, "max_num_seqs": 2}
    whole, alone = LLM.plan(path, **settings), LLM.plan(path / "config.json", **settings)
    assert alone.weights == whole.weights
    assert alone.workspace_bytes == whole.workspace_bytes
    assert alone.kv_cache_bytes == whole.kv_cache_bytes
    assert alone.dtype == whole.dtype == dtype


def test_the_default_pool_is_half_of_what_is_left_after_weights_and_workspace() -> None:
    path = checkpoints.checkpoint("llama")
    plan = LLM.plan(path, available_memory_bytes=16 * MIB)
    assert plan.gpu_memory_utilization == 0.5
    assert plan.pool_bound == "gpu_memory_utilization"
    left = 8 * MIB - plan.weight_bytes - plan.workspace_bytes
    assert plan.num_blocks == left // (16 * 384)
    most = LLM.plan(path, available_memory_bytes=16 * MIB, gpu_memory_utilization=1.0)
    assert 0 <= 16 * MIB - most.total_bytes < 16 * 384


def test_the_default_pool_is_no_larger_than_its_sequences_can_fill() -> None:
    plan = LLM.plan(checkpoints.checkpoint("llama"), max_num_seqs=3)
    assert plan.pool_bound == "max_num_seqs"
    assert plan.num_tokens == 3 * plan.max_model_len


def test_a_second_llm_sees_what_the_first_was_promised() -> None:
    path = checkpoints.checkpoint("llama")
    before = LLM.plan(path).reserved_bytes
    with LLM(path, kv_cache_memory_bytes=256 * MIB, num_threads=1):
        # Nothing has touched the pool, so that the system still counts it as free.
        reserved = LLM.plan(path).reserved_bytes - before
        assert 255 * MIB < reserved < 257 * MIB + 32 * MIB
    assert LLM.plan(path).reserved_bytes == before


def resolve(path: Path, available: int, **arguments: Any) -> _core.EngineConfig:
    options = EngineOptions(path, **arguments)
    request = options.to_request(path, available_memory_bytes=available)
    return _core.resolve_config(request, _core.Checkpoint(str(path)))


def refusal(path: Path, available: int, **arguments: Any) -> str:
    """What LLM says in so much memory; LLM.plan says the same."""
    with pytest.raises(ResourceExhausted) as caught:
        resolve(path, available, **arguments)
    plan = LLM.plan(path, available_memory_bytes=available, **arguments)
    assert plan.refusal == str(caught.value)
    assert f"does not fit   {plan.refusal}" in str(plan)
    return plan.refusal


def share_for(needed: int, available: int) -> float:
    """In hundredths, rounded up; the bytes of weights and workspace depend on the machine."""
    return math.ceil(100 * needed / available) / 100


def test_weights_that_do_not_fit_are_refused_with_the_numbers() -> None:
    path = checkpoints.checkpoint("llama")
    plan = LLM.plan(path)
    fixed = plan.weight_bytes + plan.workspace_bytes
    sequence = 256 * 384
    available = 2 * fixed - 2
    share = share_for(fixed + sequence, available)
    assert refusal(path, available) == (
        f"the model needs {human_bytes(plan.weight_bytes)} of weights and "
        f"{human_bytes(plan.workspace_bytes)} of workspace, {human_bytes(fixed)} together, and 0.5 "
        f"of the {human_bytes(available)} available (of {human_bytes(available)}) is "
        f"{human_bytes(available // 2)}; pass gpu_memory_utilization={share:g} or more, "
        f'dtype="bfloat16" if it is not, a smaller model or max_num_batched_tokens, or free memory'
    )
    resolve(path, available, gpu_memory_utilization=share)  # what it says helps


def test_a_pool_too_small_for_one_sequence_is_refused_with_what_to_pass() -> None:
    path = checkpoints.checkpoint("llama")
    needs = "a sequence of max_model_len=256 tokens needs 96.0 KiB of KV cache (384 B a token), "
    assert refusal(path, 64 * MIB, kv_cache_memory_bytes=40000) == (
        needs + "and the pool has 36.0 KiB (by kv_cache_memory_bytes); pass "
        "kv_cache_memory_bytes=98304 or more, or max_model_len=96 or less"
    )
    assert refusal(path, 64 * MIB, num_gpu_blocks_override=2) == (
        needs + "and the pool has 12.0 KiB (by num_gpu_blocks_override); pass "
        "num_gpu_blocks_override=16 or more, or max_model_len=32 or less"
    )
    plan = LLM.plan(path)
    fixed = plan.weight_bytes + plan.workspace_bytes
    available = 2 * (fixed + 6144)
    share = share_for(fixed + 98304, available)
    assert refusal(path, available) == (
        needs + "and the pool has 6.0 KiB (by gpu_memory_utilization); pass "
        f"gpu_memory_utilization={share:g} or more, or max_model_len=16 or less"
    )
    resolve(path, available, gpu_memory_utilization=share)
    resolve(path, available, max_model_len=16)


def test_a_pool_that_memory_cannot_hold_is_refused_with_what_would_fit() -> None:
    path = checkpoints.checkpoint("llama")
    plan = LLM.plan(path)
    available = 64 * MIB
    fits = (available - plan.weight_bytes - plan.workspace_bytes) // 6144
    assert refusal(path, available, kv_cache_memory_bytes=6144 * 20000) == (
        f"weights of {human_bytes(plan.weight_bytes)}, workspace of "
        f"{human_bytes(plan.workspace_bytes)} and a KV cache of 117.2 MiB (by "
        f"kv_cache_memory_bytes) are "
        f"{human_bytes(plan.weight_bytes + plan.workspace_bytes + 122880000)}, and 64.0 MiB are "
        f"available; pass kv_cache_memory_bytes={fits * 6144} or less, or free memory"
    )
    resolve(path, available, kv_cache_memory_bytes=fits * 6144)
    assert f"pass num_gpu_blocks_override={fits} or less" in refusal(
        path, available, num_gpu_blocks_override=20000
    )
    with pytest.raises(ResourceExhausted, match="are available; pass kv_cache_memory_bytes="):
        LLM(path, kv_cache_memory_bytes=2**50)


def test_the_order_of_what_sets_the_pool() -> None:
    path = checkpoints.checkpoint("llama")
    both = {"num_gpu_blocks_override": 20, "kv_cache_memory_bytes": MIB}
    assert LLM.plan(path, **both).num_blocks == 20
    assert LLM.plan(path, kv_cache_memory_bytes=MIB, gpu_memory_utilization=0.9).pool_bound == (
        "kv_cache_memory_bytes"
    )


def test_speed_is_bounded_by_reading_and_by_arithmetic() -> None:
    path = checkpoints.checkpoint("llama")
    plan = LLM.plan(path, num_gpu_blocks_override=64, contexts=[256], bandwidth=1e9, max_num_seqs=4)
    (row,) = plan.speed
    embedding = plan.weights[0]
    assert embedding.name == "embedding"
    read = plan.weight_bytes - embedding.num_bytes
    assert row.batch == 4
    assert row.one_user_tokens_per_s == pytest.approx(1e9 / (read + 256 * 384))
    assert row.all_users_tokens_per_s == pytest.approx(4e9 / (read + 4 * 256 * 384))
    assert row.prefill_tokens_per_s is None
    slow = LLM.plan(path, contexts=[256], bandwidth=1e9, flops=1e6).speed[0]
    assert slow.all_users_tokens_per_s == slow.prefill_tokens_per_s == 1e6 / (2 * read / 4)
    with pytest.raises(InvalidArgument, match="needs a bandwidth beside flops"):
        LLM.plan(path, flops=1e12)


def test_a_plan_reads_well_as_text_html_and_json() -> None:
    plan = LLM.plan(checkpoints.checkpoint("llama"), bandwidth=1e10, flops=1e11)
    text = str(plan)
    for part in ("LlamaForCausalLM in float32 on cpu", "mapped from the file", "users at 256"):
        assert part in text
    assert "int8 *" in text
    assert "does not run this KV dtype yet" in text
    page = plan._repr_html_()
    assert page.count("<table>") == 2
    assert json.loads(json.dumps(plan.to_dict()))["kv_cache_bytes"] == plan.kv_cache_bytes


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"max_modellen": 5},
        InvalidArgument,
        r"LLM\.plan has no argument 'max_modellen'; did you mean",
    ),
    ({"enable_lora": True}, NotSupported, r"LLM\.plan: enable_lora=True is not supported: ad"),
    ({"gpu_memory_utilization": 1.5}, InvalidArgument, r"must be in \(0, 1\], got 1\.5"),
    ({"contexts": [257]}, InvalidArgument, "contexts must be between 1 and 256, got 257"),
    ({"available_memory_bytes": -1}, InvalidArgument, "available_memory_bytes must be between 0"),
    ({"bandwidth": 0.0}, InvalidArgument, "bandwidth must be finite and above 0"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD)
def test_a_bad_argument_is_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM.plan(checkpoints.checkpoint("llama"), **arguments)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_k2"])
def test_deepseek_v3_keeps_one_latent_a_token_and_layer(model_type: str, tmp_path: Path) -> None:
    fields = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": model_type,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    plan = LLM.plan(path, available_memory_bytes=2**41)
    by_dtype = {row.dtype: row.bytes_per_token for row in plan.rows}
    assert by_dtype["bfloat16"] == 61 * (512 + 64) * 2 == 70272
    assert by_dtype["bfloat16"] < 0.1 * 61 * 128 * (128 + 64 + 128) * 2  # keys and values of heads
    (experts,) = (group.num_bytes for group in plan.weights if group.name == "experts")
    assert experts == 58 * 256 * 3 * 7168 * 2048 * 2
