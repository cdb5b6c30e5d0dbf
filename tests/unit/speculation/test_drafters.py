"""Drafters without a model: what they guess, and what they remember."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from llmserve import _core
from llmserve import _core_testing as testing

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def drafter(**settings: Any) -> testing.Drafter:
    return testing.Drafter(_core.SpeculationConfig(**{**NGRAM, **settings}))


def guess(of: testing.Drafter, tokens: list[int], count: int = 4, **kwargs: Any) -> list[int]:
    guesses: list[int] = of.draft([(1, tokens)], count, **kwargs)[0]
    return guesses


def naive(tokens: list[int], least: int, most: int, count: int) -> list[int]:
    """The longest earlier match of the end, of several the newest, by comparing everything."""
    best_size, best_end = 0, 0
    for end in range(len(tokens) - 1, 0, -1):
        size = 0
        while size < min(most, end) and tokens[end - 1 - size] == tokens[-1 - size]:
            size += 1
        if size >= least and size > best_size:
            best_size, best_end = size, end
    if not best_size:
        return []
    text = list(tokens)
    for place in range(best_end, best_end + count):
        text.append(text[place])
    return text[len(tokens) :]


def test_ngram_guesses_what_followed_the_newest_tokens_before() -> None:
    of = drafter(prompt_lookup_min=2, prompt_lookup_max=3)
    assert guess(of, [1, 2, 3, 4, 5, 9, 2, 3]) == [4, 5, 9, 2]
    assert guess(of, [1, 2, 3, 4, 5, 9, 2, 3], 2) == [4, 5]


def test_ngram_has_no_idea_without_a_match() -> None:
    of = drafter(prompt_lookup_min=2, prompt_lookup_max=3)
    assert guess(of, [1, 2, 3, 4, 5]) == []
    assert guess(drafter(), [7]) == []


def test_ngram_takes_the_longest_match_and_of_equal_ones_the_newest() -> None:
    tokens = [1, 2, 3, 50, 9, 2, 3, 60, 8, 2, 3, 70, 1, 2, 3]
    assert guess(drafter(prompt_lookup_min=2, prompt_lookup_max=3), tokens, 1) == [50]
    assert guess(drafter(prompt_lookup_min=2, prompt_lookup_max=2), tokens, 1) == [70]


def test_a_match_that_overlaps_the_end_repeats_itself() -> None:
    assert guess(drafter(prompt_lookup_min=1, prompt_lookup_max=2), [5, 6, 5, 6, 5]) == [6, 5, 6, 5]
    assert guess(drafter(prompt_lookup_min=1, prompt_lookup_max=1), [4, 4]) == [4, 4, 4, 4]


def test_vectors_of_a_prompt_are_not_guessed() -> None:
    of = drafter(prompt_lookup_min=1, prompt_lookup_max=1)
    assert guess(of, [7, -1, -1, 7]) == []


@pytest.mark.parametrize("num_ids", [2, 5, 40])
def test_ngram_agrees_with_a_search_that_compares_everything(num_ids: int) -> None:
    """While a sequence grows; few ids make long matches and chains, within what is compared."""
    rng = random.Random(num_ids)
    for case in range(20):
        least = rng.randint(1, 3)
        most = rng.randint(least, 6)
        of = drafter(prompt_lookup_min=least, prompt_lookup_max=most)
        tokens = [rng.randrange(num_ids) for _ in range(rng.randint(1, 30))]
        while len(tokens) < 60:
            found = guess(of, tokens, 3)
            wanted = naive(tokens, least, most, 3)
            if num_ids > 2:  # with two, more places match than are compared
                assert found == wanted, (case, tokens)
            assert bool(found) == bool(wanted)
            tokens += [rng.randrange(num_ids) for _ in range(rng.randint(1, 3))]


def test_a_long_context_is_entered_once() -> None:
    """64 sequences of 32,768 tokens: a step enters one token each. The bound tells a rescan, which
    takes seconds, from an entry."""
    rng = random.Random(1)
    of = drafter(prompt_lookup_min=3, prompt_lookup_max=5)
    texts = [[rng.randrange(1000) for _ in range(32768)] for _ in range(8)]
    of.draft(list(enumerate(texts)), 4)
    text = texts[0]
    begin = time.perf_counter()
    of.draft([(0, [*text, 1])], 4)  # most of it is the conversion of the list
    assert time.perf_counter() - begin < 0.5


def test_nothing_is_kept_of_an_ended_request() -> None:
    for method in ("ngram", "suffix"):
        of = drafter(method=method)
        guess(of, [1, 2, 3])
        assert of.num_sequences == 1
        of.finish(1, [4, 5, 6])
        assert of.num_sequences == 0


def suffix(**settings: Any) -> testing.Drafter:
    return drafter(method="suffix", **settings)


def test_suffix_finds_what_others_were_answered() -> None:
    of = suffix()
    of.finish(5, [10, 11, 12, 13, 14, 15])
    assert guess(of, [1, 11, 12, 13], 3) == [14, 15]


def test_suffix_follows_the_most_frequent_continuation() -> None:
    of = suffix()
    for request_id, last in enumerate((20, 21, 20, 20)):
        of.finish(10 + request_id, [7, 8, 9, last, 30])
    assert guess(of, [7, 8, 9], 2) == [20, 30]


def test_suffix_stops_where_a_guess_is_not_likely_enough() -> None:
    of = suffix(suffix_decoding_min_token_prob=0.6)
    for request_id, last in enumerate((20, 21)):
        of.finish(10 + request_id, [7, 8, 9, 5, last])
    assert guess(of, [7, 8, 9], 4) == [5]


def test_suffix_guesses_no_more_than_its_factor_of_the_match() -> None:
    of = suffix(suffix_decoding_max_spec_factor=0.5)
    of.finish(5, list(range(10, 30)))
    assert guess(of, [1, 10, 11, 12, 13], 9) == [14, 15]  # four tokens were found


def test_outputs_are_found_within_their_salt_alone() -> None:
    of = suffix()
    of.finish(5, [10, 11, 12, 13], salt="a")
    assert guess(of, [10, 11], salt="b") == []
    assert guess(of, [10, 11], salt="a") == [12, 13]


def test_the_corpus_is_bounded() -> None:
    of = suffix(suffix_decoding_max_cached_requests=4)
    for request_id in range(20):
        of.finish(request_id, [100 + request_id, 200 + request_id, 300 + request_id])
    assert of.draft([(50, [100, 200])], 4)[0] == []
    assert of.draft([(51, [119, 219])], 4)[0] == [319]


def test_without_cached_requests_suffix_knows_its_own_sequence() -> None:
    of = suffix(suffix_decoding_max_cached_requests=0)
    of.finish(5, [10, 11, 12, 13])
    assert guess(of, [10, 11]) == []
    assert of.draft([(2, [3, 4, 5, 3, 4])], 2)[0] == [5, 3]
