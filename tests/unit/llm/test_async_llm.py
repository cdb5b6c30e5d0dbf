"""`AsyncLLM`: many streams on one engine, and every way in which a reader leaves."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
from llmserve import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    InvalidArgument,
    NotSupported,
    QueueFull,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    _core,
    demo_model_path,
)
from llmserve.outputs import Logprob
from llmserve.requests.async_stream import AsyncStream
from llmserve.requests.state import RequestState
from llmserve.tokenization.tokenizer import Tokenizer
from offline import DEADLINE_S, GREEDY, LONG, generate, tokens

T = TypeVar("T")
DELTA = SamplingParams(
    max_tokens=200, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)
FINAL = SamplingParams(
    max_tokens=8, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
)


def run(main: Awaitable[T]) -> T:
    """`asyncio.run` that tells a hang from an answer."""

    async def bounded() -> T:
        return await asyncio.wait_for(main, DEADLINE_S)

    return asyncio.run(bounded())


async def last(llm: AsyncLLM, prompt: object, params: SamplingParams = GREEDY) -> RequestOutput:
    outputs = [output async for output in llm.generate(prompt, params)]  # type: ignore[arg-type]
    return outputs[-1]


async def idle(llm: AsyncLLM) -> None:
    """Until every block is free or cached."""
    while llm.get_metrics().num_blocks_used > 0:
        await asyncio.sleep(0.001)


@pytest.fixture(scope="module")
def async_llm(checkpoint: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(checkpoint, num_threads=1, kv_cache_memory_bytes=2**22)
    yield llm
    llm.close()


@pytest.fixture
def slow_llm(checkpoint: Path, slow_steps: None) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(checkpoint)
    yield llm
    llm.close()


def test_two_hundred_streams_give_what_the_batch_gives(async_llm: AsyncLLM, llm: LLM) -> None:
    prompts = [[5 + i % 90, 6 + i // 90, 7] for i in range(200)]

    params = SamplingParams(max_tokens=8, seed=5, ignore_eos=True, logprobs=2)

    async def main() -> list[RequestOutput]:
        return await asyncio.gather(*(last(async_llm, prompt, params) for prompt in prompts))

    def exact(outputs: list[RequestOutput]) -> list[object]:
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    assert exact(run(main())) == exact(generate(llm, prompts, params))


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_outputs_are_of_the_kind_that_was_asked_for(
    async_llm: AsyncLLM, llm: LLM, kind: RequestOutputKind
) -> None:
    params = SamplingParams(max_tokens=20, seed=3, n=2, output_kind=kind, ignore_eos=True)

    async def main() -> list[RequestOutput]:
        return [output async for output in async_llm.generate("hello", params)]

    outputs = run(main())
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    whole = generate(llm, "hello", SamplingParams(max_tokens=20, seed=3, n=2, ignore_eos=True))[0]
    for sample in whole.outputs:
        given = [c for output in outputs for c in output.outputs if c.index == sample.index]
        if kind is RequestOutputKind.DELTA:
            assert [i for c in given for i in c.token_ids] == sample.token_ids
            assert "".join(c.text for c in given) == sample.text
        else:
            assert (given[-1].token_ids, given[-1].text) == (sample.token_ids, sample.text)
    assert kind is not RequestOutputKind.FINAL_ONLY or len(outputs) == 1


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_rows_of_a_long_prompt_are_made_on_a_thread_while_tokens_come(
    slow_llm: AsyncLLM, kind: RequestOutputKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [5 + i % 90 for i in range(100)]
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True, prompt_logprobs=2)
    threads: set[int] = set()
    make_rows, to_logprob = RequestState.make_rows, RequestState.to_logprob

    def slow(self: RequestState) -> None:
        """More tokens come meanwhile."""
        until = time.monotonic() + DEADLINE_S
        while self.num_generation_tokens < 3 and time.monotonic() < until:
            time.sleep(0.001)
        make_rows(self)

    def watched(self: RequestState, token: _core.TokenLogprob) -> Logprob:
        threads.add(threading.get_ident())
        return to_logprob(self, token)

    async def main() -> list[RequestOutput]:
        stream = slow_llm.generate(prompt, params.clone(output_kind=kind))
        return [output async for output in stream]

    whole = run(last(slow_llm, prompt, params))
    monkeypatch.setattr(RequestState, "make_rows", slow)
    monkeypatch.setattr(RequestState, "to_logprob", watched)
    outputs = run(main())
    assert threads
    assert threading.get_ident() not in threads
    assert whole.prompt_logprobs is not None
    assert all(output.prompt_logprobs == whole.prompt_logprobs for output in outputs)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    given = [output.outputs[0].token_ids for output in outputs]
    if kind is RequestOutputKind.DELTA:
        assert all(given)
        given = [[token_id for ids in given for token_id in ids]]
    assert given[-1] == tokens([whole])[0]


async def leave_by_cancelling(llm: AsyncLLM) -> None:
    is_running = asyncio.Event()

    async def read() -> None:
        async for _ in llm.generate("hello", LONG, "left"):
            is_running.set()

    task = asyncio.create_task(read())
    await is_running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_closing(llm: AsyncLLM) -> None:
    stream = llm.generate("hello", LONG, "left")
    await anext(stream)
    await stream.aclose()


async def leave_by_forgetting(llm: AsyncLLM) -> None:
    async for _ in llm.generate("hello", LONG, "left"):
        break


@pytest.mark.parametrize("leave", [leave_by_cancelling, leave_by_closing, leave_by_forgetting])
def test_a_reader_who_leaves_frees_the_blocks_within_one_step(
    slow_llm: AsyncLLM,
    leave: Callable[[AsyncLLM], Awaitable[None]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="llmserve")
    before = slow_llm.get_metrics().num_requests_aborted

    async def main() -> None:
        await leave(slow_llm)
        while not caplog.records:  # what nobody holds is closed by the loop, later
            await asyncio.sleep(0)
        left_us = time.monotonic() * 1e6
        await idle(slow_llm)
        # One step may have been past its intake when the abort came.
        assert sum(step.start_us > left_us for step in slow_llm.trace()) <= 1
        (record,) = caplog.records
        assert "request left aborted after" in record.message

    run(main())
    assert slow_llm.get_metrics().num_requests_aborted == before + 1


def test_abort_ends_the_stream_with_what_it_had(slow_llm: AsyncLLM) -> None:
    async def main() -> list[RequestOutput]:
        outputs = []
        async for output in slow_llm.generate("hello", LONG, "mine"):
            outputs.append(output)
            await slow_llm.abort(["unknown", "mine"])
        return outputs

    outputs = run(main())
    assert {output.request_id for output in outputs} == {"mine"}
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert outputs[-1].outputs[0].token_ids[:1] == outputs[0].outputs[0].token_ids[:1]


def test_a_request_id_that_is_running_is_refused_and_may_come_again_later(
    slow_llm: AsyncLLM,
) -> None:
    async def main() -> None:
        stream = slow_llm.generate("hello", LONG, "mine")
        await anext(stream)
        with pytest.raises(InvalidArgument, match="request_id 'mine' is running"):
            await anext(slow_llm.generate("hello", GREEDY, "mine"))
        await stream.aclose()
        assert (await anext(slow_llm.generate("hello", FINAL, "mine"))).finished

    run(main())


def test_a_number_as_request_id_does_not_collide_with_the_engine_s(async_llm: AsyncLLM) -> None:
    async def main() -> None:
        first = await last(async_llm, "hello")
        next_id = str(int(first.request_id) + 2)
        mine = async_llm.generate("hello", LONG, next_id)
        assert (await anext(mine)).request_id == next_id
        assert (await last(async_llm, "hello")).request_id != next_id
        await mine.aclose()

    run(main())


def test_a_slow_reader_holds_nobody_up_and_finds_the_rest_in_one_output(
    async_llm: AsyncLLM, llm: LLM
) -> None:
    async def main() -> list[RequestOutput]:
        slow = async_llm.generate("hello", DELTA)
        finished = async_llm.get_metrics().num_requests_finished  # now: it may run to its end
        outputs = [await anext(slow)]
        await last(async_llm, "hello", LONG)
        while async_llm.get_metrics().num_requests_finished < finished + 2:
            await asyncio.sleep(0.001)
        outputs += [output async for output in slow]
        return outputs

    outputs = run(main())
    assert len(outputs) <= 3
    ids = [i for output in outputs for i in output.outputs[0].token_ids]
    assert ids == tokens(generate(llm, "hello", LONG))[0]


def test_several_event_loops_share_one_engine(async_llm: AsyncLLM, llm: LLM) -> None:
    prompts = [[[5 + worker, 6 + i] for i in range(20)] for worker in range(4)]
    results: list[list[list[int]] | None] = [None] * len(prompts)

    async def main(worker: int) -> list[RequestOutput]:
        return await asyncio.gather(*(last(async_llm, prompt) for prompt in prompts[worker]))

    def work(worker: int) -> None:
        results[worker] = tokens(run(main(worker)))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert results == [tokens(generate(llm, batch)) for batch in prompts]


def test_what_another_thread_took_first_is_applied_first() -> None:
    applied: list[object] = []
    state = SimpleNamespace(apply=applied.append)

    async def main() -> None:
        stream = AsyncStream(None, state)  # type: ignore[arg-type]
        other = threading.Thread(target=stream.put, args=("first",))
        other.start()
        other.join()
        stream.put("second")  # type: ignore[arg-type]
        await asyncio.sleep(0)

    run(main())
    assert applied == ["first", "second"]


class LoopWithoutReaders(asyncio.SelectorEventLoop):
    """As Windows' proactor."""

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:
        if isinstance(fd, int):  # not the loop's own socket
            raise NotImplementedError
        super().add_reader(fd, callback, *args)


def test_loops_that_cannot_watch_a_file_descriptor_work_too(async_llm: AsyncLLM, llm: LLM) -> None:
    loop = LoopWithoutReaders()
    try:
        for _ in range(2):
            output = loop.run_until_complete(asyncio.wait_for(last(async_llm, "hello"), DEADLINE_S))
            assert output.outputs[0].token_ids == tokens(generate(llm, "hello"))[0]
    finally:
        loop.close()


def test_a_loop_that_is_closed_under_a_request_ends_it(slow_llm: AsyncLLM) -> None:
    loop = asyncio.new_event_loop()
    stream = slow_llm.generate("hello", LONG)
    loop.run_until_complete(anext(stream))
    loop.close()

    async def main() -> None:
        await last(slow_llm, "hello")
        await idle(slow_llm)

    run(main())


def test_long_prompts_are_tokenized_beside_the_loop(
    async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_loop_alive = threading.Event()
    encode_batch = Tokenizer.encode_batch

    def slow(self: Tokenizer, *args: Any) -> list[list[int]]:
        assert is_loop_alive.wait(DEADLINE_S / 2), "the loop stands still"
        return encode_batch(self, *args)

    monkeypatch.setattr(Tokenizer, "encode_batch", slow)

    async def main() -> None:
        task = asyncio.create_task(last(async_llm, {"prompt": "hello " * 1000}))
        await asyncio.sleep(0.01)
        is_loop_alive.set()
        with pytest.raises(InvalidArgument, match="max_model_len=256 has to hold"):
            await task

    run(main())


def test_closing_ends_every_stream(checkpoint: Path, slow_steps: None) -> None:
    async def main() -> list[str]:
        async with AsyncLLM(checkpoint, num_threads=1, max_num_seqs=1) as llm:
            tasks = [asyncio.create_task(last(llm, [5, 6 + i], LONG)) for i in range(100)]
            while llm.get_metrics().num_generation_tokens == 0:
                await asyncio.sleep(0)
        with pytest.raises(InvalidArgument, match="this LLM is closed"):
            await last(llm, "hello")
        results = await asyncio.gather(*tasks, return_exceptions=True)
        return [str(result) for result in results if isinstance(result, InvalidArgument)]

    messages = run(main())
    assert len(messages) > 50
    assert set(messages) == {"this LLM is closed; make a new one"}


def test_a_full_queue_refuses_with_its_numbers(checkpoint: Path, slow_steps: None) -> None:
    async def main() -> None:
        async with AsyncLLM(
            checkpoint, num_threads=1, max_num_seqs=1, max_num_queued_reqs=2
        ) as llm:
            results = await asyncio.gather(
                *(last(llm, [5, 6 + i], LONG) for i in range(20)), return_exceptions=True
            )
        refused = [r for r in results if isinstance(r, QueueFull)]
        answered = [r for r in results if isinstance(r, RequestOutput)]
        assert len(refused) + len(answered) == 20
        assert len(answered) >= 2
        assert "max_num_queued_reqs is 2" in str(refused[0])

    run(main())


def test_bad_arguments_are_refused_by_name(async_llm: AsyncLLM) -> None:
    async def first(*args: object, **kwargs: object) -> None:
        await anext(async_llm.generate(*args, **kwargs))  # type: ignore[arg-type]

    with pytest.raises(InvalidArgument, match="generate takes one prompt, got 2"):
        run(first(["a", "b"], GREEDY))
    with pytest.raises(InvalidArgument, match="request_id must be a string, got 5"):
        run(first("a", GREEDY, 5))
    with pytest.raises(InvalidArgument, match="request_id is empty"):
        run(first("a", GREEDY, ""))
    with pytest.raises(NotSupported, match="lora_request"):
        run(first("a", GREEDY, lora_request="x"))
    with pytest.raises(InvalidArgument, match="AsyncLLM has no argument 'max_model_length'"):
        AsyncLLM("x", max_model_length=5)


def test_a_conversation_is_answered_as_in_the_batch() -> None:
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    model = demo_model_path()

    async def main() -> RequestOutput:
        async with AsyncLLM(model, num_threads=1) as llm:
            outputs = [output async for output in llm.chat(messages, GREEDY)]
            with pytest.raises(InvalidArgument, match="chat takes one conversation, got 2"):
                await anext(llm.chat([messages, messages]))  # type: ignore[list-item]
        return outputs[-1]

    output = run(main())
    with LLM(model, num_threads=1) as llm:
        (expected,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert output.prompt == expected.prompt
    assert tokens([output]) == tokens([expected])


def test_embeddings_states_and_beams_are_those_of_the_batch(async_llm: AsyncLLM, llm: LLM) -> None:
    prompt, params = [5, 6, 7], BeamSearchParams(3, max_tokens=4)

    async def main() -> tuple[object, object, object]:
        embedding, states, beams = await asyncio.gather(
            async_llm.embed(prompt),
            async_llm.encode(prompt),
            async_llm.beam_search(prompt, params),
        )
        return (
            embedding.outputs.embedding,
            np.asarray(states.outputs.data).tolist(),
            [sequence.tokens for sequence in beams.sequences],
        )

    assert run(main()) == (
        llm.embed(prompt, use_tqdm=False)[0].outputs.embedding,
        np.asarray(llm.encode(prompt, use_tqdm=False)[0].outputs.data).tolist(),
        [sequence.tokens for sequence in llm.beam_search(prompt, params)[0].sequences],
    )
    with pytest.raises(InvalidArgument, match="embed takes one prompt, got 2"):
        run(async_llm.embed([prompt, prompt]))  # type: ignore[arg-type]
