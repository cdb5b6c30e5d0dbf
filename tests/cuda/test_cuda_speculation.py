"""Guesses on a device, of draft models and heads: checked in recorded steps, and exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from checkpoints import VOCAB_SIZE, checkpoint, make_checkpoint  # noqa: E402
from llmserve import LLM, SamplingParams, StructuredOutputsParams, _core_testing  # noqa: E402
from unit.speculation.heads import (  # noqa: E402
    VOCAB,
    add_draft_layer,
    bigram_target,
    random_head,
    right_head,
)

REASON = _core_testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]

OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "max_model_len": 64,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 32,
    "block_size": 8,
    "dtype": "float32",
}


@pytest.fixture(scope="module", autouse=True)
def plain_products() -> Any:
    """With the same bits whatever the batch is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMSERVE_CUDA_GEMM", "plain")
        yield


def prompts(vocabulary: int = VOCAB) -> list[dict[str, list[int]]]:
    return [
        {"prompt_token_ids": [(7 * i + 11 * j) % vocabulary for i in range(length)]}
        for j, length in enumerate((5, 11))
    ]


def params(max_tokens: int, **fields: Any) -> list[SamplingParams]:
    """One drawn, one greedy."""
    return [
        SamplingParams(temperature=1.3 if i == 0 else 0.0, seed=i, max_tokens=max_tokens, **fields)
        for i in range(2)
    ]


def run(model: Path | str, asked: Any, wanted: Any, **options: Any) -> tuple[Any, Any]:
    """Token ids and log-probabilities, and the metrics."""
    with LLM(str(model), **{**OPTIONS, **options}) as llm:
        outputs = llm.generate(asked, wanted, use_tqdm=False)
        found = [(one.token_ids, repr(one.logprobs)) for o in outputs for one in o.outputs]
        return found, llm.get_metrics()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bigram_target(tmp_path_factory.mktemp("target") / "target")


@pytest.mark.parametrize("method", ["eagle3", "eagle", "medusa"])
def test_a_head_that_fits_is_right(tmp_path: Path, target: Path, method: str) -> None:
    expected, plain = run(target, prompts(), params(16))
    config = {
        "model": str(right_head(method, target, tmp_path)),
        "num_speculative_tokens": 3,
        "adaptive": False,
    }
    found, metrics = run(target, prompts(), params(16), speculative_config=config)
    assert found == expected
    least = 0.3 if method == "medusa" else 0.85
    assert metrics.num_accepted_tokens > least * metrics.num_draft_tokens > 0
    assert plain.num_graph_replays > 0
    assert metrics.num_graph_captures > 0


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_a_head_of_no_use_changes_nothing(tmp_path: Path, method: str) -> None:
    """Its vocabulary is a part of the target's, and requests ask for what the host edits."""
    model = checkpoint("llama")
    random_head(method, model, tmp_path)
    config = {"model": str(tmp_path), "num_speculative_tokens": 3, "adaptive": False}
    wanted = [
        *params(10, logprobs=2, presence_penalty=0.5),
        SamplingParams(
            max_tokens=8, seed=1, structured_outputs=StructuredOutputsParams(regex="(a|th|[x-z]e)+")
        ),
    ]
    asked = [*prompts(VOCAB_SIZE), {"prompt_token_ids": [5, 6]}]
    expected, _ = run(model, asked, wanted)
    found, metrics = run(model, asked, wanted, speculative_config=config)
    assert found == expected
    assert metrics.num_draft_tokens > 0


# A head is cut like layers; a draft model runs on the first rank's GPU.
@pytest.mark.parametrize("method", ["eagle3", "medusa", "draft_model"])
def test_guesses_among_gpus_change_nothing(tmp_path: Path, target: Path, method: str) -> None:
    if _core_testing.num_gpus() < 2:
        pytest.skip(f"2 GPUs are needed, and {_core_testing.num_gpus()} are visible")
    drafter = target if method == "draft_model" else right_head(method, target, tmp_path)
    config = {"model": str(drafter), "num_speculative_tokens": 3, "adaptive": False}
    expected, _ = run(target, prompts(), params(12))
    guessed, metrics = run(
        target, prompts(), params(12), tensor_parallel_size=2, speculative_config=config
    )
    assert guessed == expected
    assert metrics.num_accepted_tokens > 0


# Each replica has a head, or a draft model, of its own; of stages the last one has it, and is sent
# the states of the others.
@pytest.mark.parametrize(
    ("method", "layout"),
    [
        ("eagle", "data_parallel_size"),
        ("draft_model", "data_parallel_size"),
        ("eagle3", "pipeline_parallel_size"),
    ],
)
def test_guesses_of_replicas_and_stages_change_nothing(
    tmp_path: Path, target: Path, method: str, layout: str
) -> None:
    if _core_testing.num_gpus() < 2:
        pytest.skip(f"2 GPUs are needed, and {_core_testing.num_gpus()} are visible")
    drafter = target if method == "draft_model" else right_head(method, target, tmp_path)
    config = {"model": str(drafter), "num_speculative_tokens": 3, "adaptive": False}
    expected, _ = run(target, prompts(), params(12))
    guessed, metrics = run(target, prompts(), params(12), speculative_config=config, **{layout: 2})
    assert guessed == expected
    assert metrics.num_accepted_tokens > 0


# Sums over ranks have an order of their own, which guesses do not change.
def test_guesses_among_gpus_that_cut_along_k_change_nothing(tmp_path: Path, target: Path) -> None:
    if _core_testing.num_gpus() < 2:
        pytest.skip(f"2 GPUs are needed, and {_core_testing.num_gpus()} are visible")
    drafter = right_head("eagle3", target, tmp_path)
    config = {"model": str(drafter), "num_speculative_tokens": 3, "adaptive": False}
    options = {"tensor_parallel_size": 2, "tensor_parallel_cut": "rows"}
    expected, _ = run(target, prompts(), params(12), **options)
    guessed, metrics = run(target, prompts(), params(12), speculative_config=config, **options)
    assert guessed == expected
    assert metrics.num_accepted_tokens > 0


def test_a_layer_of_the_models_own_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "glm4_moe", num_hidden_layers=2, eos_token_id=None)
    add_draft_layer(tmp_path, 2, VOCAB_SIZE)
    expected, _ = run(tmp_path, prompts(VOCAB_SIZE), params(8))
    config = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
    found, metrics = run(tmp_path, prompts(VOCAB_SIZE), params(8), speculative_config=config)
    assert found == expected
    assert metrics.num_draft_tokens > 0


@pytest.mark.parametrize("eager", [False, True])
def test_a_draft_model_that_is_the_target_is_right_and_steps_are_recorded(eager: bool) -> None:
    """Once all shapes have come no step is asked for one by one, but for those in which the draft
    catches up with a guess that was right and the token behind it."""
    model = checkpoint("qwen3")
    wanted = [SamplingParams(temperature=0.0, max_tokens=28, ignore_eos=True)]
    asked = prompts(VOCAB_SIZE)[:1]
    expected, _ = run(model, asked, wanted, enforce_eager=eager)
    config = {"model": str(model), "num_speculative_tokens": 3, "adaptive": False}
    with LLM(str(model), speculative_config=config, **{**OPTIONS, "enforce_eager": eager}) as llm:
        for _ in range(3):  # a shape is recorded when it comes for the second time
            before = llm.get_metrics()
            outputs = llm.generate(asked, wanted, use_tqdm=False)
            assert [(one.token_ids, repr(one.logprobs)) for one in outputs[0].outputs] == expected
        after = llm.get_metrics()
    assert after.num_accepted_tokens == after.num_draft_tokens > 24
    num_verified = after.num_drafts - before.num_drafts
    num_guesses = after.num_draft_tokens - before.num_draft_tokens
    num_replays = after.num_graph_replays - before.num_graph_replays
    if eager:
        assert after.num_graph_captures == after.num_graph_replays == 0
    else:
        assert after.num_graph_captures == before.num_graph_captures
        # Of each round the first guess is behind two rows.
        assert num_replays >= num_verified + (num_guesses - num_verified)


@pytest.mark.parametrize("method", ["draft_model", "eagle", "medusa"])
def test_trees_change_nothing_and_fill_steps_up_to_the_rows_that_keep_their_bits(
    tmp_path: Path, target: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where products are the device's own, all branches run; and where a library chooses by the
    number of rows, as many as eight rows hold."""
    model = target if method == "draft_model" else right_head(method, target, tmp_path)
    config = {
        "model": str(model),
        "num_speculative_tokens": 2,
        "speculative_token_tree": [(0,), (1,), (0, 0), (1, 0)],
        "adaptive": False,
    }
    wanted = params(12, logprobs=1)
    for products in ("plain", "auto"):
        monkeypatch.setenv("LLMSERVE_CUDA_GEMM", products)
        expected, _ = run(target, prompts(), wanted, max_num_batched_tokens=16)
        with LLM(
            str(target), speculative_config=config, **{**OPTIONS, "max_num_batched_tokens": 16}
        ) as llm:
            outputs = llm.generate(prompts(), wanted, use_tqdm=False)
            found = [(one.token_ids, repr(one.logprobs)) for o in outputs for one in o.outputs]
            steps = [step for step in llm.trace() if step.num_draft_tokens > 0]
            metrics = llm.get_metrics()
        assert found == expected
        assert metrics.num_accepted_tokens > 0
        num_rows = max(step.num_tokens for step in steps if step.num_prefill_tokens == 0)
        assert num_rows <= 8 if products == "auto" else num_rows > 8


def test_guesses_fill_a_step_up_to_the_rows_that_keep_their_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a library chooses by the number of rows: eight, and one where it has all products."""
    model = checkpoint("qwen3")
    wanted = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)] * 3
    asked = [{"prompt_token_ids": [5 + i, 6, 7]} for i in range(3)]
    config = {"model": str(model), "num_speculative_tokens": 4, "adaptive": False}
    monkeypatch.setenv("LLMSERVE_CUDA_GEMM", "auto")
    expected, _ = run(model, asked, wanted, max_num_batched_tokens=8, max_num_seqs=3)
    with LLM(
        str(model),
        speculative_config=config,
        **{**OPTIONS, "max_num_batched_tokens": 8, "max_num_seqs": 3},
    ) as llm:
        outputs = llm.generate(asked, wanted, use_tqdm=False)
        most = max(step.num_tokens for step in llm.trace())
        assert llm.get_metrics().num_draft_tokens > 0
    found = [(one.token_ids, repr(one.logprobs)) for o in outputs for one in o.outputs]
    assert found == expected
    assert most <= 8
