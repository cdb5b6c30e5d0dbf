"""Prompts of embeddings: the model's own rows are as good as the ids, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import VOCAB_SIZE, checkpoint, reference_model
from llmserve import LLM, InvalidArgument, RequestOutput, SamplingParams

HIDDEN_SIZE = 48
PARAMS = SamplingParams(max_tokens=20, temperature=0.8, seed=3, ignore_eos=True, logprobs=3)


def make_prompts() -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (1, 5, 16, 33, 70)]


PROMPTS = make_prompts()


def rows(prompt: list[int], dtype: str = "float32") -> Any:
    """The embedding table's rows of a prompt: a torch tensor [T, E]."""
    import torch

    table = reference_model(checkpoint("llama", dtype=dtype)).get_input_embeddings().weight
    return table.detach()[torch.tensor(prompt)].to(getattr(torch, dtype))


def make_llm(dtype: str = "float32", **options: Any) -> LLM:
    defaults = {"max_model_len": 256, "num_gpu_blocks_override": 200, "num_threads": 1}
    defaults["enable_prompt_embeds"] = True
    return LLM(checkpoint("llama", dtype=dtype), dtype=dtype, **{**defaults, **options})


def run(llm: LLM, prompts: list[Any], params: SamplingParams = PARAMS) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def results(outputs: list[RequestOutput]) -> list[Any]:
    return [[(s.token_ids, s.logprobs) for s in output.outputs] for output in outputs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 8, "max_num_seqs": 5},
        {"enable_chunked_prefill": False},
        {"device": "ref"},
    ],
    ids=str,
)
def test_the_models_own_rows_give_the_tokens_of_the_ids(
    dtype: str, options: dict[str, Any]
) -> None:
    with make_llm(dtype, **options) as llm:
        by_ids = results(run(llm, [{"prompt_token_ids": p} for p in PROMPTS]))
        by_rows = run(llm, [{"prompt_embeds": rows(p, dtype)} for p in PROMPTS])
        assert results(by_rows) == by_ids
        assert [output.prompt_token_ids for output in by_rows] == [[]] * len(PROMPTS)


def test_arrays_of_every_kind_are_taken() -> None:
    import torch

    tensor = rows(PROMPTS[2])
    with make_llm() as llm:
        expected = results(run(llm, [{"prompt_token_ids": PROMPTS[2]}]))
        padded = torch.zeros(len(tensor), 2 * HIDDEN_SIZE)
        padded[:, ::2] = tensor
        strided = [padded[:, ::2], tensor.t().contiguous().t()]
        for array in (tensor, tensor.numpy(), *strided, torch.nn.Parameter(tensor)):
            assert results(run(llm, [{"prompt_embeds": array}])) == expected
        half = tensor.half()
        (of_half,) = results(run(llm, [{"prompt_embeds": half}]))
        assert [of_half] == results(run(llm, [{"prompt_embeds": half.float()}]))


def test_the_callers_array_may_change_afterwards() -> None:
    array = rows(PROMPTS[3]).numpy().copy()
    with make_llm() as llm:
        expected = results(run(llm, [{"prompt_token_ids": PROMPTS[3]}]))
        stream = llm.stream({"prompt_embeds": array}, PARAMS)
        first = next(stream)
        array[:] = np.nan
        *_, last = [first, *stream]
        assert results([last]) == expected


def test_they_run_again_from_the_rows_after_a_preemption() -> None:
    # Long enough that all run together, whatever the machine, and together they need more blocks.
    params = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True, logprobs=2)
    with make_llm() as llm:
        expected = results(run(llm, [{"prompt_token_ids": p} for p in PROMPTS], params))
    with make_llm(num_gpu_blocks_override=16) as llm:
        given = run(llm, [{"prompt_embeds": rows(p)} for p in PROMPTS], params)
        assert results(given) == expected
        assert llm.get_metrics().num_preemptions > 0


def test_their_blocks_are_shared_by_samples_and_by_nobody_else() -> None:
    """Rows of one prompt and of another have no ids that would tell them apart."""
    params = SamplingParams(n=3, max_tokens=20, temperature=0.9, seed=1, logprobs=1)
    other = PROMPTS[4][::-1]
    with make_llm() as llm:
        expected = results(run(llm, [{"prompt_token_ids": p} for p in (PROMPTS[4], other)], params))
        llm.reset_prefix_cache()
        for _ in range(2):
            outputs = run(llm, [{"prompt_embeds": rows(p)} for p in (PROMPTS[4], other)], params)
            assert results(outputs) == expected
            assert [output.num_cached_tokens for output in outputs] == [0, 0]
        metrics = llm.get_metrics()
        assert metrics.num_blocks_used == metrics.num_blocks_cached == 0


def test_hidden_states_and_beams_of_embeddings_are_those_of_the_ids() -> None:
    from llmserve import BeamSearchParams

    with make_llm() as llm:
        ids, embeds = {"prompt_token_ids": PROMPTS[3]}, {"prompt_embeds": rows(PROMPTS[3])}
        by_ids, by_rows = llm.encode([ids, embeds], use_tqdm=False)
        assert np.array_equal(np.asarray(by_ids.outputs.data), np.asarray(by_rows.outputs.data))
        beams = llm.beam_search([ids, embeds], BeamSearchParams(3, max_tokens=6))
        length = len(PROMPTS[3])
        assert [s.tokens[length:] for s in beams[0].sequences] == [
            s.tokens for s in beams[1].sequences
        ]


def test_what_is_not_rows_of_the_model_is_refused_with_the_place() -> None:
    good = rows(PROMPTS[1]).numpy()
    bad = good.copy()
    bad[3, 7] = np.inf
    cases = [
        (bad, r"prompt\['prompt_embeds'\]: expected finite numbers, got inf at \[3, 7\]"),
        (good[:, :5], r"hidden size 48 as its last dimension, got shape \(5, 5\)"),
        (good[0], r"expected float32, bfloat16 or float16 \[tokens, hidden size\].*\[48\]"),
        (good[:0], r"one token at least, got float32 \[0, 48\]"),
        (good.astype(np.int32), "expected float32, bfloat16 or float16"),
        ([[1.0] * 48], "expected a NumPy array, a torch tensor"),
        (np.zeros((256, 48), np.float32), "256 tokens, but max_model_len=256"),
    ]
    with make_llm() as llm:
        for array, message in cases:
            with pytest.raises(InvalidArgument, match=message):
                run(llm, [{"prompt_embeds": array}])
        with pytest.raises(InvalidArgument, match="'prompt_token_ids' and 'prompt_embeds'"):
            run(llm, [{"prompt_embeds": good, "prompt_token_ids": [1]}])
        with pytest.raises(InvalidArgument, match="prompt_logprobs are of token ids"):
            run(llm, [{"prompt_embeds": good}], SamplingParams(prompt_logprobs=1))


def test_they_are_taken_only_where_the_llm_was_made_for_them(tmp_path: Path) -> None:
    with (
        make_llm(enable_prompt_embeds=False) as llm,
        pytest.raises(InvalidArgument, match="enable_prompt_embeds=True"),
    ):
        run(llm, [{"prompt_embeds": rows(PROMPTS[0])}])
