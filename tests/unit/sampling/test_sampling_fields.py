"""What each field of SamplingParams does to a generation, against a plain model of the sampler that
is fed with the raw distribution the engine reports."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import checkpoints
import numpy as np
import pytest
import torch
import transformers
from llmserve import LLM, InvalidArgument, RepetitionDetectionParams, SamplingParams
from offline import generate
from parity import op_formulas as formulas

V = checkpoints.VOCAB_SIZE
PROMPT = [5, 17, 99, 17, 230, 8]
THINK = {"reasoning_start_str": "fox", "reasoning_end_str": "the owl"}


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(
        checkpoint,
        num_threads=1,
        kv_cache_memory_bytes=2**22,
        max_logprobs=-1,
        reasoning_config=THINK,
    ) as llm:
        yield llm


def ids_of(llm: LLM, text: str) -> list[int]:
    return llm.get_tokenizer().encode(text, add_special_tokens=False)


def test_every_token_is_the_one_that_a_plain_model_of_the_sampler_draws(llm: LLM) -> None:
    """Frequency and presence penalties, biases and masks do not care for a constant, so that the
    raw logprobs stand for the logits."""
    params = SamplingParams(
        temperature=0.7,
        seed=77,
        top_k=40,
        min_p=0.01,
        frequency_penalty=0.8,
        presence_penalty=-0.4,
        logit_bias={11: 2.0, 300: -3.0},
        allowed_token_ids=[*range(3, V, 2), 300],
        max_tokens=60,
        ignore_eos=True,
        logprobs=-1,
    )
    (output,) = generate(llm, [PROMPT], params)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    mask = [0] * (V // 32)
    for token_id in params.allowed_token_ids or ():
        mask[token_id // 32] |= 1 << token_id % 32
    for step, (token_id, row) in enumerate(
        zip(completion.token_ids, completion.logprobs, strict=True)
    ):
        raw = np.array([row[i].logprob for i in range(V)], np.float32)
        seen = completion.token_ids[:step]
        x = formulas.edited_logits(
            raw,
            biases=list((params.logit_bias or {}).items()),
            allowed=mask,
            counts=[(i, seen.count(i), False) for i in sorted(set(seen))],
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
        )
        scores = formulas.draw_scores(
            x, temperature=0.7, top_k=40, min_p=0.01, seed=77, position=len(PROMPT) + step
        )
        assert token_id == int(scores.argmax()), step
    assert len(set(completion.token_ids)) > 10


@pytest.mark.parametrize("penalty", [0.7, 1.3])
def test_repetition_penalty_gives_the_tokens_of_transformers(
    llm: LLM, checkpoint: Path, penalty: float
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    expected = model.generate(
        torch.tensor([PROMPT]),
        do_sample=False,
        repetition_penalty=penalty,
        max_new_tokens=40,
        min_new_tokens=40,
    )[0, len(PROMPT) :]
    params = SamplingParams(
        temperature=0.0, repetition_penalty=penalty, max_tokens=40, min_tokens=40
    )
    (output,) = generate(llm, [PROMPT], params)
    assert output.outputs[0].token_ids == expected.tolist()


def test_the_whole_vocabulary_is_reported_with_ranks_and_texts(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=-1)
    (output,) = generate(llm, [PROMPT], params)
    assert output.outputs[0].logprobs is not None
    for token_id, row in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
        assert sorted(row) == list(range(V))
        best_first = sorted(row, key=lambda i: -row[i].logprob)
        assert best_first[0] == token_id
        assert [row[i].rank for i in best_first] == sorted(row[i].rank or 0 for i in row)
        assert sum(np.exp(lp.logprob) for lp in row.values()) == pytest.approx(1.0, abs=1e-5)
        assert row[ids_of(llm, "fox")[-1]].decoded_token is not None


def test_named_tokens_are_reported_beside_the_sampled_one(llm: LLM) -> None:
    shared = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
    (whole,) = generate(llm, [PROMPT], SamplingParams(logprobs=-1, **shared))
    (output,) = generate(llm, [PROMPT], SamplingParams(logprob_token_ids=[9, 4], **shared))
    assert whole.outputs[0].logprobs is not None
    assert output.outputs[0].logprobs is not None
    for token_id, named, everything in zip(
        output.outputs[0].token_ids,
        output.outputs[0].logprobs,
        whole.outputs[0].logprobs,
        strict=True,
    ):
        assert named == {i: everything[i] for i in {token_id, 9, 4}}
    assert output.outputs[0].cumulative_logprob is not None


def test_bad_words_are_never_said(llm: LLM) -> None:
    """Words made of the text that comes without the ban."""
    shared = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.9, "seed": 5}
    (output,) = generate(llm, [PROMPT], SamplingParams(**shared))
    ids = output.outputs[0].token_ids
    tokenizer = llm.get_tokenizer()
    words = []
    for begin in range(0, 36, 3):  # those of two tokens that are tokenized as they were said
        text = tokenizer.decode(ids[begin : begin + 2])
        if text.strip() and ids_of(llm, text) == ids[begin : begin + 2]:
            words.append(text)
    words.append(tokenizer.decode(ids[:1]))
    assert len(words) > 1
    (banned,) = generate(llm, [PROMPT], SamplingParams(bad_words=words, **shared))
    said = banned.outputs[0].token_ids
    assert said != ids
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            sequence = ids_of(llm, text)
            windows = [said[i : i + len(sequence)] for i in range(len(said))]
            assert sequence not in windows, word


def test_a_bad_word_of_several_tokens_bans_its_last_where_the_others_stand(llm: LLM) -> None:
    word = "qz"
    first, last = ids_of(llm, word)
    shared = {"allowed_token_ids": [first, last, 50], "max_tokens": 90, "ignore_eos": True}
    pairs = []
    for bad_words in (None, [word]):
        params = SamplingParams(temperature=50.0, seed=2, bad_words=bad_words, **shared)
        said = generate(llm, [[*PROMPT, first]], params)[0].outputs[0].token_ids
        pairs.append(set(itertools.pairwise(said)))
    assert len(pairs[0]) == 9
    assert pairs[1] == pairs[0] - {(first, last)}


def test_min_tokens_keeps_what_ends_the_text_from_being_drawn(llm: LLM) -> None:
    stop = list(range(10, V))
    params = SamplingParams(min_tokens=7, stop_token_ids=stop, max_tokens=30, seed=1)
    (output,) = generate(llm, [PROMPT], params)
    ids = output.outputs[0].token_ids
    assert len(ids) > 7
    assert all(i not in stop and i != 2 for i in ids[:-1])
    assert output.outputs[0].stop_reason == ids[-1]


def sections(ids: list[int], start: list[int], end: list[int]) -> list[tuple[int, bool]]:
    """Of each section of thinking: how many tokens were drawn before its end, and whether it
    ended."""
    found, begin = [], None
    for i in range(len(ids)):
        if begin is None:
            if ids[: i + 1][-len(start) :] == start:
                begin = i + 1
        elif ids[begin : i + 1][-len(end) :] == end:
            found.append((i + 1 - begin - len(end), True))
            begin = None
    if begin is not None:
        found.append((len(ids) - begin, False))
    return found


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_section_of_thinking_ends_when_its_budget_is_spent(llm: LLM, budget: int) -> None:
    start, end = (ids_of(llm, text) for text in THINK.values())
    assert len(end) > 1, "an end of several tokens"
    params = SamplingParams(
        thinking_token_budget=budget,
        logit_bias=dict.fromkeys(start, 12.0),
        max_tokens=80,
        ignore_eos=True,
        seed=9,
    )
    opened = PROMPT + start
    for prompt in (PROMPT, opened):
        (output,) = generate(llm, [prompt], params)
        ids = prompt + output.outputs[0].token_ids
        found = sections(ids, start, end)
        assert len(found) > 1
        assert all(count <= budget for count, is_ended in found if is_ended)
        count, is_ended = found[-1]
        assert is_ended or count <= budget + len(end)
    (free,) = generate(llm, [opened], SamplingParams(max_tokens=80, ignore_eos=True, seed=9))
    assert sections(opened + free.outputs[0].token_ids, start, end)[0][0] > 5


def test_thinking_tokens_are_the_tokenizers_own_or_refused(
    checkpoint: Path, tmp_path: Path
) -> None:
    params = SamplingParams(thinking_token_budget=3)
    llm = LLM(checkpoint, num_threads=1, kv_cache_memory_bytes=2**22)
    with llm, pytest.raises(InvalidArgument, match="tokenizer has no <think> and </think>; give"):
        generate(llm, [PROMPT], params)
    own = tmp_path / "own"
    shutil.copytree(checkpoint, own)
    tokenizer = (own / "tokenizer.json").read_text()
    for name in ("<think>", "</think>"):
        old = next(t for t in ("<unk>", "<s>", "<pad>", "</s>") if f'"{t}"' in tokenizer)
        tokenizer = tokenizer.replace(f'"{old}"', f'"{name}"')
    (own / "tokenizer.json").write_text(tokenizer)
    with LLM(own, num_threads=1, kv_cache_memory_bytes=2**22) as llm:
        start, end = (llm.get_tokenizer().token_id(t) for t in ("<think>", "</think>"))
        assert start is not None
        (output,) = generate(llm, [[*PROMPT, start]], params)
        assert output.outputs[0].token_ids.index(end or 0) <= 3
    for config, message in (
        ({"reasoning_start": "x"}, "reasoning_config has no argument 'reasoning_start'; did you"),
        ({"reasoning_start_str": "x"}, "reasoning_config: reasoning_end_str must be a string"),
        ("<think>", "reasoning_config must be a dict"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            LLM(checkpoint, reasoning_config=config)  # type: ignore[arg-type]


def test_a_truncated_prompt_keeps_its_last_tokens(llm: LLM) -> None:
    long = [5 + idx % 300 for idx in range(2 * llm.max_model_len)]
    keeps = [3, len(long), -1, None]
    prompts = [PROMPT, PROMPT, long, PROMPT]
    params = [SamplingParams(max_tokens=1, truncate_prompt_tokens=keep) for keep in keeps]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    wanted = [PROMPT[-3:], PROMPT, long[-(llm.max_model_len - 1) :], PROMPT]
    assert [output.prompt_token_ids for output in outputs] == wanted


@pytest.mark.parametrize(
    ("pattern", "detection", "length"),
    [
        ([7], RepetitionDetectionParams(1, 1, 4), 4),
        ([7, 8, 9], RepetitionDetectionParams(5, 2, 3), 9),
        ([7, 8, 9], RepetitionDetectionParams(2, 0, 2), None),
        ([7], RepetitionDetectionParams(6, 3, 2), 6),
        ([7], RepetitionDetectionParams(), None),
    ],
)
def test_a_repetition_ends_the_output(
    llm: LLM, pattern: list[int], detection: RepetitionDetectionParams, length: int | None
) -> None:
    def force(token_ids: np.ndarray, logits: np.ndarray) -> None:
        wanted = pattern[(len(token_ids) - len(PROMPT)) % len(pattern)]
        logits[np.arange(V) != wanted] = -np.inf

    params = SamplingParams(
        logits_processors=[force], repetition_detection=detection, max_tokens=20, ignore_eos=True
    )
    (output,) = generate(llm, [PROMPT], params)
    completion = output.outputs[0]
    if length is None:
        assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    else:
        assert len(completion.token_ids) == length
        assert completion.finish_reason == "stop"
        assert completion.stop_reason == "repetition_detected"


def test_skip_reading_prefix_cache_computes_the_prompt_and_leaves_it_to_others(llm: LLM) -> None:
    prompt = [(7 * i) % 300 + 3 for i in range(100)]
    skip = SamplingParams(max_tokens=2, temperature=0.0, skip_reading_prefix_cache=True)
    read = SamplingParams(max_tokens=2, temperature=0.0)
    first, second, third = (generate(llm, [prompt], p)[0] for p in (skip, skip, read))
    assert [o.num_cached_tokens for o in (first, second)] == [0, 0]
    assert third.num_cached_tokens == 96
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == third.outputs[0].token_ids


REFUSED = [
    ({"logit_bias": {320: 1.0}}, r"logit_bias: token id 320 is outside the vocabulary \[0, 320\)"),
    ({"allowed_token_ids": [3, 999]}, "allowed_token_ids: token id 999 is outside"),
    ({"logprob_token_ids": [320]}, "logprob_token_ids: token id 320 is outside"),
    ({"stop_token_ids": [320]}, "stop_token_ids: token id 320 is outside"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_ids_outside_the_vocabulary_are_refused(
    llm: LLM, fields: dict[str, object], message: str
) -> None:
    params = [SamplingParams(), SamplingParams(**fields)]  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=rf"sampling_params\[1\]: {message}"):
        generate(llm, [PROMPT, PROMPT], params)


def test_parameters_that_leave_nothing_to_draw_are_refused(llm: LLM) -> None:
    word = next(i for i in range(20, V) if len(ids_of(llm, token_text(llm, i))) == 1)
    contradiction = SamplingParams(bad_words=[token_text(llm, word)], allowed_token_ids=[word])
    if ids_of(llm, token_text(llm, word).lstrip()) == [word]:
        with pytest.raises(InvalidArgument, match="allowed_token_ids and bad_words leave no token"):
            generate(llm, [PROMPT], contradiction)
    only_eos = SamplingParams(allowed_token_ids=[2], min_tokens=1)
    with pytest.raises(InvalidArgument, match=r"nothing but tokens that end the text.*min_tokens"):
        generate(llm, [PROMPT], only_eos)


def token_text(llm: LLM, token_id: int) -> str:
    return llm.get_tokenizer().token_text(token_id)


def test_a_dead_end_on_the_way_ends_its_request_with_the_reason(llm: LLM) -> None:
    """Two tokens are left and each is banned after itself and the other."""
    a, b = 40, 41

    def ban_all(token_ids: np.ndarray, logits: np.ndarray) -> None:
        if len(token_ids) > len(PROMPT) + 1:
            logits[[a, b]] = -np.inf

    dead = SamplingParams(allowed_token_ids=[a, b], logits_processors=[ban_all], max_tokens=9)
    plain = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    stuck, other = generate(llm, [PROMPT, PROMPT], [dead, plain])
    assert stuck.outputs[0].finish_reason == "error"
    assert len(stuck.outputs[0].token_ids) == 2
    assert "no token is left to draw at position 8" in (stuck.outputs[0].error or "")
    assert other.outputs[0].finish_reason == "length"


def test_the_default_bound_on_logprobs_refuses_the_whole_vocabulary(checkpoint: Path) -> None:
    llm = LLM(checkpoint, num_threads=1, kv_cache_memory_bytes=2**22)
    with (
        llm,
        pytest.raises(
            InvalidArgument, match=r"logprobs=-1 asks for \d+ a token, more than max_logprobs=20"
        ),
    ):
        generate(llm, [PROMPT], SamplingParams(logprobs=-1))
