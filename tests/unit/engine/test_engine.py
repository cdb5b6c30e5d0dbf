"""The engine's thread, intake and failure modes, on a token oracle instead of a model."""

from __future__ import annotations

import json
import select
import sys
import threading
import time

import msgspec
import pytest
from engine_requests import add_request
from llmserve import _core, _core_testing
from llmserve.errors import (
    DeviceError,
    InvalidArgument,
    NotSupported,
    PromptTooLong,
    ResourceExhausted,
)

DEADLINE_S = 30.0  # tells a hang from an answer; steps take microseconds
VOCAB = 256


def make_config(**scheduler: object) -> _core.EngineConfig:
    defaults = {"max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 16}
    return _core.EngineConfig(
        cache=_core.CacheConfig(num_blocks=64, block_size=8),
        scheduler=_core.SchedulerConfig(**{**defaults, **scheduler}),
    )


in_flight = 1  # of the engines that make_engine() makes


@pytest.fixture(autouse=True, params=[1, 2], ids=["in turn", "a step ahead"])
def max_in_flight(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """What holds of an engine holds whether or not it schedules a step ahead."""
    monkeypatch.setattr(sys.modules[__name__], "in_flight", request.param)
    count: int = request.param
    return count


def make_engine(
    options: dict[str, int] | None = None,
    faults: dict[str, object] | None = None,
    gate: _core_testing.StepGate | None = None,
    **scheduler: object,
) -> _core.Engine:
    return _core_testing.oracle_engine(
        make_config(**scheduler),
        _core_testing.OracleOptions(vocab_size=VOCAB, max_in_flight=in_flight, **(options or {})),
        faults=_core_testing.FaultOptions(**(faults or {})),
        gate=gate,
    )


def params(**fields: object) -> _core.SamplingParams:
    return _core.SamplingParams(**{"detokenize": False, "max_tokens": 8, **fields})


def collect(engine: _core.Engine, ids: list[int]) -> dict[int, list[_core.TokenEvent]]:
    """All events until each request has had its last."""
    events: dict[int, list[_core.TokenEvent]] = {i: [] for i in ids}
    open_ids = set(ids)
    deadline = time.monotonic() + DEADLINE_S
    while open_ids:
        assert time.monotonic() < deadline, f"requests {open_ids} never ended"
        for event in engine.wait_events(0.1):
            events[event.request_id].append(event)
            if event.is_request_finished:
                open_ids.discard(event.request_id)
    return events


def tokens(events: list[_core.TokenEvent], sample_index: int = 0) -> list[int]:
    return [t for e in events if e.sample_index == sample_index for t in e.token_ids]


def oracle(seed: int, num_prompt: int, count: int) -> list[int]:
    return [_core_testing.oracle_token(seed, num_prompt + i, VOCAB) for i in range(count)]


def wait_idle(engine: _core.Engine) -> _core.EngineMetrics:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        metrics = engine.metrics()
        if metrics.num_requests_running == 0 and metrics.num_requests_waiting == 0:
            return metrics
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_line_of_a_token_is_json_whatever_its_text() -> None:
    texts = [chr(i) for i in range(128)] + ["é", "\u2028", "\U0001f600", 'a"b\\c\n']
    vocabulary = _core.Vocabulary([text.encode() for text in texts], [])
    oracle = _core_testing.OracleOptions(vocab_size=len(texts), step_us=500)
    engine = _core_testing.oracle_engine(make_config(), oracle, vocabulary)
    line = _core.LineTemplate(b'data: {"text":"', b'"}', skips_empty=True)
    request = add_request(engine, [1], _core.SamplingParams(max_tokens=250, seed=1))
    seen = ""  # but for the last event's
    for event in collect(engine, [request])[request]:
        rendered = line.render(event)
        assert (rendered is None) == (event.finish_reason is not None)
        if rendered:
            assert json.loads(rendered[6:]) == {"text": event.text}
            assert rendered == b"data: " + msgspec.json.encode({"text": event.text})
            seen += event.text
    assert len(set(seen)) > 80
    engine.close()


def test_a_line_says_no_more_than_a_text() -> None:
    engine = make_engine({"step_us": 2000})
    line = _core.LineTemplate(b"<", b">", skips_empty=False)
    request = add_request(engine, [1], params(logprobs=0, max_tokens=3))
    assert {line.render(event) for event in collect(engine, [request])[request]} == {None}
    request = add_request(engine, [1], params(max_tokens=200))
    (first, *_) = collect(engine, [request])[request]
    assert line.render(first) == b"<>"  # without text, as it asked for none
    assert _core.LineTemplate(b"<", b">", skips_empty=True).render(first) == b""
    engine.close()


def test_every_token_is_the_oracle_s() -> None:
    engine = make_engine()
    prompts = [list(range(1, 2 + 7 * i)) for i in range(12)]
    ids = [add_request(engine, p, params(seed=100 + i)) for i, p in enumerate(prompts)]
    events = collect(engine, ids)
    for i, prompt in enumerate(prompts):
        assert tokens(events[ids[i]]) == oracle(100 + i, len(prompt), 8)
        assert events[ids[i]][-1].finish_reason == "length"
    engine.close()


def test_samples_of_one_request_have_seeds_of_their_own() -> None:
    engine = make_engine()
    request = add_request(engine, [1, 2, 3], params(seed=5, n=4))
    events = collect(engine, [request])[request]
    for i in range(4):
        assert tokens(events, i) == oracle(_core_testing.sample_seed(5, i), 3, 8)
    engine.close()


def test_a_request_that_is_not_streamed_has_one_event_a_sample() -> None:
    engine = make_engine()
    request = add_request(engine, [1, 2, 3], params(seed=5, n=3), is_streamed=False)
    streamed = add_request(engine, [1, 2, 3], params(seed=5, n=3))
    events = collect(engine, [request, streamed])
    assert len(events[request]) == 3
    for i in range(3):
        assert tokens(events[request], i) == tokens(events[streamed], i)
    assert [e.is_request_finished for e in events[request]] == [False, False, True]
    assert {e.finish_reason for e in events[request]} == {"length"}
    engine.close()


def test_events_that_nobody_takes_become_one_a_sample() -> None:
    engine = make_engine()
    ids = [add_request(engine, [1, 2, 3 + i], params(seed=i, n=2)) for i in range(10)]
    # A step's events come after its figures, and before those of the next step.
    for num_finished in (len(ids), len(ids) + 1):
        while engine.metrics().num_requests_finished < num_finished:
            time.sleep(0.001)
        if num_finished == len(ids):
            add_request(engine, [1], params(seed=1))
    events = [event for event in engine.wait_events(0.0) if event.request_id in ids]
    assert sorted((e.request_id, e.sample_index) for e in events) == [
        (request_id, sample) for request_id in ids for sample in range(2)
    ]
    last = {e.request_id: e for e in events}
    assert all(e.is_request_finished == (e is last[e.request_id]) for e in events)
    for event in events:
        seed = _core_testing.sample_seed(event.request_id, event.sample_index)
        assert event.token_ids == oracle(seed, 3, 8)
    engine.close()


def test_waiting_for_room_ends_when_a_request_is_admitted() -> None:
    gate = _core_testing.StepGate(2)
    engine = make_engine(gate=gate, max_num_queued_reqs=1, max_num_seqs=1)
    assert engine.wait_for_room(0.0)
    add_request(engine, [1, 2], params(max_tokens=4))
    gate.wait_until_held()  # the first has its seat
    add_request(engine, [1, 2], params(max_tokens=4))
    assert not engine.wait_for_room(0.0)
    gate.open()
    assert engine.wait_for_room(DEADLINE_S)
    engine.close()


def test_waiting_for_a_device_is_told_from_the_hosts_own_time() -> None:
    gate = _core_testing.StepGate(2)
    engine = make_engine(gate=gate)
    request = add_request(engine, [1, 2, 3], params(max_tokens=4))
    gate.wait_until_held()  # in the second step's wait
    held_since = time.monotonic()
    while time.monotonic() < held_since + 0.005:
        pass
    gate.open()
    collect(engine, [request])
    steps = engine.trace()
    assert all(0 <= step.wait_us <= step.execute_us for step in steps)
    assert max(step.wait_us for step in steps) >= 5_000
    engine.close()


def test_an_aborted_request_that_is_not_streamed_gives_what_it_has() -> None:
    gate = _core_testing.StepGate(6)
    engine = make_engine(gate=gate)
    request = add_request(engine, [1, 2, 3], params(seed=5, max_tokens=200), is_streamed=False)
    gate.wait_until_held()
    engine.abort(request)
    gate.open()
    (event,) = collect(engine, [request])[request]
    assert event.finish_reason == "abort"
    assert event.token_ids == oracle(5, 3, len(event.token_ids))
    assert len(event.token_ids) >= 3
    engine.close()


def test_a_request_without_a_seed_reports_the_one_it_got() -> None:
    engine = make_engine()
    request = add_request(engine, [1, 2, 3], params())
    events = collect(engine, [request])[request]
    assert tokens(events) == oracle(events[0].seed, 3, 8)
    engine.close()


def test_a_row_that_is_not_finite_fails_its_request_alone() -> None:
    engine = make_engine({"invalid_request_id": 1})
    ids = [add_request(engine, [1, 2, 3], params(seed=i)) for i in range(3)]
    events = collect(engine, ids)
    assert events[1][-1].finish_reason == "error"
    assert "not finite" in events[1][-1].error
    for i in (0, 2):
        assert tokens(events[i]) == oracle(i, 3, 8)
    engine.close()


def test_a_failed_step_ends_its_requests_and_the_engine_lives_on() -> None:
    gate = _core_testing.StepGate(1)
    engine = make_engine(faults={"fail_at_step": 3}, gate=gate)
    ids = [add_request(engine, [1, 2, 3], params(max_tokens=100)) for _ in range(3)]
    gate.open()
    for events in collect(engine, ids).values():
        assert events[-1].finish_reason == "error"
        assert "told to fail" in events[-1].error
    assert engine.failure == ""
    later = [add_request(engine, [i, 2, 3], params(max_tokens=8, seed=i)) for i in range(3)]
    for i, events in enumerate(collect(engine, later).values()):
        assert tokens(events) == oracle(i, 3, 8)
    metrics = engine.metrics()
    assert (metrics.num_blocks_used, metrics.num_requests_running) == (0, 0)
    engine.close()


def test_a_failed_step_ends_its_own_requests_and_no_others() -> None:
    gate = _core_testing.StepGate(1)
    engine = make_engine(faults={"fail_at_step": 4}, gate=gate, max_num_seqs=3)
    ids = [add_request(engine, [i, 2, 3], params(max_tokens=20, seed=i)) for i in range(9)]
    gate.open()
    events = collect(engine, ids)
    failed = [i for i in ids if events[i][-1].finish_reason == "error"]
    assert len(failed) == 3  # who had a seat
    for i in set(ids) - set(failed):
        assert tokens(events[i]) == oracle(i, 3, 20)
    for i in failed:
        assert "told to fail" in events[i][-1].error
        assert tokens(events[i]) == oracle(i, 3, 20)[: len(tokens(events[i]))]
    assert wait_idle(engine).num_blocks_used == 0
    engine.close()


def test_a_request_that_was_aborted_in_a_step_that_fails_ends_as_aborted() -> None:
    gate = _core_testing.StepGate(1)
    engine = make_engine(faults={"fail_at_step": 1, "num_failures": 2}, gate=gate)
    ids = [add_request(engine, [1, 2, 3], params(n=2)) for _ in range(2)]
    gate.wait_until_held()
    engine.abort(ids[0])
    gate.open()
    events = collect(engine, ids)
    assert {event.finish_reason for event in events[ids[0]]} == {"abort"}
    assert {event.finish_reason for event in events[ids[1]]} == {"error"}
    engine.close()


@pytest.mark.parametrize("fault", ["memory", "allocation", "internal"])
def test_batches_that_fail_of_themselves_never_stop_the_engine(fault: str) -> None:
    engine = make_engine(faults={"fail_at_step": 0, "num_failures": 8, "fault": fault})
    for _ in range(7):
        request = add_request(engine, [1, 2, 3], params())
        assert collect(engine, [request])[request][-1].finish_reason == "error"
    assert engine.failure == ""
    request = add_request(engine, [1, 2, 3], params(seed=5))
    assert tokens(collect(engine, [request])[request]) == oracle(5, 3, 8)
    engine.close()


def test_an_engine_whose_device_fails_again_and_again_stops() -> None:
    engine = make_engine(faults={"fail_at_step": 0, "num_failures": 1000})
    for _ in range(3):
        request = add_request(engine, [1, 2, 3], params())
        assert collect(engine, [request])[request][-1].finish_reason == "error"
    while not engine.failure:
        time.sleep(0.001)
    with pytest.raises(DeviceError, match="told to fail"):
        add_request(engine, [1], params())
    engine.close()


def test_a_request_that_no_step_has_seen_ends_with_the_failure_too() -> None:
    gate = _core_testing.StepGate(3)
    engine = make_engine(faults={"fail_at_step": 0, "num_failures": 1000}, gate=gate)
    for _ in range(2):
        request = add_request(engine, [1, 2, 3], params())
        collect(engine, [request])
    first = add_request(engine, [1, 2, 3], params())
    gate.wait_until_held()
    unseen = [add_request(engine, [4, 5], params(n=n, seed=n)) for n in (1, 3)]
    gate.open()
    for request, events in collect(engine, [first, *unseen]).items():
        assert len(events) == (3 if request == unseen[1] else 1)
        assert all(event.finish_reason == "error" for event in events)
        assert all("told to fail" in event.error for event in events)
    engine.close()


def test_abort_frees_all_blocks_and_gives_one_last_event() -> None:
    gate = _core_testing.StepGate(3)
    engine = make_engine(gate=gate)
    request = add_request(engine, [1, 2, 3], params(max_tokens=200, n=3))
    gate.wait_until_held()
    while not engine.wait_events(0.1):
        pass
    engine.abort(request)
    gate.open()
    events = collect(engine, [request])[request]
    assert [e.finish_reason for e in events if e.finish_reason] == ["abort"] * 3
    metrics = wait_idle(engine)
    assert metrics.num_blocks_used == 0
    engine.close()


def test_abort_of_an_unknown_request_is_ignored() -> None:
    engine = make_engine()
    engine.abort(999)
    request = add_request(engine, [1], params(seed=1))
    assert tokens(collect(engine, [request])[request]) == oracle(1, 1, 8)
    engine.close()


def test_a_full_queue_is_refused_at_admission_with_its_numbers() -> None:
    gate = _core_testing.StepGate(2)
    engine = make_engine(gate=gate, max_num_queued_reqs=4, max_num_seqs=1)
    accepted = [add_request(engine, [1, 2], params(max_tokens=4))]
    gate.wait_until_held()  # the first has its seat
    accepted += [add_request(engine, [1, 2], params(max_tokens=2)) for _ in range(4)]
    with pytest.raises(ResourceExhausted, match="max_num_queued_reqs is 4; retry later"):
        add_request(engine, [1, 2], params(max_tokens=2))
    gate.open()
    collect(engine, accepted)
    engine.close()


def test_requests_of_one_call_are_in_one_step() -> None:
    for _ in range(20):
        engine = make_engine()
        requests = [_core.EngineRequest([1, 2, 3 + i], params(seed=i)) for i in range(10)]
        ids = engine.add_requests(requests)
        assert ids == list(range(ids[0], ids[0] + 10))
        assert collect(engine, ids)[ids[3]][0].token_ids[:1] == oracle(3, 3, 1)
        assert engine.trace()[0].num_sequences == 10
        engine.close()


def test_a_call_with_more_requests_than_there_is_room_for_queues_none() -> None:
    engine = make_engine(max_num_queued_reqs=4)
    requests = [_core.EngineRequest([1, 2, 3], params(seed=i)) for i in range(5)]
    with pytest.raises(ResourceExhausted, match=r"5 more were to come .* never have room"):
        engine.add_requests(requests)
    with pytest.raises(InvalidArgument, match="prompt"):
        engine.add_requests([*requests[:2], _core.EngineRequest([], params())])
    assert engine.wait_for_room(0.0) == 4
    ids = engine.add_requests(requests[:4])
    assert tokens(collect(engine, ids)[ids[1]]) == oracle(1, 3, 8)
    engine.close()


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([], {}, "prompt"),
        ([VOCAB], {}, r"prompt\[0\] is token id 256, outside the model's vocabulary \(0 to 255\)"),
        ([-1], {}, "token id -1, outside the model's vocabulary"),
        ([1] * 256, {}, "max_model_len"),
        ([1], {"n": 129}, "n must be between 1 and 128"),
        ([1], {"n": 0}, "n must be between 1 and 128"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_p": float("nan")}, "top_p"),
        ([1], {"min_p": 1.5}, "min_p"),
        ([1], {"top_k": -2}, "top_k"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"min_tokens": 9}, "min_tokens"),
        ([1], {"logprobs": 21}, "max_logprobs=20"),
        ([1], {"detokenize": True}, "no tokenizer"),
        ([1], {"stop": ["x"]}, "stop strings need a tokenizer"),
    ],
)
def test_a_bad_request_is_refused_at_admission(
    prompt: list[int], fields: dict[str, object], message: str
) -> None:
    engine = make_engine()
    with pytest.raises(InvalidArgument, match=message):
        add_request(engine, prompt, params(**fields))
    request = add_request(engine, [1], params(seed=1))
    assert tokens(collect(engine, [request])[request]) == oracle(1, 1, 8)
    engine.close()


def test_a_check_says_what_adding_would_and_leaves_engine_and_requests_as_they_are() -> None:
    config = _core.EngineConfig(
        cache=_core.CacheConfig(num_blocks=64), scheduler=make_config().scheduler, max_logprobs=-1
    )
    engine = _core_testing.oracle_engine(config, _core_testing.OracleOptions(vocab_size=VOCAB))
    good = _core.EngineRequest([1], params(prompt_logprobs=-1, max_tokens=4))
    bad = {
        "long": _core.EngineRequest([1] * 256, params()),
        "sampling": _core.EngineRequest([1], params(stop_token_ids=[VOCAB])),
        "pooling": _core.EngineRequest([1], params(), pooling=_core.PoolingParams(dimensions=9)),
    }
    messages = {
        "long": r"^prompts\[1\] has 256 tokens, but max_model_len=256 has to hold the prompt",
        "sampling": r"^sampling_params\[1\]: stop_token_ids: token id 256 is outside",
        "pooling": r"^pooling_params\[1\]: dimensions must be at most the model's hidden size 1",
    }
    for name, request in bad.items():
        kind = PromptTooLong if name == "long" else InvalidArgument
        for call in (engine.check, engine.add_requests):
            with pytest.raises(kind, match=messages[name]):
                call([good, request])
    engine.check([good, good])
    assert good.params.prompt_logprobs == -1
    assert engine.metrics().num_requests_waiting == engine.metrics().num_requests_running == 0
    engine.close()
    engine.check([good])


def test_close_in_mid_flight_returns_soon_and_may_be_repeated() -> None:
    engine = make_engine({"step_us": 1000})
    add_request(engine, [1], params(max_tokens=200))
    engine.close()
    engine.close()
    assert engine.wait_events(0.0) == []
    with pytest.raises(InvalidArgument, match="closed"):
        add_request(engine, [1], params())


def test_close_wakes_a_waiting_thread() -> None:
    engine = make_engine()
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.append(engine.wait_events(DEADLINE_S)))
    waiter.start()
    time.sleep(0.05)
    engine.close()
    waiter.join(DEADLINE_S / 2)
    assert got == [[]]


def test_the_file_descriptor_is_readable_while_events_wait() -> None:
    engine = make_engine()
    assert select.select([engine.event_fd], [], [], 0)[0] == []
    request = add_request(engine, [1], params(max_tokens=1))
    assert select.select([engine.event_fd], [], [], DEADLINE_S)[0] == [engine.event_fd]
    collect(engine, [request])
    assert select.select([engine.event_fd], [], [], 0)[0] == []
    engine.close()


def test_requests_from_many_threads_all_end() -> None:
    engine = make_engine()
    ids: list[int] = []
    lock = threading.Lock()

    def submit(start: int) -> None:
        for i in range(50):
            request = add_request(engine, [1 + i % 7] * (1 + i % 20), params(seed=start + i))
            with lock:
                ids.append(request)

    threads = [threading.Thread(target=submit, args=(1000 * t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 200
    assert all(len(tokens(e)) == 8 for e in collect(engine, ids).values())
    assert wait_idle(engine).num_blocks_used == 0
    engine.close()


def test_the_trace_names_the_phases_and_counts_their_tokens() -> None:
    engine = make_engine()
    request = add_request(engine, list(range(1, 101)), params(seed=1))  # two chunks: 64 and 36
    collect(engine, [request])
    steps = engine.trace()
    assert [s.phase for s in steps] == ["prefill"] * 2 + ["decode"] * 7
    assert [s.num_prefill_tokens for s in steps][:2] == [64, 36]
    assert {d.kind for s in steps[:1] for d in s.decisions} >= {"admitted", "chunked"}
    metrics = wait_idle(engine)
    assert (metrics.num_prefill_steps, metrics.num_decode_steps) == (2, 7)
    assert metrics.num_generation_tokens == 8
    engine.close()


def test_requests_do_not_wait_for_the_end_of_background_work() -> None:
    engine = make_engine({"num_background_tasks": 10**12})  # days of them
    for _ in range(3):
        request = add_request(engine, [1, 2, 3], params())
        events = collect(engine, [request])[request]
        assert sum(len(event.token_ids) for event in events) == 8
    left = engine.memory_use.mapped_bytes
    assert 0 < left < 10**12
    engine.close()


def test_an_idle_engine_does_its_background_work() -> None:
    engine = make_engine({"num_background_tasks": 50})
    deadline = time.monotonic() + DEADLINE_S
    while engine.memory_use.mapped_bytes > 0:
        assert time.monotonic() < deadline, "an idle engine does its background work"
        time.sleep(0.001)
    engine.close()


def test_counters_of_the_prefix_cache_add_up() -> None:
    engine = make_engine()
    prompt = list(range(1, 42))
    for _ in range(3):
        collect(engine, [add_request(engine, prompt, params(seed=1))])
    metrics = wait_idle(engine)
    assert metrics.prefix_cache_queries == 3 * 41
    assert metrics.prefix_cache_hits == 2 * 40
    assert metrics.num_prefill_tokens == 41 + 2 * 1
    assert (
        metrics.num_blocks_free + metrics.num_blocks_cached + metrics.num_blocks_used
        == metrics.num_blocks_total
    )
    engine.reset_prefix_cache()
    collect(engine, [add_request(engine, prompt, params(seed=1))])
    assert wait_idle(engine).prefix_cache_hits == 2 * 40
    engine.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adapter": ("a", 0, "weights")}, "adapter 'a': this engine runs a model's own weights"),
        ({"receive_from": (1, 7)}, "receive_from: this engine has no peers"),
        ({"send_to": (1, 7)}, "send_to: this engine has no peers"),
    ],
)
def test_what_no_executor_does_yet_is_refused_by_name(
    fields: dict[str, object], message: str
) -> None:
    request = _core_testing.with_peers(_core.EngineRequest([1, 2, 3], params()), **fields)
    engine = make_engine()
    with pytest.raises(NotSupported, match=message):
        engine.add_requests([request])
    engine.close()
