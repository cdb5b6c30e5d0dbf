"""Rows after drafted tokens are edited as if these were generated; rejected ones leave no trace."""

from __future__ import annotations

import random

import pytest
from llmserve import StructuredOutputsParams, _core
from llmserve import _core_testing as testing
from llmserve.requests.grammars import Grammars

VOCAB_SIZE = 60
END = 59
NUM_STEPS = 15
VOCABULARY = _core.Vocabulary(
    [bytes([97 + i % 26]) * (1 + i // 26) for i in range(VOCAB_SIZE)], [END]
)
REGEXES = [r"[a-f]+(gh|hg)*[a-z]{2,9}", "(ab|cd){1,20}", r"[a-z]{0,6}", "(xyz)+a?", "[abc]{25}"]


def slot_params(rng: random.Random) -> _core.SamplingParams:
    params = _core.SamplingParams(
        repetition_penalty=rng.choice([1.0, 1.3]),
        frequency_penalty=rng.choice([0.0, 0.5]),
        presence_penalty=rng.choice([0.0, -0.5]),
        bad_words=[[rng.randrange(6) for _ in range(n)] for n in (1, 2, 3)],
    )
    if rng.random() < 0.7:
        params.thinking_budget = _core.ThinkingBudget(
            start_token_ids=[1, 2], end_token_ids=[3, 4], max_tokens=rng.randint(1, 4)
        )
    return params


def fields(edits: testing.RowEdits) -> tuple[object, ...]:
    return edits.counts, edits.banned, edits.forced_token_id


@pytest.mark.parametrize("seed", range(40))
def test_rows_of_a_slot_are_those_of_a_slot_that_never_saw_a_draft(seed: int) -> None:
    """Of few tokens, so that drafts repeat the context's, each other, bad words and marks."""
    rng = random.Random(seed)
    params = slot_params(rng)
    slot = testing.SamplingSlot(params, VOCAB_SIZE)
    committed = [rng.randrange(6) for _ in range(rng.randint(1, 10))]
    num_prompt = len(committed)
    for _ in range(NUM_STEPS):
        drafts = [rng.randrange(6) for _ in range(rng.randint(0, 4))]
        contexts = [(committed + drafts[:n], n) for n in range(len(drafts) + 1)]
        rows = slot.prepare(contexts, num_prompt)
        for (token_ids, _), row in zip(contexts, rows, strict=True):
            (expected,) = testing.SamplingSlot(params, VOCAB_SIZE).prepare(
                [(token_ids, 0)], num_prompt
            )
            assert fields(row) == fields(expected)
        num_accepted = rng.randint(0, len(drafts))
        committed += [*drafts[:num_accepted], rng.randrange(6)]


def make_masks(regex: str) -> testing.MaskFiller:
    grammars = Grammars(VOCABULARY, VOCAB_SIZE, [END], _core.GrammarLimits())
    params = _core.SamplingParams()
    params.grammar = grammars.compile(StructuredOutputsParams(regex=regex))
    return testing.MaskFiller(params, VOCAB_SIZE)


@pytest.mark.parametrize("seed", range(15))
def test_masks_of_rows_are_those_of_a_text_that_has_come_as_far(seed: int) -> None:
    """A row behind a draft that the grammar does not allow has none, and fails nothing."""
    rng = random.Random(seed)
    regex = rng.choice(REGEXES)
    ahead = make_masks(regex)
    committed: list[int] = [7]  # the prompt
    for _ in range(NUM_STEPS):
        drafts: list[int] = []
        allowed_so_far = 0
        is_allowed = True
        for _ in range(rng.randint(0, 4)):
            ((allowed, end, error),) = make_masks(regex).fill([(committed + drafts, 0)], 1)
            assert error == ""
            choices = [*(allowed or []), *([end] if end >= 0 else [])]
            drafts.append(rng.choice(choices) if rng.random() < 0.8 else rng.randrange(END))
            is_allowed = is_allowed and drafts[-1] in choices
            if not is_allowed or drafts[-1] == END:
                allowed_so_far += int(is_allowed)
                drafts += [rng.randrange(END) for _ in range(rng.randint(0, 2))]
                break
            allowed_so_far += 1
        contexts = [(committed + drafts[:n], n) for n in range(len(drafts) + 1)]
        rows = ahead.fill(contexts, 1)
        for n, (token_ids, _) in enumerate(contexts[: allowed_so_far + 1]):
            if n > 0 and token_ids[-1] == END:
                continue  # what may follow the end is nobody's
            (expected,) = make_masks(regex).fill([(token_ids, 0)], 1)
            assert rows[n] == expected
        has_end = END in drafts[:allowed_so_far]
        if not has_end:
            assert all(row == (None, -1, "") for row in rows[allowed_so_far + 1 :])
        num_accepted = rng.randint(0, allowed_so_far - int(has_end))
        committed += drafts[:num_accepted]
        allowed, end, _ = rows[num_accepted]
        following = [token for token in allowed or [] if token != END]
        if end >= 0 or not following:
            break
        committed.append(rng.choice(following))
