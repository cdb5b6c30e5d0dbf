"""LLM(speculative_config={...}): vLLM's keys, and what is said of those that are wrong."""

from __future__ import annotations

from typing import Any

import pytest
from llmserve import InvalidArgument, NotSupported, _core
from llmserve.options.speculative_config import speculation_config


def read(**config: Any) -> _core.SpeculationConfig:
    return speculation_config("speculative_config", config)


def test_none_and_an_empty_dict_are_no_speculation() -> None:
    for value in (None, {}):
        assert speculation_config("speculative_config", value).method == ""


def test_defaults_are_those_of_the_field() -> None:
    config = read(method="ngram")
    assert (config.method, config.model, config.num_speculative_tokens) == ("ngram", "", 5)
    assert read(model="ngram").method == "ngram"
    assert read(model="some/model").method == "draft_model"
    assert read(model="some/model").num_speculative_tokens == 4
    assert read(method="eagle3", model="some/head").num_speculative_tokens == 4
    assert (
        read(model="x", speculative_token_tree="[(0,), (1,), (0, 0)]").num_speculative_tokens == 2
    )
    assert read(model="x", speculative_token_tree=[(0,), (1,)]).num_speculative_tokens == 1
    for name in ("mtp", "deepseek_mtp", "ernie_mtp", "glm4_moe_mtp"):
        assert read(method=name).method == "mtp"


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"method": "ngrm"}, NotSupported, "method='ngrm' is not supported; did you mean 'ngram'"),
        ({"method": "dflash", "model": "x"}, NotSupported, "method='dflash'.*no draft of that"),
        ({"method": "dspark", "model": "x"}, NotSupported, "method='dspark'"),
        ({"method": "mimo_mtp"}, NotSupported, "method='mimo_mtp'.*layers of that model"),
        ({"method": "mtp", "model": "x"}, InvalidArgument, "'mtp' has no model"),
        ({"method": "eagle3"}, InvalidArgument, "'eagle3' needs model, the head's folder"),
        (
            {"method": "ngram", "speculative_eagle_topk": 2},
            NotSupported,
            'speculative_eagle_topk is supported with draft models.*method "ngram" guesses chains',
        ),
        (
            {"method": "suffix", "speculative_token_tree": "[(0,), (1,)]"},
            NotSupported,
            'speculative_token_tree is supported with draft.*method "suffix" guesses chains',
        ),
        ({"model": "x", "speculative_eagle_topk": 9}, InvalidArgument, "must be at most 8, got 9"),
        (
            {"model": "x", "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 65},
            InvalidArgument,
            "speculative_num_draft_tokens must be at most 64, got 65",
        ),
        (
            {"model": "x", "speculative_eagle_topk": 2, "rejection_sample_method": "rejection"},
            NotSupported,
            "speculative_eagle_topk is not supported with rejection_sample_method 'rejection'",
        ),
        (
            {"model": "x", "speculative_eagle_topk": 2, "use_heterogeneous_vocab": True},
            NotSupported,
            "speculative_eagle_topk is not supported with use_heterogeneous_vocab",
        ),
        (
            {"model": "x", "speculative_eagle_topk": 2, "speculative_token_tree": [[0], [1]]},
            InvalidArgument,
            "give speculative_token_tree or speculative_eagle_topk",
        ),
        (
            {"model": "x", "speculative_token_tree": "[(0,), (0, 1)]"},
            InvalidArgument,
            "speculative_token_tree lacks a guess that one of 2 places stands on",
        ),
        (
            {"model": "x", "speculative_token_tree": "[(1,)]"},
            InvalidArgument,
            "speculative_token_tree lacks a guess that one of 1 places stands on",
        ),
        (
            {"model": "x", "speculative_token_tree": "[(0,), (0,)]"},
            InvalidArgument,
            "speculative_token_tree has a guess twice",
        ),
        (
            {"model": "x", "speculative_token_tree": [[0], [8]]},
            InvalidArgument,
            "each from 0 to 7",
        ),
        (
            {"model": "x", "speculative_token_tree": "(0"},
            InvalidArgument,
            "speculative_token_tree must be a list of paths such as",
        ),
        (
            {"model": "x", "speculative_token_tree": [0, 1]},
            InvalidArgument,
            "a path is a tuple of choices, got 0",
        ),
        ({"num_speculative_tokens": 3}, InvalidArgument, "method is missing; it is one of ngram"),
        ({"method": "ngram", "num_tokens": 3}, InvalidArgument, "no argument 'num_tokens'"),
        (
            {"method": "ngram", "num_speculative_token": 3},
            InvalidArgument,
            "did you mean 'num_speculative_tokens'",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 33},
            InvalidArgument,
            "num_speculative_tokens must be from 1 to 32, got 33",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 0},
            InvalidArgument,
            "num_speculative_tokens must be between 1",
        ),
        (
            {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3},
            InvalidArgument,
            r"prompt_lookup_min \(5\) must be at most prompt_lookup_max \(3\)",
        ),
        ({"method": "ngram", "model": "some/model"}, InvalidArgument, "'ngram' has no model"),
        ({"method": "draft_model"}, InvalidArgument, "'draft_model' needs model"),
        (
            {"method": "ngram", "rejection_sample_method": "synthetic"},
            NotSupported,
            "rejection_sample_method='synthetic' is not supported: it changes",
        ),
        (
            {"method": "ngram", "draft_sample_method": "best"},
            InvalidArgument,
            "draft_sample_method must be one of",
        ),
        (
            {"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 2]]},
            InvalidArgument,
            r"must be a list of \[least, most, tokens\]",
        ),
        (
            {"method": "ngram", "num_speculative_tokens_per_batch_size": [[4, 2, 1]]},
            InvalidArgument,
            "1 <= least <= most",
        ),
        (
            {"method": "suffix", "suffix_decoding_min_token_prob": 2},
            InvalidArgument,
            r"suffix_decoding_min_token_prob must be in \[0, 1\]",
        ),
    ],
)
def test_what_is_wrong_is_told_by_its_key(
    config: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read(**config)


def test_it_is_a_mapping() -> None:
    with pytest.raises(InvalidArgument, match="speculative_config must be a dict"):
        speculation_config("speculative_config", "ngram")


def test_what_vllm_has_by_default_is_taken() -> None:
    read(
        method="ngram",
        rejection_sample_method="standard",
        draft_tensor_parallel_size=1,
        parallel_drafting=False,
        use_heterogeneous_vocab=False,
        prompt_lookup_max=4,
        disable_by_batch_size=8,
        model=None,
    )
