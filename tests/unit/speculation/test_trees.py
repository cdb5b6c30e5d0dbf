"""Trees of guesses: more of them are right a step than of chains, and no token is another."""

from __future__ import annotations

from typing import Any

import pytest
from llmserve import (
    LLM,
    NotSupported,
    SamplingParams,
    StructuredOutputsParams,
    _core_testing,
    demo_model_path,
)
from llmserve.checkpoint.model_files import demo_draft_path, demo_text_path

TREES: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 4},
    "three": {"num_speculative_tokens": 3},
    "likeliest": {
        "num_speculative_tokens": 4,
        "speculative_eagle_topk": 3,
        "speculative_num_draft_tokens": 16,
    },
    "two branches, three levels": {
        "speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), "
        "(0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]"
    },
}
COMMON: dict[str, Any] = {"num_threads": 1, "max_num_seqs": 4, "max_model_len": 256}


def demo(**config: Any) -> LLM:
    draft = {"model": str(demo_draft_path()), "adaptive": False, **config}
    return LLM(str(demo_model_path()), speculative_config=draft, **COMMON)


def prompts(llm: LLM, count: int) -> list[dict[str, list[int]]]:
    text = demo_text_path().read_text(encoding="utf-8")
    documents = [part.strip() for part in text.split("\n\n") if len(part) > 200]
    tokenizer = llm.get_tokenizer()
    return [{"prompt_token_ids": tokenizer.encode(part)[:24]} for part in documents[:count]]


def tokens(llm: LLM, given: list[Any], params: Any) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(given, params, use_tqdm=False)]


def test_a_tree_says_what_a_chain_says_in_fewer_steps() -> None:
    params = [SamplingParams(temperature=t, seed=1, max_tokens=64) for t in (0.0, 0.7, 1.0)]
    found, tokens_a_step = {}, {}
    with LLM(str(demo_model_path()), **COMMON) as plain:
        given = [p for p in prompts(plain, 4) for _ in params]
        expected = tokens(plain, given, params * 4)
    for name, config in TREES.items():
        with demo(**config) as llm:
            found[name] = tokens(llm, given, params * 4)
            metrics = llm.get_metrics()
            tokens_a_step[name] = 1 + metrics.num_accepted_tokens / metrics.num_drafts
            assert metrics.num_blocks_used == 0
    assert found == dict.fromkeys(TREES, expected)
    assert tokens_a_step["likeliest"] > tokens_a_step["chain"] + 0.15
    assert tokens_a_step["two branches, three levels"] > tokens_a_step["three"] + 0.1


def test_requests_with_edits_are_guessed_as_chains() -> None:
    """What edits a row knows it by the number of guesses before it, which rows of a tree share."""
    edits = [
        SamplingParams(temperature=0.7, seed=1, max_tokens=24, presence_penalty=0.5),
        SamplingParams(temperature=0.7, seed=2, max_tokens=24, logit_bias={5: 1.0}),
        SamplingParams(
            temperature=0.7,
            seed=3,
            max_tokens=24,
            structured_outputs=StructuredOutputsParams(regex="[a-z ]{40}"),
        ),
    ]
    plain_row = SamplingParams(temperature=0.7, seed=4, max_tokens=24, min_tokens=12, logprobs=2)
    num_guesses = {}
    for name in ("chain", "likeliest"):
        with demo(**TREES[name]) as llm:
            given = prompts(llm, 1)
            for kind, params in (("edits", edits), ("none", [plain_row])):
                before = llm.get_metrics()
                for one in params:
                    tokens(llm, given, one)
                now = llm.get_metrics()
                drafts = now.num_drafts - before.num_drafts
                num_guesses[name, kind] = (now.num_draft_tokens - before.num_draft_tokens) / drafts
    # A step whose mask is late has none.
    assert num_guesses["chain", "edits"] <= 4
    assert num_guesses["likeliest", "edits"] <= 4
    assert num_guesses["likeliest", "none"] > 8


def test_a_tree_of_no_more_guesses_than_are_wanted_runs() -> None:
    config = {"num_speculative_tokens": 6, "speculative_eagle_topk": 4}
    with demo(**config, speculative_num_draft_tokens=8) as llm:
        tokens(llm, prompts(llm, 2), SamplingParams(temperature=1.0, seed=1, max_tokens=40))
        metrics = llm.get_metrics()
    assert 6 < metrics.num_draft_tokens / metrics.num_drafts <= 8


def test_a_tree_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(NotSupported, match="is not supported with rejection_sample_method"):
        demo(speculative_eagle_topk=2, rejection_sample_method="rejection")


@pytest.mark.parametrize(
    ("row_us", "taken"),
    [
        (0.0, [True, True, True]),  # rows are free but for the least that they are taken to cost
        (40.0, [False, True, False]),
        (400.0, [False, False, False]),
    ],
)
def test_branches_run_where_their_rows_pay(row_us: float, taken: list[bool]) -> None:
    """Of a step that gives 5 tokens: (tokens, rows) of each branch, by what rows cost."""
    offers = [(0.2, 3), (0.9, 3), (0.3, 5)]
    found = _core_testing.choose_branches(offers, num_drafted=4, step_us=1000.0, row_us=row_us)
    assert found == taken
