"""Heads and draft models of a target whose layers are in several stages: the guesses and the tokens
of one rank. A head is where the last stage is, and reads states of layers of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from checkpoints import VOCAB_SIZE, checkpoint, make_checkpoint
from heads import add_draft_layer, bigram_target, random_head, right_head
from llmserve import LLM, SamplingParams, _core
from llmserve import _core_testing as testing
from llmserve.checkpoint.model_files import demo_model_path
from nodes import nodes
from test_heads import OPTIONS, check_useless_heads, prompts, sampled, tokens

NODES = {"cluster_key": "a key of these tests", "distributed_timeout_seconds": 60}
ASKED = prompts(1, 20, 45, 33)
# So high that a guess of a head with random weights is often right: both see the same noise.
PARAMS = [sampled(seed, temperature=3.0, ignore_eos=True) for seed in range(4)]


def stages(count: int, **others: Any) -> dict[str, Any]:
    return {"pipeline_parallel_size": count, **others}


def run(llm: LLM) -> tuple[list[list[int]], list[int]]:
    """What a head guesses hangs on the states that it reads, and how often it is right on that."""
    found = tokens(llm.generate(ASKED, PARAMS, use_tqdm=False))
    counts = llm.get_metrics()
    return found, [counts.num_draft_tokens, counts.num_accepted_tokens]


@pytest.fixture(scope="module")
def target() -> str:
    return str(checkpoint("llama", num_hidden_layers=4, eos_token_id=None))


@pytest.fixture(scope="module")
def plain(target: str) -> list[list[int]]:
    with LLM(target, **OPTIONS) as llm:
        return run(llm)[0]


@pytest.mark.parametrize(
    ("method", "options", "several"),
    [
        ("eagle3", {}, [stages(2), stages(3, tensor_parallel_size=2), stages(4)]),
        ("eagle3", {"speculative_eagle_topk": 3}, [stages(3)]),
        ("eagle", {}, [stages(2, tensor_parallel_size=2, max_num_batched_tokens=16)]),
        ("medusa", {}, [stages(3)]),
    ],
    ids=["eagle3", "trees", "eagle", "medusa"],
)
def test_a_head_guesses_what_it_does_on_one_rank(
    tmp_path: Path,
    target: str,
    plain: list[list[int]],
    method: str,
    options: dict[str, Any],
    several: list[dict[str, Any]],
) -> None:
    random_head(method, Path(target), tmp_path, layers=(0, 2, 3))
    config = {"model": str(tmp_path), "num_speculative_tokens": 3, "adaptive": False, **options}

    def of(**parallel: Any) -> tuple[list[list[int]], list[int]]:
        with LLM(target, speculative_config=config, **{**OPTIONS, **parallel}) as llm:
            plan = LLM.plan(target, speculative_config=config, **{**OPTIONS, **parallel})
            assert plan.draft is not None
            use = llm.get_memory_use()
            assert use.weight_bytes == plan.weight_bytes + plan.draft.weight_bytes
            assert use.workspace_bytes == plan.workspace_bytes + plan.draft.workspace_bytes
            assert use.kv_cache_bytes == plan.kv_cache_bytes + plan.draft.kv_cache_bytes
            return run(llm)

    for parallel in several:
        sizes = {name: size for name, size in parallel.items() if name.startswith("max_num")}
        alone = of(**sizes)
        assert alone[0] == plain
        assert 0 < alone[1][1] < alone[1][0]
        assert of(**parallel) == alone, parallel


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_layer_of_the_models_own_file_guesses_the_same_in_stages(
    tmp_path: Path, num_stages: int
) -> None:
    make_checkpoint(tmp_path, "glm4_moe", num_hidden_layers=3, eos_token_id=None)
    add_draft_layer(tmp_path, 3, VOCAB_SIZE)
    config = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    found = []
    for count in (1, num_stages):
        given = {**OPTIONS, **stages(count)}
        with LLM(str(tmp_path), speculative_config=config, **given) as llm:
            found.append(run(llm))
    assert found[0] == found[1]


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_a_head_beside_ranks_that_keep_one_cache(
    tmp_path: Path, method: str, num_stages: int
) -> None:
    """The head's own keys are each rank's."""
    config: dict[str, Any] = {"num_speculative_tokens": 3, "adaptive": False}
    if method == "mtp":
        model = tmp_path
        make_checkpoint(model, "deepseek_v3", num_hidden_layers=2, eos_token_id=None)
        add_draft_layer(model, 2, VOCAB_SIZE)
        config["method"] = "mtp"
    else:
        model = checkpoint("llama", num_key_value_heads=1, eos_token_id=None)
        random_head(method, model, tmp_path)
        config["model"] = str(tmp_path)
    found = []
    together = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    for parallel in ({}, {**together, **stages(num_stages)}):
        with LLM(str(model), speculative_config=config, **OPTIONS, **parallel) as llm:
            found.append(run(llm))
    assert found[0] == found[1]
    assert found[0][1][1] > 0


# Of three nodes the last has none of the last stage, and the first two share it.
@pytest.mark.parametrize(
    ("method", "num_nodes", "parallel"),
    [
        ("eagle3", 2, stages(2)),
        ("eagle3", 3, stages(2, tensor_parallel_size=2)),
        ("eagle", 2, stages(3)),
        ("medusa", 2, stages(2, tensor_parallel_size=3)),
    ],
    ids=str,
)
def test_a_head_guesses_the_same_where_stages_are_on_nodes(
    tmp_path: Path,
    target: str,
    plain: list[list[int]],
    method: str,
    num_nodes: int,
    parallel: dict[str, Any],
) -> None:
    random_head(method, Path(target), tmp_path, layers=(0, 2, 3))
    config = {"model": str(tmp_path), "num_speculative_tokens": 3, "adaptive": False}
    given = {**OPTIONS, "speculative_config": config}
    with LLM(target, **given) as llm:
        alone = run(llm)
    assert alone[0] == plain
    with (
        nodes(target, num_nodes, **given, **NODES, **parallel) as shared,
        LLM(target, **shared) as llm,
    ):
        assert run(llm) == alone
        assert llm.get_metrics().num_rank_failures == 0


def test_heads_of_no_use_change_no_token_whatever_is_asked_for(tmp_path: Path) -> None:
    check_useless_heads(("eagle3", "medusa"), tmp_path, stages(2))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_that_fails_costs_no_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: int
) -> None:
    model = bigram_target(tmp_path / "target")
    asked, params = prompts(20, 7), SamplingParams(seed=1, max_tokens=40)
    with LLM(str(model), **OPTIONS) as llm:
        expected = tokens(llm.generate(asked, params, use_tqdm=False))
    config = {"model": str(right_head("eagle3", model, tmp_path / "head")), "adaptive": False}
    for at in (0, 3, 8):

        def engine(
            loading: _core.LoadingModel, vocabulary: Any = None, *_: Any, at: int = at
        ) -> _core.Engine:
            faults = testing.RankFaultOptions(rank=rank, fault="throw", fail_at_exchange=at)
            return testing.faulty_engine(loading.config, vocabulary=vocabulary, rank_faults=faults)

        monkeypatch.setattr(_core, "Engine", engine)
        with LLM(str(model), speculative_config=config, **stages(2), **OPTIONS) as llm:
            assert tokens(llm.generate(asked, params, use_tqdm=False)) == expected
            assert llm.get_metrics().num_rank_failures == 1
            assert llm.get_metrics().num_accepted_tokens > 0
        monkeypatch.undo()


@pytest.mark.parametrize(
    "options",
    [{}, {"speculative_eagle_topk": 3}, {"rejection_sample_method": "rejection"}],
    ids=str,
)
def test_a_draft_model_guesses_while_other_stages_work(options: dict[str, Any]) -> None:
    """The rejection rule alone keeps to one step at a time; its greedy tokens are exact."""
    path = demo_model_path()
    config = {"model": "demo", "num_speculative_tokens": 3, "adaptive": False, **options}
    is_exact = "rejection_sample_method" not in options
    asked = [f"Once upon a time {word} " for word in ("a", "the", "one", "my", "no", "his")]
    params = [
        SamplingParams(max_tokens=30, temperature=0.8 * (i % 2) * is_exact, seed=i)
        for i in range(len(asked))
    ]
    found = []
    for given in ({}, {"speculative_config": config, **stages(2)}):
        with LLM(path, max_model_len=256, num_threads=1, **given) as llm:
            outputs = [llm.generate(asked, params, use_tqdm=False) for _ in range(2)]
            found.append([tokens(output) for output in outputs])
            if given:
                assert max(step.num_in_flight for step in llm.trace()) == 1 + is_exact
                assert llm.get_metrics().num_accepted_tokens > 0
    assert found[0] == found[1], json.dumps(options)
