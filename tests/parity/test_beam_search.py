"""`LLM.beam_search` against a plain search over the logits of transformers."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
from beam_reference import NextTokens, search
from checkpoints import VOCAB_SIZE, checkpoint, reference_model
from llmserve import LLM, BeamSearchParams, InvalidArgument, NotSupported, SamplingParams

# Sums of up to MAX_TOKENS logprobs, each within the bar of single ones (see test_generate.py).
LOGPROB_TOLERANCE = 2e-3
MAX_TOKENS = 10
EOS = 2


def make_prompts() -> list[list[int]]:
    rng = random.Random(13)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (1, 7, 16, 40)]


PROMPTS = make_prompts()


@functools.cache
def transformers_model() -> NextTokens:
    import torch

    model = reference_model(checkpoint("llama"))
    known: dict[tuple[int, ...], Any] = {}

    def next_tokens(context: list[int], count: int) -> list[tuple[int, float]]:
        key = tuple(context)
        if key not in known:
            with torch.inference_mode():
                logits = model(torch.tensor([context])).logits[0, -1].double()
            known[key] = torch.log_softmax(logits, dim=-1)
        top = known[key].topk(count)
        return list(zip(top.indices.tolist(), top.values.tolist(), strict=True))

    return next_tokens


def make_llm(**options: Any) -> LLM:
    defaults = {"max_model_len": 256, "num_gpu_blocks_override": 200, "num_threads": 1}
    return LLM(checkpoint("llama"), dtype="float32", **{**defaults, **options})


def run(llm: LLM, params: BeamSearchParams) -> list[list[tuple[list[int], float]]]:
    outputs = llm.beam_search([{"prompt_token_ids": p} for p in PROMPTS], params)
    assert all(output.error is None for output in outputs)
    return [[(s.tokens, s.cum_logprob) for s in output.sequences] for output in outputs]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_beams_are_those_of_a_search_over_transformers(width: int, length_penalty: float) -> None:
    params = BeamSearchParams(width, MAX_TOKENS, length_penalty=length_penalty)
    with make_llm() as llm:
        given = run(llm, params)
    for prompt, beams in zip(PROMPTS, given, strict=True):
        expected = search(
            transformers_model(),
            prompt,
            width,
            MAX_TOKENS,
            eos=EOS,
            length_penalty=length_penalty,
        )
        assert [tokens for tokens, _ in beams] == [prompt + found.tokens for found in expected]
        for (_, cum_logprob), found in zip(beams, expected, strict=True):
            assert cum_logprob == pytest.approx(found.cum_logprob, abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpu_blocks_override": 16},
        {"max_num_batched_tokens": 8, "max_num_seqs": 5},
        {"max_num_seqs": 2},
        {"num_threads": 3, "block_size": 8},
        {"enable_prefix_caching": False, "num_gpu_blocks_override": 18},
    ],
    ids=str,
)
def test_bits_do_not_depend_on_memory_chunks_seats_or_threads(options: dict[str, Any]) -> None:
    params = BeamSearchParams(4, 12, ignore_eos=True)
    with make_llm(enable_prefix_caching=False) as llm:
        alone = [
            [(s.tokens, s.cum_logprob, s.logprobs) for s in output.sequences]
            for p in PROMPTS
            for output in llm.beam_search({"prompt_token_ids": p}, params)
        ]
    with make_llm(**options) as llm:
        outputs = llm.beam_search([{"prompt_token_ids": p} for p in PROMPTS], params)
        given = [[(s.tokens, s.cum_logprob, s.logprobs) for s in o.sequences] for o in outputs]
        assert given == alone
        assert llm.get_metrics().num_blocks_used == 0


def test_one_beam_is_greedy_decoding() -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with make_llm() as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], greedy, use_tqdm=False)
        beams = run(llm, BeamSearchParams(1, MAX_TOKENS, ignore_eos=True))
    for prompt, output, ((tokens, _),) in zip(PROMPTS, outputs, beams, strict=True):
        assert tokens == prompt + list(output.outputs[0].token_ids)


def test_a_sequence_has_text_logprobs_and_a_reason() -> None:
    with make_llm() as llm:
        (output,) = llm.beam_search("The fox", BeamSearchParams(3, 5))
        tokenizer = llm.get_tokenizer()
        length = len(tokenizer.encode("The fox"))
        for sequence in output.sequences:
            generated = sequence.tokens[length:]
            assert len(sequence.logprobs) == len(generated) <= 5
            total = sum(
                row[token].logprob for row, token in zip(sequence.logprobs, generated, strict=True)
            )
            assert sequence.cum_logprob == total
            assert all(len(row) == 6 for row in sequence.logprobs)
            if sequence.finish_reason == "length":
                assert sequence.text == tokenizer.decode(sequence.tokens)
                assert sequence.stop_reason is None
            else:
                assert (sequence.finish_reason, sequence.stop_reason) == ("stop", EOS)


def test_an_end_token_is_in_the_tokens_and_in_the_text_on_request() -> None:
    """Every token ends the text but one: the best beams have ended."""
    with make_llm() as llm:
        for prompt in PROMPTS:
            for include in (False, True):
                params = BeamSearchParams(
                    16, MAX_TOKENS, length_penalty=3.0, include_stop_str_in_output=include
                )
                (output,) = llm.beam_search({"prompt_token_ids": prompt}, params)
                for sequence in output.sequences:
                    if sequence.finish_reason == "stop":
                        assert sequence.tokens[-1] == EOS
                        assert (sequence.text or "").endswith("</s>") == include


def test_bad_arguments_are_refused_with_the_field_and_the_value() -> None:
    for fields, message in [
        ({"beam_width": 0}, "beam_width must be between 1"),
        ({"beam_width": 65}, "beam_width must be between 1 and 64, got 65"),
        ({"max_tokens": 0}, "max_tokens must be between 1"),
        ({"length_penalty": float("nan")}, "length_penalty must be finite"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
        ({"beam_widht": 1}, "did you mean 'beam_width'"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **fields})
    with pytest.raises(NotSupported, match=r"temperature=0\.7 is not supported"):
        BeamSearchParams(2, 3, temperature=0.7)
    with make_llm() as llm, pytest.raises(InvalidArgument, match="params must be BeamSearchPar"):
        llm.beam_search("a", SamplingParams())  # type: ignore[arg-type]
