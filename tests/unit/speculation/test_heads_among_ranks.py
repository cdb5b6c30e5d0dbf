"""Heads of a model that is cut among ranks: cut like it, as often right, and no token changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from checkpoints import VOCAB_SIZE, make_checkpoint  # noqa: E402
from heads import add_draft_layer, bigram_target, right_head  # noqa: E402
from llmserve import LLM, SamplingParams, _core  # noqa: E402
from llmserve import _core_testing as testing  # noqa: E402
from test_heads import (  # noqa: E402
    OPTIONS,
    check_right_head,
    check_useless_heads,
    prompts,
    sampled,
    tokens,
)

METHODS = ["eagle3", "eagle", "medusa"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bigram_target(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture(scope="module")
def expected(target: Path) -> Iterator[list[list[int]]]:
    with LLM(str(target), **OPTIONS) as llm:
        yield tokens(llm.generate(ASKED, PARAMS, use_tqdm=False))


ASKED = prompts(1, 20, 45, 33)
PARAMS = [sampled(1), sampled(2, n=3), sampled(3, temperature=0.0), sampled(4)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 3, "max_num_batched_tokens": 16, "max_num_seqs": 8},
    ],
    ids=["two", "three, chunks"],
)
def test_a_head_that_fits_is_right(
    tmp_path: Path,
    target: Path,
    expected: list[list[int]],
    method: str,
    options: dict[str, Any],
) -> None:
    config = {
        "model": str(right_head(method, target, tmp_path)),
        "num_speculative_tokens": 4,
        "adaptive": False,
    }
    with LLM(str(target), speculative_config=config, **OPTIONS, **options) as llm:
        plan = LLM.plan(str(target), speculative_config=config, **OPTIONS, **options)
        least = 0.2 if method == "medusa" else 0.9
        check_right_head(llm, plan, ASKED, PARAMS, expected, least)


def test_heads_of_no_use_change_no_token_whatever_is_asked_for(tmp_path: Path) -> None:
    check_useless_heads(METHODS, tmp_path, {"tensor_parallel_size": 2})


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("glm4_moe", {"tensor_parallel_size": 2}),
        ("glm4_moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("deepseek_v3", {"tensor_parallel_size": 3}),
    ],
    ids=str,
)
def test_a_layer_of_the_models_own_file_guesses_the_same_on_any_number_of_ranks(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    make_checkpoint(tmp_path, family, num_hidden_layers=2, eos_token_id=None)
    add_draft_layer(tmp_path, 2, VOCAB_SIZE)
    config = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    asked, params = prompts(20, 3), sampled(max_tokens=30)

    def run(**settings: Any) -> tuple[list[list[int]], list[int]]:
        with LLM(str(tmp_path), **OPTIONS, **settings) as llm:
            found = tokens(llm.generate(asked, params, use_tqdm=False))
            counts = llm.get_metrics()
            return found, [counts.num_draft_tokens, counts.num_accepted_tokens]

    plain, _ = run()
    alone = run(speculative_config=config)
    assert alone[0] == plain
    assert run(speculative_config=config, **options) == alone


def test_a_rank_that_fails_costs_no_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: Path
) -> None:
    """In an exchange of the head it is switched off; in one of the target the step runs again."""
    asked, params = prompts(20, 7), SamplingParams(seed=1, max_tokens=40)
    with LLM(str(target), **OPTIONS) as llm:
        plain = tokens(llm.generate(asked, params, use_tqdm=False))
    config = {"model": str(right_head("eagle3", target, tmp_path)), "adaptive": False}
    num_failures = []
    for at in (11, 24, 40, 60, 70):

        def engine(
            loading: _core.LoadingModel, vocabulary: Any = None, *_: Any, at: int = at
        ) -> _core.Engine:
            faults = testing.RankFaultOptions(rank=1, fault="throw", fail_at_exchange=at)
            return testing.faulty_engine(loading.config, vocabulary=vocabulary, rank_faults=faults)

        monkeypatch.setattr(_core, "Engine", engine)
        with LLM(str(target), speculative_config=config, tensor_parallel_size=2, **OPTIONS) as llm:
            assert tokens(llm.generate(asked, params, use_tqdm=False)) == plain
            assert tokens(llm.generate(asked, params, use_tqdm=False)) == plain
            num_failures.append(llm.get_metrics().num_rank_failures)
        monkeypatch.undo()
    assert set(num_failures) == {0, 1}


def test_the_head_of_another_replica_guesses_for_who_has_moved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: Path, expected: list[list[int]]
) -> None:
    config = {"model": str(right_head("eagle3", target, tmp_path)), "adaptive": False}

    def engine(loading: _core.LoadingModel, vocabulary: Any = None, *_: Any) -> _core.Engine:
        faults = testing.FaultOptions(fail_at_step=3)
        return testing.faulty_engine(loading.config, faults, vocabulary=vocabulary)

    monkeypatch.setattr(_core, "Engine", engine)
    with LLM(str(target), speculative_config=config, data_parallel_size=2, **OPTIONS) as llm:
        assert tokens(llm.generate(ASKED, PARAMS, use_tqdm=False)) == expected
        assert llm.replicas()[1].num_taken_over > 0
    one = sampled(1)
    monkeypatch.undo()
    with LLM(str(target), **OPTIONS) as llm:
        alone = tokens(llm.generate(ASKED[1], one, use_tqdm=False))
    monkeypatch.setattr(_core, "Engine", engine)
    with LLM(str(target), speculative_config=config, data_parallel_size=2, **OPTIONS) as llm:
        assert tokens(llm.generate(ASKED[1], one, use_tqdm=False)) == alone
        other = llm.replicas()[1]
        assert other.num_taken_over == 1
        assert other.metrics.num_accepted_tokens > 0.9 * other.metrics.num_draft_tokens > 0
