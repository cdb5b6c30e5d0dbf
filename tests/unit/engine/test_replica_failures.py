"""A replica that cannot execute its steps: others go on with what it ran, and no token is lost."""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from checkpoints import checkpoint
from engine_requests import add_request
from hand_over import wait_until
from llmserve import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams, _core
from llmserve import _core_testing as testing
from llmserve.checkpoint.model_files import demo_model_path
from llmserve.errors import DeviceError
from llmserve.outputs import RequestOutput

DEADLINE_S = 30.0
VOCAB = 64
PROMPTS = [[5, 6, 7], list(range(3, 43)), [9] * 17, list(range(3, 60)), [11] * 30, [12, 13]]
PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=0, logprobs=2),
    SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9, seed=3, n=2, logprobs=1),
    SamplingParams(max_tokens=16, ignore_eos=True, temperature=1.0, repetition_penalty=1.3),
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.7, top_p=0.9, presence_penalty=1),
    SamplingParams(max_tokens=9, ignore_eos=True, temperature=1.0, min_tokens=4),
    SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.0, top_k=9, prompt_logprobs=1),
]
Fail = Callable[..., None]


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """What it is told of the first replica of the next LLM."""

    def script(**faults: object) -> None:
        def engine(
            loading: _core.LoadingModel, vocabulary: _core.Vocabulary | None = None
        ) -> _core.Engine:
            options = testing.FaultOptions(**{"fault": "device", **faults})
            return testing.faulty_engine(loading.config, options, vocabulary)

        monkeypatch.setattr(_core, "Engine", engine)

    return script


def make_llm(model: object = None, **options: Any) -> LLM:
    defaults = {
        "dtype": "float32",
        "max_model_len": 128,
        "num_gpu_blocks_override": 64,
        "max_num_batched_tokens": 50,
        "max_num_seqs": 8,
        "seed": 7,
    }
    return LLM(str(model or checkpoint("llama")), **{**defaults, **options})


def generate(llm: LLM) -> list[RequestOutput]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return llm.generate(prompts, PARAMS, use_tqdm=False)


def words(outputs: list[RequestOutput]) -> list[object]:
    return [
        (output.prompt_logprobs, sample.token_ids, sample.finish_reason, sample.logprobs)
        for output in outputs
        for sample in output.outputs
    ]


# In the first prompt, among the chunks of the others, while all decode; once, and until it stops.
@pytest.mark.parametrize("num_failures", [1, 1000])
@pytest.mark.parametrize("at", [1, 3, 10])
def test_requests_of_a_failed_step_have_the_same_tokens(
    fail: Fail, at: int, num_failures: int
) -> None:
    with make_llm() as llm:
        expected = words(generate(llm))
    fail(fail_at_step=at, num_failures=num_failures)
    with make_llm(data_parallel_size=2) as llm:
        outputs = generate(llm)
        assert words(outputs) == expected
        states, trace = llm.replicas(), llm.trace()
        moved = [output for output in outputs if "took it over" in trace.explain(output.request_id)]
        assert moved
        assert [state.num_taken_over for state in states] == [0, len(moved)]
        for output in moved:
            assert trace.replica(output.request_id) == 1
            assert "which took it over from replica 0" in trace.explain(output.request_id)
            spans = trace.timeline(output.request_id)
            assert all(a.end_us <= b.start_us for a, b in itertools.pairwise(spans))
        # The replica that has failed counts by itself, beside what others answer.
        wait_until(lambda: llm.get_metrics().num_requests_running == 0)
        metrics = llm.get_metrics()
        assert metrics.num_requests_finished == len(PROMPTS)
        assert metrics.num_requests_waiting == 0
        num_tokens = sum(len(s.token_ids) for output in outputs for s in output.outputs)
        assert metrics.num_generation_tokens == num_tokens
        # And whatever comes next.
        again = [words(generate(llm)) for _ in range(3)]
        assert all(row[0] == expected[0] for row in again)  # the greedy one
        expected_stops = [num_failures > 1, False]
        wait_until(lambda: [r.failure is not None for r in llm.replicas()] == expected_stops)


def test_text_stops_grammars_and_beams_go_on(fail: Fail) -> None:
    model = demo_model_path()
    fields = {"temperature": 0.8, "seed": 11, "max_tokens": 24}
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    params = [
        SamplingParams(**fields, stop=[" the", "."], min_tokens=6),
        SamplingParams(**fields, structured_outputs=StructuredOutputsParams(json=schema)),
        SamplingParams(**fields, n=3, structured_outputs=StructuredOutputsParams(regex="[a-f ]+")),
        SamplingParams(**fields, include_stop_str_in_output=True, stop=["a"], min_tokens=3),
    ]
    prompts = ["Once upon a time", "A name:", "The fox", "The dog and"]

    def run(llm: LLM) -> list[object]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [
            (sample.text, sample.token_ids, sample.finish_reason, sample.stop_reason)
            for output in outputs
            for sample in output.outputs
        ]

    def search(llm: LLM) -> list[object]:
        outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=9))
        return [(s.tokens, s.cum_logprob) for output in outputs for s in output.sequences]

    with make_llm(model) as llm:
        expected = {run: run(llm), search: search(llm)}
    for work, at in ((run, 2), (run, 6), (search, 1), (search, 4)):
        fail(fail_at_step=at)
        with make_llm(model, data_parallel_size=2) as llm:
            assert work(llm) == expected[work]
            assert llm.replicas()[1].num_taken_over > 0


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])
def test_who_has_moved_is_guessed_again(fail: Fail, method: str) -> None:
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    if method == "draft_model":
        config["model"] = checkpoint("llama")
    # One alone, which soon repeats itself.
    prompt = {"prompt_token_ids": [5, 6, 7, 5, 6, 7, 5, 6]}
    params = SamplingParams(
        max_tokens=40, temperature=0.5, seed=3, ignore_eos=True, allowed_token_ids=[5, 6, 7]
    )

    def repeat(llm: LLM) -> list[object]:
        return words(llm.generate(prompt, params, use_tqdm=False))

    with make_llm() as llm:
        expected = {generate: words(generate(llm)), repeat: repeat(llm)}
    fail(fail_at_step=4)
    with make_llm(data_parallel_size=2, speculative_config=config) as llm:
        assert words(generate(llm)) == expected[generate]
        assert llm.replicas()[1].num_taken_over > 0
    fail(fail_at_step=2)
    with make_llm(data_parallel_size=2, speculative_config=config) as llm:
        assert repeat(llm) == expected[repeat]
        assert llm.replicas()[1].num_taken_over == 1
        assert llm.replicas()[1].metrics.num_accepted_tokens > 0


# -- on an oracle in the place of a model --------------------------------------------------------


def make_engine(size: int = 2, step_us: int = 0, **faults: Any) -> _core.Engine:
    config = _core.EngineConfig(
        cache=_core.CacheConfig(num_blocks=64, block_size=8),
        parallel=_core.ParallelConfig(data_parallel_size=size),
        scheduler=_core.SchedulerConfig(
            max_model_len=256, max_num_batched_tokens=64, max_num_seqs=4
        ),
    )
    return testing.oracle_engine(
        config,
        testing.OracleOptions(vocab_size=VOCAB, step_us=step_us),
        faults=testing.FaultOptions(**faults),
    )


def params(max_tokens: int = 4) -> _core.SamplingParams:
    return _core.SamplingParams(detokenize=False, max_tokens=max_tokens)


def finish(engine: _core.Engine, ids: set[int]) -> tuple[dict[int, str], dict[int, list[int]]]:
    reasons: dict[int, str] = {}
    tokens: dict[int, list[int]] = defaultdict(list)
    deadline = time.monotonic() + DEADLINE_S
    while ids - set(reasons):
        assert time.monotonic() < deadline
        for event in engine.wait_events(0.1):
            tokens[event.request_id] += event.token_ids
            if event.is_request_finished:
                assert event.request_id not in reasons
                reasons[event.request_id] = str(event.finish_reason)
    return reasons, tokens


def test_what_waits_goes_with_what_runs_when_a_replica_stops() -> None:
    requests = [[i] * (1 + i % 5) for i in range(40)]
    plain = make_engine(1)
    ids = plain.add_requests([_core.EngineRequest(prompt, params(30)) for prompt in requests])
    _, expected = finish(plain, set(ids))
    engine = make_engine(3, fail_at_step=5, num_failures=1000, fault="device")
    ids = engine.add_requests([_core.EngineRequest(prompt, params(30)) for prompt in requests])
    reasons, tokens = finish(engine, set(ids))
    assert set(reasons.values()) == {"length"}
    assert tokens == expected
    wait_until(lambda: engine.replica_failure(0))
    taken_over = [engine.replica_taken_over(i) for i in range(3)]
    assert taken_over[0] == 0  # and which of the others has room at that moment takes them
    assert sum(taken_over) > 0
    assert {engine.request_record(i).replica for i in ids} <= {0, 1, 2}  # type: ignore[union-attr]
    wait_until(lambda: [load.num_requests for load in engine.loads()] == [0, 0, 0])
    wait_until(lambda: engine.replica_metrics(0).num_blocks_used == 0)


def test_with_nobody_to_go_on_a_request_ends_with_its_step() -> None:
    engine = make_engine(1, fail_at_step=1, fault="device")
    reasons, _ = finish(engine, {add_request(engine, [1], params())})
    assert list(reasons.values()) == ["error"]
    assert not engine.failure
    reasons, _ = finish(engine, {add_request(engine, [1], params())})
    assert list(reasons.values()) == ["length"]


def test_what_a_second_replica_cannot_execute_ends_and_takes_no_third_with_it() -> None:
    engine = make_engine(3, fail_at_step=0, num_failures=1000, fault="device", num_replicas=2)
    reasons: dict[int, str] = {}
    for _ in range(40):
        ids = engine.add_requests([_core.EngineRequest([i], params()) for i in range(3)])
        reasons |= finish(engine, set(ids))[0]
        if engine.replica_failure(0) and engine.replica_failure(1):
            break
    assert set(reasons.values()) == {"error", "length"}
    assert not engine.replica_failure(2)
    assert not engine.failure
    ids = engine.add_requests([_core.EngineRequest([i], params()) for i in range(6)])
    assert set(finish(engine, set(ids))[0].values()) == {"length"}
    # The last one stops like an engine of its own.
    last = make_engine(2, fail_at_step=0, num_failures=1000, fault="device", num_replicas=2)
    for _ in range(3):
        assert set(finish(last, {add_request(last, [1], params())})[0].values()) == {"error"}
    wait_until(lambda: last.failure)
    with pytest.raises(DeviceError, match="the engine has stopped"):
        add_request(last, [1], params())


def test_aborts_find_requests_that_have_moved() -> None:
    engine = make_engine(2, step_us=300, fail_at_step=3, num_failures=1000, fault="device")
    ids = engine.add_requests([_core.EngineRequest([i], params(200)) for i in range(8)])
    aborted = ids[::2]

    def abort(some: list[int]) -> None:
        for request_id in some:
            time.sleep(0.0005)
            engine.abort(request_id)

    threads = [threading.Thread(target=abort, args=(aborted[i::2],)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reasons, _ = finish(engine, set(ids))
    assert [reasons[i] for i in ids] == ["abort", "length"] * 4
    wait_until(lambda: engine.metrics().num_requests_aborted == 4)
