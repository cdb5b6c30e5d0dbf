"""Trees of heads: more guesses are right than of chains, and no token is another, whatever is asked
for and in any company."""

from __future__ import annotations

import functools
import itertools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from checkpoints import VOCAB_SIZE, make_checkpoint  # noqa: E402
from heads import VOCAB, add_draft_layer, bigram_target, right_head  # noqa: E402
from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from llmserve import LLM, NotSupported, SamplingParams  # noqa: E402
from test_equality import NAMES, params_of, prompt_of, results  # noqa: E402

METHODS = ("eagle3", "eagle", "medusa")
FULL_TREE = [path for level in (1, 2, 3) for path in itertools.product((0, 1), repeat=level)]
TREES: dict[str, dict[str, Any]] = {
    "chain": {},
    "likeliest": {"speculative_eagle_topk": 3},
    "few": {"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 6},
    "given": {"speculative_token_tree": FULL_TREE},
    "wide": {"speculative_token_tree": [(0,), (1,), (2,), (3,), (1, 0), (3, 0), (3, 0, 0)]},
    "decided": {"speculative_eagle_topk": 2, "adaptive": True},
}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 8},
    "few blocks": {"num_gpu_blocks_override": 17, "max_num_seqs": 8},
    "small blocks": {"block_size": 8, "num_gpu_blocks_override": 60},
    "bfloat16, fp8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "ref": {"device": "ref"},
    "two threads": {"num_threads": 2},
}


@functools.cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="tree-heads-"))


@functools.cache
def target() -> Path:
    return bigram_target(folder() / "target")


@functools.cache
def near(method: str) -> Path:
    """A head that is right with noise on what it says: its second choice is often the target's
    first."""
    from safetensors.torch import load_file, save_file

    path = right_head(method, target(), folder() / method)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(7)
    for name, tensor in sorted(tensors.items()):
        is_out = tensor.ndim == 2 and tensor.shape[0] == VOCAB and "embed" not in name
        if is_out or (method == "eagle" and name.endswith("fc.weight")):
            noise = torch.randn(tensor.shape, generator=generator)
            tensors[name] = (tensor + noise * (0.1 if is_out else 0.045)).to(tensor.dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    return path


@functools.cache
def llm(engine: str, method: str | None, tree: str = "chain", k: int = 4) -> LLM:
    options: dict[str, Any] = {
        "max_model_len": 128,
        "num_gpu_blocks_override": 64,
        "num_threads": 1,
        "dtype": "float32",
        "reasoning_config": {"reasoning_start_str": "e", "reasoning_end_str": "ab"},
        **ENGINES[engine],
    }
    if method is not None:
        options["speculative_config"] = {
            "model": str(near(method)),
            "num_speculative_tokens": k,
            "adaptive": False,
            **TREES[tree],
        }
    return LLM(str(target()), **options)


@pytest.fixture(scope="module", autouse=True)
def clean() -> Iterator[None]:
    yield
    for cached in (llm, near, target):
        cached.cache_clear()
    shutil.rmtree(folder())
    folder.cache_clear()


@pytest.mark.parametrize("method", METHODS)
def test_a_tree_says_what_a_chain_says_in_fewer_steps(method: str) -> None:
    params = [
        SamplingParams(temperature=t, seed=seed, max_tokens=60, logprobs=2)
        for seed in range(2)
        for t in (0.0, 0.9)
    ]
    prompts = [prompt_of(seed) for seed in range(len(params))]
    expected = results(llm("plain", None).generate(prompts, params, use_tqdm=False))
    tokens_a_step = {}
    for tree in ("chain", "likeliest", "given"):
        engine = llm("plain", method, tree, 3)
        before = engine.get_metrics()
        assert results(engine.generate(prompts, params, use_tqdm=False)) == expected
        now = engine.get_metrics()
        num_accepted = now.num_accepted_tokens - before.num_accepted_tokens
        tokens_a_step[tree] = 1 + num_accepted / (now.num_drafts - before.num_drafts)
        assert now.num_blocks_used == 0
    assert tokens_a_step["likeliest"] > tokens_a_step["chain"] + 0.1
    assert tokens_a_step["given"] > tokens_a_step["chain"] + 0.1


def test_a_branch_that_was_right_leaves_its_states() -> None:
    """The head goes on from them: behind a branch its guesses are as good as behind a chain."""
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=90)
    engine = llm("plain", "eagle", "likeliest", 3)
    before = engine.get_metrics()
    engine.generate([prompt_of(2)], params, use_tqdm=False)
    now = engine.get_metrics()
    # Without a state there is no guess: each step but the first and the last few has some.
    num_tokens = 90 - (now.num_accepted_tokens - before.num_accepted_tokens)
    assert now.num_drafts - before.num_drafts >= num_tokens - 3


Case = tuple[str, str, str, int, list[tuple[int, str, int]]]
CASES = st.tuples(
    st.sampled_from(sorted(ENGINES)),
    st.sampled_from(METHODS),
    st.sampled_from(sorted(TREES)),
    st.sampled_from([1, 3, 6]),
    st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from(NAMES), st.integers(1, 24)),
        min_size=1,
        max_size=4,
    ),
)


def check(case: Case) -> None:
    engine, method, tree, k, requests = case
    prompts = [prompt_of(seed) for seed, _, _ in requests]
    params = [params_of(name, count) for _, name, count in requests]
    expected = llm(engine, None).generate(prompts, params, use_tqdm=False)
    found = llm(engine, method, tree, k).generate(prompts, params, use_tqdm=False)
    assert results(found) == results(expected)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
@given(CASES)
def test_trees_of_heads_change_nothing_in_any_company(case: Case) -> None:
    check(case)


@pytest.mark.long
@settings(max_examples=5_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(CASES)
def test_they_do_not_in_very_many_cases(case: Case) -> None:
    check(case)


def test_a_layer_of_the_models_own_file_guesses_trees(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "glm4_moe", num_hidden_layers=2, eos_token_id=None)
    add_draft_layer(tmp_path, 2, VOCAB_SIZE)
    options = {"max_model_len": 128, "num_threads": 1, "dtype": "float32"}
    prompts, params = [prompt_of(2), prompt_of(4)], SamplingParams(seed=1, max_tokens=30)
    with LLM(str(tmp_path), **options) as plain:
        expected = results(plain.generate(prompts, params, use_tqdm=False))
    config = {"method": "mtp", "adaptive": False, "num_speculative_tokens": 3}
    with LLM(
        str(tmp_path), speculative_config={**config, "speculative_eagle_topk": 2}, **options
    ) as tree:
        assert results(tree.generate(prompts, params, use_tqdm=False)) == expected
        metrics = tree.get_metrics()
        assert metrics.num_draft_tokens > 4 * metrics.num_drafts


def test_the_plan_knows_what_trees_of_a_head_take() -> None:
    for tree in ("chain", "likeliest", "given"):
        options: dict[str, Any] = {
            "max_model_len": 128,
            "num_gpu_blocks_override": 64,
            "num_threads": 1,
            "dtype": "float32",
            "speculative_config": {"model": str(near("eagle3")), **TREES[tree]},
        }
        plan = LLM.plan(str(target()), **options)
        assert plan.draft is not None
        with LLM(str(target()), **options) as engine:
            use = engine.get_memory_use()
        assert use.workspace_bytes == plan.workspace_bytes + plan.draft.workspace_bytes


def test_what_guesses_from_texts_has_no_trees() -> None:
    for method in ("ngram", "suffix"):
        with pytest.raises(NotSupported, match=f'method "{method}" guesses chains'):
            LLM(
                str(target()),
                speculative_config={"method": method, "speculative_eagle_topk": 2},
            )
