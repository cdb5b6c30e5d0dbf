"""Experts that stand whole on GPUs: the tokens of one, whoever has a row's expert."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import checkpoint
from gpu_ranks import (
    FIELDS,
    Faults,
    expected,
    make_llm,
    need_gpus,
    plainly,
    run,
    told_faults,
    words,
)
from llmserve import LLM, SamplingParams
from llmserve import _core_testing as testing
from llmserve.errors import NotSupported
from safetensors.numpy import load_file, save_file

REASON = testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]


@pytest.fixture(scope="module", autouse=True)
def plain_products() -> Iterator[None]:
    yield from plainly()


@pytest.fixture
def faults() -> Iterator[Faults]:
    yield from told_faults()


def make_whole(num_ranks: int, family: str, **options: Any) -> LLM:
    return make_llm(num_ranks, family, enable_expert_parallel=True, **options)


# Routers of all kinds, experts beside one that all tokens have, biases, an expert whose weight
# scales its input. Steps have fewer tokens than ranks, and more.
@pytest.mark.parametrize(
    ("family", "num_ranks"), [("qwen3_moe", 2), ("deepseek_v3", 3), ("gpt_oss", 2)]
)
def test_tokens_are_those_of_one_rank(family: str, num_ranks: int) -> None:
    need_gpus(num_ranks)
    tokens = expected(family)
    with make_whole(num_ranks, family) as llm:
        assert words(run(llm)) == tokens
        use = llm.get_memory_use()
        assert llm.get_metrics().num_rank_failures == 0
    with make_llm(num_ranks, family) as llm:
        assert words(run(llm)) == tokens
        # Whole or cut, they take about as much.
        assert use.weight_bytes == pytest.approx(llm.get_memory_use().weight_bytes, rel=0.05)


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_other_weights_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    need_gpus(2)
    monkeypatch.setenv("LLMSERVE_CUDA_GEMM", "invariant")
    tokens = expected("qwen3_moe", **options)
    with make_whole(2, "qwen3_moe", **options) as llm:
        assert words(run(llm)) == tokens


def test_stages_and_replicas_of_whole_experts_have_the_same_tokens() -> None:
    need_gpus(4)
    tokens = expected("qwen3_moe", count_expert_loads=True)
    for field in ("pipeline_parallel_size", "data_parallel_size"):
        with make_whole(2, "qwen3_moe", **{field: 2}) as llm:
            assert words(run(llm)) == tokens


def test_a_rank_that_fails_is_computed_again(faults: Faults) -> None:
    tokens = expected("qwen3_moe")
    with make_whole(2, "qwen3_moe") as llm:
        faults.tell(rank=1, call=15, fault=1)
        assert words(run(llm)) == tokens
        assert llm.get_metrics().num_rank_failures == 1


OFTEN = {"step_interval": 3, "window_size": 2}


def balanced(config: dict[str, Any]) -> dict[str, Any]:
    return {"enable_eplb": True, "eplb_config": config}


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's model whose routers prefer the first half of the experts."""

    def make(family: str) -> Path:
        path = tmp_path_factory.mktemp(family) / "model"
        shutil.copytree(checkpoint(family, num_hidden_layers=3), path)
        (file,) = path.glob("*.safetensors")
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith(("router.bias", "e_score_correction_bias")):
                tensor[: (len(tensor) + 1) // 2] += 20
        save_file(tensors, file, {"format": "pt"})
        return path

    return functools.cache(make)


def make_crowded(path: Path, num_ranks: int, **options: Any) -> LLM:
    ranks = {"tensor_parallel_size": num_ranks, "enable_expert_parallel": num_ranks > 1}
    return LLM(path, **{**FIELDS, **ranks, **options})


# Experts with biases, of integers; three ranks, of which some have one more.
@pytest.mark.parametrize(
    ("family", "num_ranks", "options"),
    [
        ("gpt_oss", 2, {}),
        ("deepseek_v3", 3, {}),
        ("deepseek_v3", 2, {"quantization": "int8"}),
        ("gpt_oss", 2, {"pipeline_parallel_size": 2}),
    ],
)
def test_experts_that_move_change_no_bit(
    crowded: Callable[[str], Path], family: str, num_ranks: int, options: dict[str, Any]
) -> None:
    need_gpus(4)
    path = crowded(family)
    alone = {key: value for key, value in options.items() if key == "quantization"}
    with make_crowded(path, 1, **alone) as llm:
        tokens = words(run(llm))
    shares = {}
    for config in ({"step_interval": 0}, OFTEN):
        with make_crowded(path, num_ranks, **balanced(config), **options) as llm:
            assert words(run(llm)) == tokens
            assert words(run(llm)) == tokens
            rows = [sum(of) for of in zip(*llm.expert_rank_rows().values(), strict=True)]
            assert llm.get_metrics().num_rank_failures == 0
        shares[config["step_interval"]] = max(rows) / sum(rows)
    assert shares[3] < shares[0] - 0.05  # they have moved


def test_recorded_steps_stay_where_experts_move(crowded: Callable[[str], Path]) -> None:
    need_gpus(2)
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0)
    prompts = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [8, 9]}]

    def tokens(llm: LLM) -> list[Any]:
        return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]

    path = crowded("gpt_oss")
    with make_crowded(path, 1) as llm:
        alone = tokens(llm)
    with make_crowded(path, 2, **balanced(OFTEN)) as llm:
        assert tokens(llm) == alone
        metrics = llm.get_metrics()
    assert metrics.num_graph_replays > 10 * metrics.num_graph_captures > 0


def test_a_move_that_fails_has_weights_loaded_anew(
    faults: Faults, crowded: Callable[[str], Path]
) -> None:
    path = crowded("gpt_oss")
    with make_crowded(path, 1) as llm:
        tokens = words(run(llm))
    for call in (45, 50, 55):  # in the first move, or beside it
        with make_crowded(path, 2, **balanced({**OFTEN, "step_interval": 2})) as llm:
            faults.tell(rank=1, call=call, fault=1)
            assert words(run(llm)) == tokens
            assert llm.get_metrics().num_rank_failures == 1


def test_what_gpus_cannot_balance_is_refused_by_name() -> None:
    need_gpus(2)
    with pytest.raises(NotSupported, match="capacity_factor on device 'cuda'"):
        make_whole(2, "qwen3_moe", **balanced({"capacity_factor": 1.5}))
    with pytest.raises(NotSupported, match="num_redundant_experts on device 'cuda'"):
        make_whole(2, "qwen3_moe", **balanced({"num_redundant_experts": 1}))
