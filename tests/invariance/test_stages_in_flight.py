"""Several steps at once among stages have the bits of one rank, whatever runs beside them."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import numpy as np
import pytest
from checkpoints import checkpoint
from llmserve import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams, _core
from llmserve import _core_testing as testing
from llmserve.checkpoint.model_files import demo_model_path
from llmserve.outputs import RequestOutput
from nodes import nodes

SHARED = list(range(40, 75))
PROMPTS = [
    [5, 6, 7],
    [*SHARED, 3, 4],
    [9] * 17,
    list(range(3, 60)),
    [*SHARED, 8, 9, 10],
    [11, 12],
    SHARED[:20],
    list(range(90, 20, -1)),
]
PARAMS = [
    SamplingParams(max_tokens=14, ignore_eos=True, temperature=0, logprobs=2),
    SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9, seed=3, n=2, logprobs=1),
    SamplingParams(max_tokens=9, temperature=1.0, repetition_penalty=1.3),
    SamplingParams(max_tokens=17, temperature=0.7, top_p=0.9, presence_penalty=1),
    SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=1),
    SamplingParams(max_tokens=25, temperature=1.2, top_k=20, stop_token_ids=[17, 30]),
    SamplingParams(max_tokens=12, ignore_eos=True, temperature=0, min_tokens=5),
    SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.8, logit_bias={3: -2.0}),
]


def words(outputs: list[RequestOutput]) -> list[object]:
    return [
        (sample.token_ids, sample.finish_reason, sample.logprobs, output.prompt_logprobs)
        for output in outputs
        for sample in output.outputs
    ]


OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "num_threads": 1}
OPTIONS |= {"num_gpu_blocks_override": 96, "max_num_batched_tokens": 32, "max_num_seqs": 12}


def make_llm(num_stages: int, **options: Any) -> LLM:
    path = checkpoint(options.pop("family", "llama"), num_hidden_layers=4)
    return LLM(path, pipeline_parallel_size=num_stages, **{**OPTIONS, **options})


def run(llm: LLM) -> list[list[object]]:
    """Twice, the second time with what the prefix cache has."""
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [words(llm.generate(prompts, PARAMS, use_tqdm=False)) for _ in range(2)]


def most_in_flight(llm: LLM) -> int:
    return max(step.num_in_flight for step in llm.trace())


@pytest.fixture(scope="module")
def expected() -> list[list[object]]:
    with make_llm(1) as llm:
        return run(llm)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_as_many_steps_as_stages_change_no_bit(
    num_stages: int, expected: list[list[object]]
) -> None:
    with make_llm(num_stages) as llm:
        assert run(llm) == expected
        assert most_in_flight(llm) == num_stages
    with make_llm(num_stages, async_scheduling=False) as llm:
        assert run(llm) == expected
        assert most_in_flight(llm) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpu_blocks_override": 33, "block_size": 4},  # sequences are preempted
        {"enable_prefix_caching": False, "max_num_batched_tokens": 12},
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 2},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 128},
    ],
    ids=str,
)
def test_no_bit_changes_beside_other_options(
    options: dict[str, Any], expected: list[list[object]]
) -> None:
    with make_llm(2, **options) as llm:
        assert run(llm) == expected
        if "num_gpu_blocks_override" in options:
            assert llm.get_metrics().num_preemptions > 0


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "mixtral", "gemma3_text"])
def test_no_bit_changes_of_layers_of_other_kinds(family: str) -> None:
    with make_llm(1, family=family) as llm:
        one = run(llm)
    with make_llm(2, family=family) as llm:
        assert run(llm) == one


def test_grammars_and_stop_strings_end_where_they_do_on_one_rank() -> None:
    shape = StructuredOutputsParams(regex=r"[a-z]{3,8}( [a-z]{2,6}){3}\.")
    params = [
        SamplingParams(max_tokens=40, temperature=1.0, seed=i, structured_outputs=shape)
        for i in range(4)
    ] + [SamplingParams(max_tokens=60, temperature=0.9, seed=i, stop=["e ", "."]) for i in range(4)]
    texts = []
    for num_stages in (1, 2):
        with LLM(demo_model_path(), pipeline_parallel_size=num_stages, max_model_len=128) as llm:
            outputs = llm.generate(["Once", "The"] * 4, params, use_tqdm=False)
            texts.append([(o.outputs[0].text, o.outputs[0].stop_reason) for o in outputs])
    assert texts[0] == texts[1]


def test_embeddings_and_beams_are_those_of_one_rank() -> None:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]

    def outcome(num_stages: int) -> list[Any]:
        with make_llm(num_stages) as llm:
            vectors = [np.asarray(o.outputs.data).tolist() for o in llm.encode(prompts)]
            params = BeamSearchParams(beam_width=3, max_tokens=8)
            beams = llm.beam_search(prompts[:3], params)
            return [vectors, [[s.tokens for s in o.sequences] for o in beams]]

    assert outcome(2) == outcome(1)


# In one of the steps in flight, among prompts or while all decode.
@pytest.mark.parametrize("at", [2, 9, 24])
@pytest.mark.parametrize(("rank", "fault"), [(0, "throw"), (1, "throw"), (2, "leave"), (1, "hang")])
def test_a_stage_that_fails_ends_all_steps_in_flight_and_no_token_is_lost(
    monkeypatch: pytest.MonkeyPatch,
    expected: list[list[object]],
    rank: int,
    fault: str,
    at: int,
) -> None:
    def engine(
        loading: _core.LoadingModel, vocabulary: _core.Vocabulary | None = None
    ) -> _core.Engine:
        faults = testing.RankFaultOptions(
            rank=rank, fault=fault, fail_at_exchange=at, timeout_s=0.5 if fault == "hang" else 60
        )
        return testing.faulty_engine(loading.config, vocabulary=vocabulary, rank_faults=faults)

    monkeypatch.setattr(_core, "Engine", engine)
    begin = time.monotonic()
    with make_llm(3) as llm:
        assert run(llm) == expected
        assert llm.get_metrics().num_rank_failures == 1
    assert time.monotonic() - begin < 30


def test_steps_are_in_flight_among_nodes(expected: list[list[object]]) -> None:
    path = checkpoint("llama", num_hidden_layers=4)
    for options in ({}, {"max_num_batched_tokens": 128}):
        given = {**OPTIONS, **options, "pipeline_parallel_size": 3}
        with nodes(path, 3, **given) as shared, LLM(path, **shared) as llm:
            assert run(llm) == expected
            assert most_in_flight(llm) == 3


def test_a_step_too_large_to_lie_unread_goes_alone_to_another_node() -> None:
    """Whoever sends the numbers of embeddings would wait for a node that waits for the sender."""
    path = checkpoint("llama", num_hidden_layers=4)
    width = json.loads((path / "config.json").read_text())["hidden_size"]
    rng = np.random.default_rng(0)
    prompts = [
        {"prompt_embeds": rng.standard_normal((110 + i, width)).astype(np.float32)}
        for i in range(8)
    ]
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0, logprobs=1)
    tokens = []
    given = {**OPTIONS, "enable_prompt_embeds": True, "max_num_batched_tokens": 128}
    with LLM(path, **given) as llm:
        tokens.append(words(llm.generate(prompts, params, use_tqdm=False)))
    with (
        nodes(path, 2, **given, pipeline_parallel_size=2) as shared,
        LLM(path, **shared) as llm,
    ):
        tokens.append(words(llm.generate(prompts, params, use_tqdm=False)))
    assert tokens[0] == tokens[1]


def test_an_engine_that_closes_with_steps_in_flight_ends() -> None:
    llm = make_llm(4, max_model_len=256, num_gpu_blocks_override=300)
    params = SamplingParams(max_tokens=180, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    errors: list[BaseException] = []

    def generate() -> None:
        try:
            llm.generate(prompts, params, use_tqdm=False)
        except Exception as error:
            errors.append(error)

    caller = threading.Thread(target=generate)
    caller.start()
    while llm.get_metrics().num_generation_tokens < 50:
        time.sleep(0.005)
    assert most_in_flight(llm) == 4
    llm.close()
    caller.join(timeout=30)
    assert not caller.is_alive()
    assert len(errors) == 1  # the call's requests did not finish


def test_an_engine_sleeps_and_goes_on_with_the_same_tokens() -> None:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    params = [params.clone(seed=i) for i, params in enumerate(PARAMS)]
    with make_llm(3) as llm:
        before = words(llm.generate(prompts, params, use_tqdm=False))
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            assert words(llm.generate(prompts, params, use_tqdm=False)) == before
