"""What Python does never holds the engine's thread up: the times of the steps show it."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from engine_requests import add_request
from llmserve import LLM, AsyncLLM, _core, _core_testing, demo_model_path
from offline import DEADLINE_S, LONG, generate, tokens

# A stall leaves one step or two, which had begun.
MIN_STEPS = 10


def slow_engine() -> _core.Engine:
    config = _core.EngineConfig(
        cache=_core.CacheConfig(num_blocks=512),
        scheduler=_core.SchedulerConfig(max_model_len=2048),
    )
    return _core_testing.oracle_engine(config, _core_testing.OracleOptions(step_us=1000))


def add_long_requests(engine: _core.Engine) -> list[int]:
    params = _core.SamplingParams(detokenize=False, max_tokens=2000)
    ids = [add_request(engine, [1, 2, 3 + i], params) for i in range(4)]
    while engine.metrics().num_generation_tokens == 0:
        time.sleep(0.001)
    return ids


def wait_for_decode_steps(trace: Callable[[], Iterable[_core.StepRecord]], count: int) -> None:
    """Until there have been so many. On a busy machine a step may take a hundred times as long."""
    end = time.monotonic() + DEADLINE_S
    while (num_steps := sum(step.phase == "decode" for step in trace())) < count:
        assert time.monotonic() < end, f"{num_steps} steps of {count}"
        time.sleep(0.01)


def test_steps_go_on_while_a_python_thread_holds_the_gil() -> None:
    engine = slow_engine()
    sleep_with_gil = ctypes.PyDLL(None).usleep  # PyDLL keeps the GIL
    num_steps, hold_us = 0, 100_000
    while num_steps < MIN_STEPS and hold_us < DEADLINE_S * 1e6 / 2:
        add_long_requests(engine)
        start_us = time.monotonic() * 1e6
        sleep_with_gil(hold_us)
        end_us = time.monotonic() * 1e6
        assert end_us - start_us >= hold_us
        num_steps = sum(start_us < step.start_us < end_us for step in engine.trace())
        hold_us *= 2
    assert num_steps >= MIN_STEPS
    engine.close()


def test_steps_go_on_while_nobody_takes_events() -> None:
    engine = slow_engine()
    ids = add_long_requests(engine)
    wait_for_decode_steps(engine.trace, MIN_STEPS)
    events = engine.wait_events(0.0)
    assert sorted(event.request_id for event in events) == ids
    assert all(len(event.token_ids) >= MIN_STEPS for event in events)
    engine.close()


@pytest.mark.usefixtures("slow_steps")
def test_steps_go_on_while_the_event_loop_stands_still() -> None:
    async def main() -> None:
        async with AsyncLLM(demo_model_path(), num_threads=1) as llm:
            stream = llm.generate("hello", LONG.clone(max_tokens=2000))
            num_tokens = len((await anext(stream)).outputs[0].token_ids)
            wait_for_decode_steps(llm.trace, num_tokens + MIN_STEPS)  # it awaits nothing
            await stream.aclose()

    asyncio.run(main())


def test_an_async_llm_and_an_llm_run_side_by_side(checkpoint: Path) -> None:
    prompts = [[5, 6 + i] for i in range(10)]

    async def last(llm: AsyncLLM, prompt: list[int]) -> list[int]:
        outputs = [output async for output in llm.generate(prompt, LONG)]
        return outputs[-1].outputs[0].token_ids

    async def main(llm: AsyncLLM) -> list[list[int]]:
        return list(await asyncio.gather(*(last(llm, prompt) for prompt in prompts)))

    with LLM(checkpoint, num_threads=1) as one:
        expected = tokens(generate(one, prompts, LONG))
        llms = [AsyncLLM(checkpoint, num_threads=1) for _ in range(2)]
        results: dict[int, list[list[int]]] = {}
        threads = [
            threading.Thread(target=lambda i=i: results.update({i: asyncio.run(main(llms[i]))}))
            for i in range(2)
        ]
        for thread in threads:
            thread.start()
        results[2] = tokens(generate(one, prompts, LONG))
        for thread in threads:
            thread.join(DEADLINE_S)
        for llm in llms:
            llm.close()
    assert results == {i: expected for i in range(3)}
