"""A rank that fails in the middle of a step: noticed at once, and no token is lost."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from checkpoints import checkpoint
from llmserve import LLM, DeviceError, SamplingParams, StructuredOutputsParams, _core
from llmserve import _core_testing as testing
from llmserve.checkpoint.model_files import demo_model_path
from llmserve.outputs import RequestOutput

NOTICED_WITHIN_S = 5  # on a machine that is not busy; the suite allows three times as much
PROMPTS = [[5, 6, 7], list(range(3, 43)), [9] * 17, list(range(3, 60))]
PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=0, logprobs=2),
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.9, seed=3, n=2, logprobs=1),
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, repetition_penalty=1.3),
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.7, top_p=0.9, presence_penalty=1),
]
Fail = Callable[..., None]


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """What it is told of the next LLM's ranks, of which one fails."""

    def script(**faults: object) -> None:
        def engine(
            loading: _core.LoadingModel, vocabulary: _core.Vocabulary | None = None
        ) -> _core.Engine:
            return testing.faulty_engine(
                loading.config,
                vocabulary=vocabulary,
                rank_faults=testing.RankFaultOptions(**faults),
            )

        monkeypatch.setattr(_core, "Engine", engine)

    return script


def make_llm(num_ranks: int, num_stages: int = 1) -> LLM:
    return LLM(
        checkpoint("llama", num_hidden_layers=max(2, num_stages)),
        dtype="float32",
        max_model_len=128,
        num_gpu_blocks_override=64,
        max_num_batched_tokens=50,
        max_num_seqs=8,
        tensor_parallel_size=num_ranks,
        pipeline_parallel_size=num_stages,
    )


def run(llm: LLM) -> list[RequestOutput]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return llm.generate(prompts, PARAMS, use_tqdm=False)


def words(outputs: list[RequestOutput]) -> list[object]:
    return [
        (sample.token_ids, sample.finish_reason, sample.logprobs)
        for output in outputs
        for sample in output.outputs
    ]


# In the first prompt, between its chunks, and while all decode. A step of two layers gathers nine
# times.
@pytest.mark.parametrize("at", [3, 13, 100])
@pytest.mark.parametrize("fault", ["throw", "leave", "hang"])
@pytest.mark.parametrize("rank", [0, 1])
def test_all_requests_go_on_with_the_same_tokens(
    fail: Fail, rank: int, fault: str, at: int
) -> None:
    with make_llm(1) as llm:
        expected = [words(run(llm)) for _ in range(2)]
    timeout_s = 0.3 if fault == "hang" else 60
    fail(rank=rank, fault=fault, fail_at_exchange=at, timeout_s=timeout_s)
    with make_llm(2) as llm:
        begin = time.monotonic()
        assert words(run(llm)) == expected[0]
        assert time.monotonic() - begin < 3 * NOTICED_WITHIN_S
        metrics = llm.get_metrics()
        assert metrics.num_rank_failures == 1
        assert metrics.num_requests_running == 0
        assert words(run(llm)) == expected[1]


def test_grammars_go_on_where_they_were(fail: Fail) -> None:
    params = SamplingParams(
        max_tokens=40,
        temperature=1.0,
        seed=5,
        structured_outputs=StructuredOutputsParams(regex=r"[a-z]{3,8}( [a-z]{2,6}){3}\."),
    )
    texts = []
    for num_ranks in (1, 3):
        if num_ranks > 1:
            fail(rank=2, fail_at_exchange=90)
        with LLM(demo_model_path(), tensor_parallel_size=num_ranks, max_model_len=128) as llm:
            texts.append([o.outputs[0].text for o in llm.generate(["Once", "The"], params)])
            assert llm.get_metrics().num_rank_failures == num_ranks // 2
    assert texts[0] == texts[1]


def test_a_rank_that_fails_twice_in_a_row_is_forgiven_and_no_more(fail: Fail) -> None:
    with make_llm(1) as llm:
        expected = words(run(llm))
    fail(rank=1, fail_at_exchange=20, num_failures=2)
    with make_llm(2) as llm:
        assert words(run(llm)) == expected
        assert llm.get_metrics().num_rank_failures == 2
    fail(rank=1, fail_at_exchange=20, num_failures=1000)
    with make_llm(2) as llm:
        outputs = run(llm)
        assert {sample.finish_reason for o in outputs for sample in o.outputs} == {"error"}
        assert all("the rank was told to fail" in o.outputs[0].error for o in outputs)
        assert llm.get_metrics().num_rank_failures == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stands_still_while_others_wait_is_noticed(fail: Fail, rank: int) -> None:
    """Long before an exchange gives up by itself."""
    with make_llm(1) as llm:
        expected = [words(run(llm)) for _ in range(2)]
    fail(rank=rank, fault="hang", fail_at_exchange=30, timeout_s=600, still_s=0.75)
    with make_llm(3) as llm:
        begin = time.monotonic()
        assert words(run(llm)) == expected[0]
        assert 0.75 <= time.monotonic() - begin < 3 * NOTICED_WITHIN_S
        assert llm.get_metrics().num_rank_failures == 1
        assert words(run(llm)) == expected[1]


@pytest.mark.long
def test_a_rank_that_stands_still_is_noticed_within_five_seconds(fail: Fail) -> None:
    fail(rank=1, fault="hang", fail_at_exchange=30, timeout_s=600)
    with make_llm(2) as llm:
        begin = time.monotonic()
        run(llm)
        assert time.monotonic() - begin < NOTICED_WITHIN_S
        assert llm.get_metrics().num_rank_failures == 1


@pytest.mark.parametrize("sizes", [{"num_ranks": 2}, {"num_ranks": 1, "num_stages": 3}], ids=str)
def test_a_rank_that_never_comes_back_stops_the_engine_and_is_named(
    fail: Fail, sizes: dict[str, int]
) -> None:
    fail(rank=1, fault="stuck", fail_at_exchange=10, timeout_s=600, still_s=0.5, left_s=0.5)
    llm = make_llm(**sizes)
    begin = time.monotonic()
    outputs = run(llm)
    assert time.monotonic() - begin < 3 * NOTICED_WITHIN_S
    message = (
        r"rank 1 of \d has stood still for 1 s, after the op \w+ was begun.*restart the process"
    )
    for output in outputs:
        for sample in output.outputs:
            assert sample.finish_reason == "error"
            assert re.search(message, str(output.outputs[0].error))
    with pytest.raises(DeviceError, match="the engine has stopped: rank 1"):
        run(llm)
    llm.close()
    assert time.monotonic() - begin < 3 * NOTICED_WITHIN_S


def stuck_engine(
    monkeypatch: pytest.MonkeyPatch, *, at_step: int = 0, **rank_faults: object
) -> None:
    """Of the next LLM: its thread sleeps for ever, in a step or in an exchange of rank 0."""
    faults = testing.FaultOptions(fail_at_step=at_step or -1, fault="stuck")
    patience = {"still_s": 0.5, "left_s": 0.5, "timeout_s": 600, **rank_faults}

    def engine(
        loading: _core.LoadingModel, vocabulary: _core.Vocabulary | None = None
    ) -> _core.Engine:
        return testing.faulty_engine(
            loading.config,
            faults=faults,
            vocabulary=vocabulary,
            rank_faults=testing.RankFaultOptions(**patience),
        )

    monkeypatch.setattr(_core, "Engine", engine)


@pytest.mark.parametrize(
    ("faults", "num_ranks"),
    [({"at_step": 6}, 1), ({"at_step": 6}, 2)]
    + [({"rank": 0, "fault": "stuck", "fail_at_exchange": 40}, n) for n in (2, 3)],
    ids=str,
)
def test_an_engine_whose_own_thread_hangs_fails_its_requests_and_can_be_closed(
    monkeypatch: pytest.MonkeyPatch, faults: dict[str, object], num_ranks: int
) -> None:
    stuck_engine(monkeypatch, **faults)
    llm = make_llm(num_ranks)
    begin = time.monotonic()
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    short = SamplingParams(max_tokens=1, temperature=0)
    outputs = llm.generate(prompts, [short, *PARAMS[1:]], use_tqdm=False)
    assert time.monotonic() - begin < 3 * NOTICED_WITHIN_S
    assert outputs[0].outputs[0].finish_reason == "length"  # before it hung
    message = r"the engine's thread has stood still for 1 s, after the op .*restart the process"
    for output in outputs[1:]:
        assert {sample.finish_reason for sample in output.outputs} == {"error"}
        assert re.search(message, str(output.outputs[0].error))
    assert llm.stood_still_s()[0] >= 0.5
    assert re.search(message, str(llm.failure))
    with pytest.raises(DeviceError, match="the engine has stopped: the engine's thread"):
        run(llm)
    llm.close()
    assert time.monotonic() - begin < 3 * NOTICED_WITHIN_S


def test_a_process_whose_engine_hangs_ends() -> None:
    """While a call waits for it, by itself once the call has failed."""
    script = f"""
from llmserve import LLM, SamplingParams, _core
from llmserve import _core_testing as testing
def engine(loading, vocabulary=None, *_):
    return testing.faulty_engine(
        loading.config, faults=testing.FaultOptions(fail_at_step=3, fault="stuck"),
        vocabulary=vocabulary, rank_faults=testing.RankFaultOptions(still_s=0.5, left_s=0.5))
_core.Engine = engine
llm = LLM({str(checkpoint("llama"))!r}, num_gpu_blocks_override=64, max_model_len=128)
output, = llm.generate([{{"prompt_token_ids": [5, 6, 7]}}], SamplingParams(max_tokens=9))
print(output.outputs[0].finish_reason)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "error"), done.stderr


@pytest.mark.long
def test_nobody_is_given_up_on_a_machine_that_twenty_others_keep_busy(fail: Fail) -> None:
    """Threads that get a twentieth of a processor have not hung."""
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    params = SamplingParams(max_tokens=3, temperature=0)
    fail()
    with make_llm(1) as one, make_llm(2) as two:
        expected = words(one.generate(prompts, params, use_tqdm=False))
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(20)]
        try:
            for llm in (one, two):
                assert words(llm.generate(prompts, params, use_tqdm=False)) == expected
                assert llm.get_metrics().num_rank_failures == 0
                assert llm.failure is None
        finally:
            for other in others:
                other.kill()
                other.wait()


def test_who_waits_for_a_callers_code_does_not_stand_still(fail: Fail) -> None:
    """The ranks of the first stages wait for rank 0, which waits for a logits processor."""

    def dawdle(_: list[int], logits: object) -> object:
        time.sleep(0.6)
        return logits

    fail(still_s=0.25)
    with make_llm(1, num_stages=2) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        params = SamplingParams(max_tokens=3, temperature=0, logits_processors=[dawdle])
        quick = SamplingParams(max_tokens=3, temperature=0)
        llm.generate(prompts, [params, quick, quick, quick], use_tqdm=False)
        assert llm.get_metrics().num_rank_failures == 0
