"""A draft model with another tokenizer: tokens are mapped by their bytes, and none changes."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import VOCAB_SIZE, checkpoint
from llmserve import LLM, InvalidArgument, SamplingParams, _core
from llmserve import _core_testing as testing
from safetensors.numpy import load_file, save_file

NUM_MORE = 24  # tokens that the draft has beside the target's


def make_map(target: list[bytes], draft: list[bytes], special: int = 0) -> testing.VocabularyMap:
    """The first tokens of both are special."""
    ids = list(range(special))
    return testing.VocabularyMap(
        _core.Vocabulary(target, ids), len(target), _core.Vocabulary(draft, ids), len(draft)
    )


def test_equal_tokens_are_mapped_and_others_are_made_of_the_longest() -> None:
    both = make_map([b"a", b"ab", b"abcab", b"c", b"xy"], [b"c", b"ab", b"b", b"a", b"q"])
    assert [both.to_draft(i) for i in range(5)] == [[3], [1], [1, 0, 1], [0], []]
    assert [both.to_target(i) for i in range(5)] == [3, 1, -1, 0, -1]
    assert both.shared_draft_ids == [0, 1, 3]


def test_ids_out_of_range_have_none() -> None:
    both = make_map([b"a"], [b"a"])
    assert both.to_draft(1) == both.to_draft(-1) == []


def test_special_tokens_are_mapped_to_special_ones_alone() -> None:
    both = make_map([b"<s>", b"<e>", b"<s>", b"a"], [b"<e>", b"<t>", b"a"], special=2)
    assert [both.to_draft(i) for i in range(4)] == [[], [0], [], [2]]
    assert both.to_target(0) == 1


def test_of_equal_tokens_the_last_counts() -> None:
    """Vocabularies with a token for each byte have these first."""
    both = make_map([b"a", b"b", b"a"], [b"a", b"a", b"b"])
    assert both.to_target(1) == 2
    assert both.to_draft(0) == both.to_draft(2) == [1]


def test_vocabularies_that_have_nothing_in_common_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="only 0 of the draft model's 2 tokens"):
        make_map([b"a"], [b"b", b"c"])


@pytest.fixture(scope="module")
def target() -> Path:
    return checkpoint("llama", eos_token_id=2)


@pytest.fixture(scope="module")
def shuffled(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target, with its tokens in another order and more of them, which it likes best."""
    folder = tmp_path_factory.mktemp("draft") / "shuffled"
    shutil.copytree(target, folder)
    ids = list(range(VOCAB_SIZE + NUM_MORE))
    random.Random(1).shuffle(ids)
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        old = weights[name]
        new = old[[i % VOCAB_SIZE for i in range(len(ids))]].copy()
        new[ids[:VOCAB_SIZE]] = old
        new[ids[VOCAB_SIZE:]] = 2 * old[:NUM_MORE]
        weights[name] = new
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"vocab_size": len(ids), "eos_token_id": ids[2], "bos_token_id": ids[1]}
    (folder / "config.json").write_text(json.dumps(config))
    text = json.loads((folder / "tokenizer.json").read_text())
    text["model"]["vocab"] = {
        **{token: ids[old] for token, old in text["model"]["vocab"].items()},
        **{f"QQ{i}": new for i, new in enumerate(ids[VOCAB_SIZE:])},
    }
    for added in text["added_tokens"]:
        added["id"] = ids[added["id"]]
    (folder / "tokenizer.json").write_text(json.dumps(text))
    return folder


OPTIONS: dict[str, Any] = {
    "max_model_len": 128,
    "num_gpu_blocks_override": 64,
    "num_threads": 1,
    "dtype": "float32",
}


def test_a_draft_of_another_order_guesses_as_the_target_would(target: Path, shuffled: Path) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, max_tokens=24, repetition_penalty=1.2),
        SamplingParams(temperature=0.9, seed=4, max_tokens=24, n=2, min_tokens=5, logprobs=1),
        SamplingParams(temperature=0, max_tokens=24, bad_words=["the"], logit_bias={7: 2.0}),
    ]
    prompts = ["the quick brown", "hello there", "a", "one two three"]
    config = {
        "model": str(shuffled),
        "num_speculative_tokens": 4,
        "adaptive": False,
        "use_heterogeneous_vocab": True,
    }
    results = []
    for speculation in (None, config):
        with LLM(str(target), speculative_config=speculation, **OPTIONS) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            results.append(
                [(c.text, c.token_ids, repr(c.logprobs)) for o in outputs for c in o.outputs]
            )
            if speculation:
                greedy = outputs[0].metrics
                assert greedy.num_accepted_tokens == greedy.num_draft_tokens > 0
    assert results[0] == results[1]


def test_without_the_key_it_is_named(target: Path, shuffled: Path) -> None:
    with pytest.raises(InvalidArgument, match="use_heterogeneous_vocab maps its tokens"):
        LLM(str(target), speculative_config={"model": str(shuffled)}, **OPTIONS)


def test_without_tokenizers_it_is_refused(target: Path, shuffled: Path, tmp_path: Path) -> None:
    config = {"model": str(shuffled), "use_heterogeneous_vocab": True}
    with pytest.raises(InvalidArgument, match="the target has no tokenizer here"):
        LLM(str(target), speculative_config=config, skip_tokenizer_init=True, **OPTIONS)
    bare = tmp_path / "bare"
    shutil.copytree(shuffled, bare)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink(missing_ok=True)
    with pytest.raises(InvalidArgument, match="has no tokenizer"):
        LLM(str(target), speculative_config={**config, "model": str(bare)}, **OPTIONS)


def test_a_method_without_a_model_has_no_other_vocabulary(target: Path) -> None:
    config = {"method": "ngram", "use_heterogeneous_vocab": True}
    with pytest.raises(InvalidArgument, match="use_heterogeneous_vocab is of a draft model"):
        LLM(str(target), speculative_config=config, **OPTIONS)
