"""Several engines of one process on the same weights: the tokens of one, and one router."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from checkpoints import checkpoint
from engine_requests import add_request
from llmserve import LLM, InvalidArgument, NotSupported, SamplingParams, _core, _core_testing
from llmserve.errors import DeviceError, QueueFull
from llmserve.outputs import RequestOutput

DEADLINE_S = 30.0
BLOCK = 8
VOCAB = 64
PROMPTS = [[5, 6, 7], list(range(3, 43)), [9] * 17, list(range(3, 60)), [11] * 30, [12, 13]]
PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=0, logprobs=2),
    SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9, seed=3, n=2, logprobs=1),
    SamplingParams(max_tokens=16, ignore_eos=True, temperature=1.0, repetition_penalty=1.3),
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.7, top_p=0.9, presence_penalty=1),
    SamplingParams(max_tokens=9, ignore_eos=True, temperature=1.0),
    SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.0, top_k=9, prompt_logprobs=1),
]


def make_llm(family: str = "llama", **options: Any) -> LLM:
    defaults = {
        "dtype": "float32",
        "max_model_len": 128,
        "num_gpu_blocks_override": 64,
        "max_num_batched_tokens": 50,
        "max_num_seqs": 8,
        "seed": 7,
    }
    return LLM(checkpoint(family), **{**defaults, **options})


def generate(llm: LLM) -> list[RequestOutput]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return llm.generate(prompts, PARAMS, use_tqdm=False)


def words(outputs: list[RequestOutput]) -> list[object]:
    return [
        (output.request_id, sample.token_ids, sample.finish_reason, sample.logprobs)
        for output in outputs
        for sample in output.outputs
    ]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"data_parallel_size": 2}),
        ("llama", {"data_parallel_size": 3, "num_threads": 4}),
        ("qwen3_moe", {"data_parallel_size": 2}),
        ("deepseek_v3", {"data_parallel_size": 2, "tensor_parallel_size": 2}),
        ("gemma3_text", {"data_parallel_size": 2, "dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_replicas_have_the_tokens_of_one_engine(family: str, options: dict[str, Any]) -> None:
    plain = {name: value for name, value in options.items() if "parallel" not in name}
    with make_llm(family, **plain) as llm:
        expected = [words(generate(llm)) for _ in range(2)]
    with make_llm(family, **options) as llm:
        assert [words(generate(llm)) for _ in range(2)] == expected
        states = llm.replicas()
    assert [state.replica for state in states] == list(range(options["data_parallel_size"]))
    assert all(state.num_routed > 0 for state in states)  # all had work
    assert sum(state.num_routed for state in states) == 2 * len(PROMPTS)


def test_metrics_and_traces_name_the_replica() -> None:
    with make_llm(data_parallel_size=2) as llm:
        outputs = generate(llm)
        trace, metrics, states = llm.trace(), llm.get_metrics(), llm.replicas()
        replicas = {int(output.request_id): trace.replica(output.request_id) for output in outputs}
        assert set(replicas.values()) == {0, 1}
        for request_id, replica in replicas.items():
            assert f"replica {replica}, " in trace.explain(request_id)
            assert {step.replica for step in trace.steps_of(request_id)} == {replica}
            spans = trace.timeline(request_id)
            assert spans[-1].activity in ("prefill", "decode")
        starts = [step.start_us for step in trace]
        assert starts == sorted(starts)
        num_tokens = sum(state.metrics.num_generation_tokens for state in states)
        assert (
            metrics.num_generation_tokens
            == num_tokens
            == sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        )
        assert metrics.num_blocks_total == 2 * 64
        assert llm.num_kv_tokens == 2 * 64 * llm.block_size
        assert all(state.failure is None for state in states)
        assert "replica" in trace._repr_html_()
        assert "replicas=2" in repr(llm)
    with make_llm() as llm:
        outputs = generate(llm)
        assert llm.replicas() == []
        assert "replica" not in llm.trace().explain(outputs[0].request_id)


def test_a_perfetto_file_has_a_track_for_the_steps_of_each_replica(tmp_path: Any) -> None:
    from llmserve.insight.perfetto import read_lives

    with make_llm(data_parallel_size=2) as llm:
        outputs = generate(llm)
        llm.trace().to_perfetto(tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert '"steps of replica 0"' in text
    assert '"steps of replica 1"' in text
    lives = read_lives(tmp_path / "trace.json")
    assert set(lives) == {output.request_id for output in outputs}
    assert {summary.split(",")[0] for summary, _ in lives.values()} == {"replica 0", "replica 1"}


def test_replicas_share_one_copy_of_the_weights_and_sleep_together() -> None:
    with make_llm() as one:
        use = one.get_memory_use()
    with make_llm(data_parallel_size=2) as llm:
        expected = words(generate(llm))
        both = llm.get_memory_use()
        assert both.weight_bytes == use.weight_bytes
        assert both.kv_cache_bytes == 2 * use.kv_cache_bytes
        llm.sleep(level=2)
        assert llm.is_sleeping()
        assert llm.get_memory_use().weight_bytes == 0
        with pytest.raises(InvalidArgument, match="asleep"):
            llm.generate([{"prompt_token_ids": [5]}], use_tqdm=False)
        llm.wake_up(["weights"])
        assert llm.is_sleeping()
        llm.wake_up()
        assert llm.get_memory_use().weight_bytes == use.weight_bytes
        again = words(generate(llm))
    assert again[0][1:] == expected[0][1:]  # the greedy one


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_plan_of_replicas_is_what_they_allocate(family: str) -> None:
    arguments: dict[str, Any] = {"max_model_len": 100, "max_num_seqs": 4, "num_threads": 2}
    arguments |= {"num_gpu_blocks_override": 40, "data_parallel_size": 2, "dtype": "bfloat16"}
    one = LLM.plan(checkpoint(family), **{**arguments, "data_parallel_size": 1, "num_threads": 1})
    plan = LLM.plan(checkpoint(family), **arguments)
    assert plan.weight_bytes == one.weight_bytes
    assert plan.kv_cache_bytes == 2 * one.kv_cache_bytes
    assert plan.workspace_bytes == 2 * one.workspace_bytes
    assert plan.num_users(100) == 2 * one.num_users(100)
    assert "2 replicas with 40 blocks" in str(plan)
    with LLM(checkpoint(family), **arguments) as llm:
        use = llm.get_memory_use()
    assert use.weight_bytes == plan.weight_bytes
    assert use.workspace_bytes == plan.workspace_bytes
    assert use.kv_cache_bytes == plan.kv_cache_bytes


def test_a_pool_that_is_sized_by_memory_is_divided_among_replicas() -> None:
    arguments: dict[str, Any] = {"max_model_len": 128, "available_memory_bytes": 2**25}
    arguments |= {"num_threads": 2, "dtype": "float32"}
    one = LLM.plan(checkpoint("llama"), **arguments)
    two = LLM.plan(checkpoint("llama"), data_parallel_size=2, **arguments)
    assert one.pool_bound == two.pool_bound == "gpu_memory_utilization"
    assert two.total_bytes <= one.gpu_memory_utilization * 2**25
    assert 0 < 2 * two.num_blocks < one.num_blocks


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"data_parallel_size": 0}, InvalidArgument, "data_parallel_size must be between 1 and 64"),
        ({"data_parallel_size": 8, "tensor_parallel_size": 9}, InvalidArgument, "72 ranks, of whi"),
        ({"data_parallel_rank": 1}, NotSupported, "data_parallel_rank=1 .*replicas are threads"),
        ({"data_parallel_address": "x"}, NotSupported, "data_parallel_address='x' .*llmserve rout"),
    ],
    ids=str,
)
def test_what_replicas_cannot_be_is_refused_by_name(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_llm(**options)


# -- on an oracle in the place of a model --------------------------------------------------------


def make_config(num_replicas: int = 2, **scheduler: Any) -> _core.EngineConfig:
    defaults = {"max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    return _core.EngineConfig(
        cache=_core.CacheConfig(num_blocks=64, block_size=BLOCK),
        parallel=_core.ParallelConfig(data_parallel_size=num_replicas),
        scheduler=_core.SchedulerConfig(**{**defaults, **scheduler}),
    )


def make_engine(
    num_replicas: int = 2,
    faults: dict[str, Any] | None = None,
    gate: _core_testing.StepGate | None = None,
    step_us: int = 0,
    **scheduler: Any,
) -> _core.Engine:
    return _core_testing.oracle_engine(
        make_config(num_replicas, **scheduler),
        _core_testing.OracleOptions(vocab_size=VOCAB, step_us=step_us),
        faults=_core_testing.FaultOptions(**(faults or {})),
        gate=gate,
    )


def params(max_tokens: int = 4) -> _core.SamplingParams:
    return _core.SamplingParams(detokenize=False, max_tokens=max_tokens)


def finish(engine: _core.Engine, ids: set[int]) -> dict[int, str]:
    """Waits for these requests; how each ended."""
    reasons: dict[int, str] = {}
    deadline = time.monotonic() + DEADLINE_S
    while ids - set(reasons):
        assert time.monotonic() < deadline
        for event in engine.wait_events(0.1):
            if event.is_request_finished:
                reasons[event.request_id] = str(event.finish_reason)
    return reasons


def split(hashes: bytes) -> set[bytes]:
    return {hashes[i : i + 32] for i in range(0, len(hashes), 32)}


def test_a_prompt_goes_where_its_beginning_is_and_others_where_less_is_done() -> None:
    engine = make_engine()
    first = list(range(40))
    home = add_request(engine, first, params())
    finish(engine, {home})
    replica = engine.request_record(home).replica  # type: ignore[union-attr]
    for turn in range(3):
        again = add_request(engine, [*first, 41 + turn], params())
        finish(engine, {again})
        record = engine.request_record(again)
        assert record is not None
        assert record.replica == replica
        assert record.num_cached_tokens >= 40 // BLOCK * BLOCK - BLOCK
    others = [add_request(engine, [50 + i] * 20, params()) for i in range(10)]
    finish(engine, set(others))
    assert {engine.request_record(i).replica for i in others} == {0, 1}  # type: ignore[union-attr]
    loads = engine.loads()
    assert sum(load.num_routed for load in loads) == 14
    assert [(load.num_requests, load.num_tokens) for load in loads] == [(0, 0), (0, 0)]
    assert sum(load.num_hit_tokens for load in loads) >= 3 * 32


def test_requests_of_one_call_are_spread_by_what_they_cost() -> None:
    engine = make_engine()
    requests = [_core.EngineRequest([i] * 16, params(64)) for i in range(12)]
    ids = engine.add_requests(requests)
    assert ids == list(range(12))
    finish(engine, set(ids))
    counts = [load.num_routed for load in engine.loads()]
    assert counts == [6, 6]


def test_block_events_are_those_of_one_cache_and_by_replica() -> None:
    engine = make_engine()
    assert engine.block_events(0) is None
    number, hashes = engine.block_snapshot()
    assert hashes == b""
    router = _core.Router(_core.RouterConfig(block_size=BLOCK))
    router.add_replica("all")
    router.restore(0, number, hashes)
    own: list[set[bytes]] = []
    held: set[bytes] = set()
    for round in range(30):
        prompts = [[(round * 7 + i) % 11] * (BLOCK * (1 + i % 5)) + [round] for i in range(4)]
        finish(
            engine, set(engine.add_requests([_core.EngineRequest(p, params(9)) for p in prompts]))
        )
        if round == 20:
            engine.reset_prefix_cache()
            for replica in range(2):  # each has come to it
                engine.block_snapshot(replica)
        batches = engine.block_events(number)
        assert batches is not None
        for number, events in batches:
            assert router.apply(0, number, events)
            for kind, told in events:
                assert kind in ("stored", "removed")
                assert not (held & split(told)) if kind == "stored" else split(told) <= held
                held = held | split(told) if kind == "stored" else held - split(told)
        own = [split(engine.block_snapshot(replica)[1]) for replica in range(2)]
        assert held == own[0] | own[1]
        assert split(engine.block_snapshot()[1]) == held
    assert own[0]
    assert own[1]
    assert own[0] != own[1]
    after, _ = engine.block_snapshot(0)
    assert engine.block_events(after, 0) == []
    with pytest.raises(InvalidArgument, match="there is no replica 2; they are 0 to 1"):
        engine.block_snapshot(2)


def test_the_queue_of_all_replicas_has_one_bound() -> None:
    gate = _core_testing.StepGate(1)
    engine = make_engine(gate=gate, max_num_seqs=1, max_num_queued_reqs=6)
    first = engine.add_requests([_core.EngineRequest([1], params()) for _ in range(2)])
    gate.wait_until_held()  # those of a first step wait until its end, in the engine's books
    more = engine.add_requests([_core.EngineRequest([2], params()) for _ in range(4)])
    with pytest.raises(QueueFull, match="6 requests wait, 1 more were to come and max_num_queued"):
        add_request(engine, [3], params())
    assert engine.wait_for_room(0.01) == 0
    gate.open()
    finish(engine, {*first, *more})
    assert engine.wait_for_room(1.0) == 6
    assert add_request(engine, [3], params()) == 6  # what was refused has no number


def test_aborts_reach_the_replica_that_runs_the_request() -> None:
    engine = make_engine(step_us=200)
    ids = engine.add_requests([_core.EngineRequest([i], params(200)) for i in range(4)])
    for request_id in ids[:3]:
        engine.abort(request_id)
    engine.abort(999)
    reasons = finish(engine, set(ids))
    assert [reasons[i] for i in ids] == ["abort", "abort", "abort", "length"]
    assert engine.metrics().num_requests_aborted == 3


def test_a_replica_that_stops_leaves_the_others_running() -> None:
    engine = make_engine(faults={"fail_at_step": 0, "num_failures": 1000, "fault": "device"})
    reasons: dict[int, str] = {}
    for _ in range(30):  # until the first replica has failed three steps
        ids = set(engine.add_requests([_core.EngineRequest([i], params()) for i in range(2)]))
        reasons |= finish(engine, ids)
        if engine.replica_failure(0):
            break
    assert set(reasons.values()) == {"length"}
    assert engine.replica_taken_over(1) == 3
    assert engine.replica_taken_over(0) == 0
    assert engine.replica_failure(0)
    assert not engine.replica_failure(1)
    assert engine.failure == ""
    notice = engine.take_notice()
    assert "replica 0 of 2 has stopped" in notice
    assert "the others go on with what it ran" in notice
    ids = set(engine.add_requests([_core.EngineRequest([i], params()) for i in range(6)]))
    assert set(finish(engine, ids).values()) == {"length"}
    assert {engine.request_record(i).replica for i in ids} == {1}  # type: ignore[union-attr]


def test_an_engine_whose_replicas_have_all_stopped_says_why() -> None:
    engine = make_engine(1, faults={"fail_at_step": 0, "num_failures": 1000, "fault": "device"})
    for _ in range(3):
        finish(engine, {add_request(engine, [1], params())})
    assert engine.failure
    with pytest.raises(DeviceError, match="the engine has stopped"):
        add_request(engine, [1], params())


def test_only_idle_replicas_sleep_and_none_sleeps_alone() -> None:
    engine = make_engine(step_us=1000)
    request_id = add_request(engine, [1], params(100))
    with pytest.raises(InvalidArgument, match="only an idle engine can sleep"):
        engine.sleep(1)
    assert not engine.is_sleeping
    finish(engine, {request_id})
    engine.sleep(1)
    assert engine.is_sleeping
    with pytest.raises(InvalidArgument, match="asleep"):
        add_request(engine, [1], params())
    engine.wake_up(["kv_cache"])
    finish(engine, {add_request(engine, [1], params())})


def test_many_threads_add_and_abort_while_replicas_run() -> None:
    engine = make_engine(3)
    added: list[int] = []

    def work(seed: int) -> None:
        for i in range(60):
            prompt = [(seed + i) % 5] * (BLOCK * (1 + i % 4)) + [i]
            request_id = add_request(engine, prompt, params(1 + (seed * i) % 12))
            added.append(request_id)
            if i % 7 == 0:
                engine.abort(request_id)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(added) == list(range(240))
    finish(engine, set(added))
    metrics = engine.metrics()
    assert metrics.num_requests_finished == 240
    assert metrics.num_requests_running == metrics.num_requests_waiting == 0
    assert [load.num_requests for load in engine.loads()] == [0, 0, 0]
    assert sum(engine.replica_metrics(i).num_requests_finished for i in range(3)) == 240
