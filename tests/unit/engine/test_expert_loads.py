"""How many rows each expert was given, where that is counted."""

from __future__ import annotations

import pytest
from checkpoints import checkpoint
from llmserve import LLM, NotSupported, SamplingParams
from llmserve.bench.run import Workload, run_throughput

PROMPTS = [{"prompt_token_ids": [5, 9, 200, 31, 7]}, {"prompt_token_ids": [1, 2, 3]}]
PARAMS = SamplingParams(temperature=0, max_tokens=4, detokenize=False, ignore_eos=True)
SMALL = {"num_threads": 1, "num_gpu_blocks_override": 64, "enable_prefix_caching": False}


def test_every_token_is_given_as_many_experts_as_the_model_says() -> None:
    with LLM(checkpoint("qwen3_moe"), count_expert_loads=True, **SMALL) as llm:
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        loads = llm.expert_loads()
        assert list(loads) == [0]  # the other layer is dense
        assert len(loads[0]) == 6
        num_tokens = 5 + 3 + 2 * 3  # the last token that is drawn is not run
        assert sum(loads[0]) == 3 * num_tokens
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert llm.expert_loads()[0] == [2 * rows for rows in loads[0]]


def test_nothing_is_counted_unasked_and_tokens_are_the_same() -> None:
    tokens = []
    for counts in (False, True):
        with LLM(checkpoint("olmoe"), count_expert_loads=counts, **SMALL) as llm:
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            tokens.append([output.outputs[0].token_ids for output in outputs])
            assert bool(llm.expert_loads()) == counts
    assert tokens[0] == tokens[1]


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(NotSupported, match=r"count_expert_loads: LlamaForCausalLM .* no experts"):
        LLM(checkpoint("llama"), count_expert_loads=True, **SMALL)


def test_bench_says_how_even_the_loads_were() -> None:
    work = Workload(num_prompts=2, input_len=8, output_len=4)
    arguments = {**SMALL, "count_expert_loads": True}
    model = str(checkpoint("mixtral"))
    figures = run_throughput(model, work, 1, arguments, lambda steps, _: iter(steps)).figures
    assert 1 <= figures["expert_balance"] <= figures["expert_balance_worst"] <= 5
    assert figures["bound_s"] > 0
