"""Python logits processors: what they see and change, how they fail, and that nothing hangs."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import checkpoints
import numpy as np
import pytest
import torch
from llmserve import LLM, AsyncLLM, BeamSearchParams, RequestOutput, SamplingParams
from offline import DEADLINE_S, GREEDY, generate, tokens

V = checkpoints.VOCAB_SIZE
PROMPT = [5, 6, 7]
PROMPT_DEADLINE_S = 10.0  # an abort takes milliseconds; requests that never answer, 5 s
T = TypeVar("T")
THREAD_NAME = "llmserve-logits-processors"


def with_processors(*functions: object, **fields: object) -> SamplingParams:
    defaults = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    return SamplingParams(logits_processors=functions, **{**defaults, **fields})  # type: ignore[arg-type]


def only(token_id: int) -> Callable[[np.ndarray, np.ndarray], None]:
    def force(token_ids: np.ndarray, logits: np.ndarray) -> None:
        logits[np.arange(V) != token_id] = -np.inf

    return force


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, num_threads=1, kv_cache_memory_bytes=2**22) as llm:
        yield llm


def test_a_processor_sees_all_tokens_and_the_raw_logits(llm: LLM, checkpoint: Path) -> None:
    seen: list[tuple[list[int], np.ndarray]] = []

    def look(token_ids: np.ndarray, logits: np.ndarray) -> None:
        assert token_ids.dtype == np.int32
        assert logits.dtype == np.float32
        assert threading.current_thread().name == THREAD_NAME
        seen.append((token_ids.tolist(), logits.copy()))

    params = with_processors(look, logprobs=0, logit_bias={9: 50.0})
    (output,) = generate(llm, [PROMPT], params)
    ids = output.outputs[0].token_ids
    assert [tokens for tokens, _ in seen] == [PROMPT + ids[:i] for i in range(6)]
    assert set(ids) == {9}  # the bias comes after
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    expected = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].detach()
    np.testing.assert_allclose([row for _, row in seen], expected, atol=1e-3)
    rows = output.outputs[0].logprobs or []
    raw = torch.log_softmax(expected, -1)[:, 9]
    assert [row[9].logprob for row in rows] == pytest.approx(raw.tolist(), abs=1e-3)


def test_it_changes_the_draw_in_place_or_by_what_it_returns(llm: LLM) -> None:
    def returned(token_ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        result = np.full(V, -np.inf)
        result[31] = 0
        return result

    def by_torch(token_ids: np.ndarray, logits: np.ndarray) -> None:
        view = torch.from_dlpack(logits)
        assert view.data_ptr() == logits.ctypes.data
        assert torch.from_dlpack(token_ids).tolist() == token_ids.tolist()
        view[torch.arange(V) != 31] = -torch.inf

    def torch_returned(token_ids: np.ndarray, logits: np.ndarray) -> torch.Tensor:
        return torch.where(torch.arange(V) == 31, 0.0, -torch.inf)

    for function in (only(31), returned, by_torch, torch_returned):
        assert tokens(generate(llm, [PROMPT], with_processors(function))) == [[31] * 6]


def test_several_run_in_order_and_each_request_has_its_own(llm: LLM) -> None:
    calls = []
    both = with_processors(lambda t, x: calls.append("a"), lambda t, x: calls.append("b"))
    plain, forced, other, observed = generate(
        llm, [PROMPT] * 4, [GREEDY, with_processors(only(8)), with_processors(only(9)), both]
    )
    assert tokens([forced, other]) == [[8] * 6, [9] * 6]
    assert tokens([observed])[0] == tokens([plain])[0][:6]
    assert calls == ["a", "b"] * 6


def test_every_sample_of_a_request_is_processed(llm: LLM) -> None:
    params = with_processors(only(8), n=3, temperature=1.0, seed=1)
    (output,) = generate(llm, [PROMPT], params)
    assert [sample.token_ids for sample in output.outputs] == [[8] * 6] * 3


def raises(token_ids: np.ndarray, logits: np.ndarray) -> None:
    if len(token_ids) == 5:
        raise RuntimeError("no more")


def exits(token_ids: np.ndarray, logits: np.ndarray) -> None:
    sys.exit(3)


def wrong_shape(token_ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
    return logits[:5]


def not_a_number(token_ids: np.ndarray, logits: np.ndarray) -> None:
    logits[4] = np.nan


FAILING = [
    (raises, 2, r"logits_processors\[0\] \(raises\) raised RuntimeError: no more"),
    (exits, 0, r"logits_processors\[0\] \(exits\) raised SystemExit: 3"),
    (wrong_shape, 0, r"raised ValueError: it returned an array of shape \(5,\); expected \(320,\)"),
    (not_a_number, 0, "logits_processors left nan for token 4 at position 3; they may leave"),
]


@pytest.mark.parametrize(("function", "num_tokens", "message"), FAILING)
def test_what_it_raises_ends_its_request_alone(
    llm: LLM, function: object, num_tokens: int, message: str
) -> None:
    expected = tokens(generate(llm, [PROMPT]))
    failed, plain = generate(llm, [PROMPT, PROMPT], [with_processors(function), GREEDY])
    assert failed.outputs[0].finish_reason == "error"
    assert len(failed.outputs[0].token_ids) == num_tokens
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(failed.outputs[0].error)
    assert tokens([plain]) == expected
    assert tokens(generate(llm, [PROMPT])) == expected


WAITING: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: generate(llm, [PROMPT]),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "a"}], GREEDY, use_tqdm=False),
    "stream": lambda llm: list(llm.stream(PROMPT, GREEDY)),
    "embed": lambda llm: llm.embed([PROMPT], use_tqdm=False),
    "encode": lambda llm: llm.encode([PROMPT], use_tqdm=False),
    "beam_search": lambda llm: llm.beam_search([PROMPT], BeamSearchParams(2, 3)),
    "wait": lambda llm: (llm.enqueue([PROMPT], GREEDY), llm.wait_for_completion(use_tqdm=False)),
    "sleep": LLM.sleep,
    "wake_up": LLM.wake_up,
}


def in_time(call: Callable[[], T]) -> T:
    """What it returns, on a thread that may hang."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(PROMPT_DEADLINE_S)
    assert found, "it hangs"
    return found[0]


@pytest.mark.parametrize("name", WAITING)
def test_a_processor_that_waits_for_its_own_llm_is_refused(checkpoint: Path, name: str) -> None:
    with LLM(checkpoint, num_threads=1, kv_cache_memory_bytes=2**22) as llm:

        def waits(token_ids: np.ndarray, logits: np.ndarray) -> None:
            WAITING[name](llm)

        failed, plain = in_time(
            lambda: generate(llm, [PROMPT] * 2, [with_processors(waits), GREEDY])
        )
        assert failed.outputs[0].finish_reason == "error"
        error = failed.outputs[0].error or ""
        assert "(waits) raised InvalidArgument: a logits processor cannot wait for its own" in error
        assert tokens([plain]) == tokens(generate(llm, [PROMPT]))


def test_a_processor_that_waits_for_its_own_async_llm_is_refused(checkpoint: Path) -> None:
    async def last(llm: AsyncLLM, params: SamplingParams) -> RequestOutput:
        return [output async for output in llm.generate(PROMPT, params)][-1]

    llm = AsyncLLM(checkpoint, num_threads=1, kv_cache_memory_bytes=2**22)
    try:

        def waits(token_ids: np.ndarray, logits: np.ndarray) -> None:
            asyncio.run(last(llm, GREEDY))

        output = in_time(lambda: asyncio.run(last(llm, with_processors(waits))))
        assert "cannot wait for its own LLM" in (output.outputs[0].error or "")
    finally:
        llm.close()


def test_a_processor_may_ask_its_own_llm_and_wait_for_another(llm: LLM, checkpoint: Path) -> None:
    with LLM(checkpoint, num_threads=1, kv_cache_memory_bytes=2**22) as other:

        def asks(token_ids: np.ndarray, logits: np.ndarray) -> None:
            llm.get_metrics()
            llm.reset_prefix_cache()
            only(tokens(generate(other, [PROMPT]))[0][0])(token_ids, logits)

        (output,) = in_time(lambda: generate(llm, [PROMPT], with_processors(asks)))
        assert output.outputs[0].token_ids == tokens(generate(llm, [PROMPT]))[0][:1] * 6


class Stuck:
    """A processor that waits until it is let go."""

    def __init__(self) -> None:
        self.is_in = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, token_ids: np.ndarray, logits: np.ndarray) -> None:
        self.is_in.set()
        self.go_on.wait(DEADLINE_S)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_a_call_whose_processor_never_comes_back(llm: LLM) -> None:
    stuck = Stuck()

    def interrupt() -> None:
        stuck.is_in.wait(DEADLINE_S)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        generate(llm, [PROMPT], with_processors(stuck))
    assert time.monotonic() - start < PROMPT_DEADLINE_S
    thread.join()
    # Another thread works for those who come after.
    assert tokens(generate(llm, [PROMPT], with_processors(only(8)))) == [[8] * 6]
    stuck.go_on.set()


def test_an_abort_ends_a_request_whose_processor_never_comes_back(checkpoint: Path) -> None:
    stuck = Stuck()

    async def run() -> None:
        async with AsyncLLM(checkpoint, num_threads=1, kv_cache_memory_bytes=2**22) as llm:

            async def last(params: SamplingParams, name: str) -> object:
                async for output in llm.generate(PROMPT, params, request_id=name):
                    found = output
                return found.outputs[0]

            tasks = [
                asyncio.create_task(last(with_processors(stuck), "stuck")),
                asyncio.create_task(last(with_processors(only(8)), "other")),
            ]
            while not stuck.is_in.is_set():
                await asyncio.sleep(0.001)
            await llm.abort("stuck")
            aborted, other = await asyncio.wait_for(asyncio.gather(*tasks), PROMPT_DEADLINE_S)
            assert aborted.finish_reason == "abort"  # type: ignore[attr-defined]
            assert other.token_ids == [8] * 6  # type: ignore[attr-defined]

    asyncio.run(run())
    stuck.go_on.set()


def test_close_does_not_wait_for_a_processor(checkpoint: Path) -> None:
    stuck = Stuck()
    llm = LLM(checkpoint, num_threads=1, kv_cache_memory_bytes=2**22)
    thread = threading.Thread(target=_generate_until_closed, args=(llm, stuck))
    thread.start()
    stuck.is_in.wait(DEADLINE_S)
    start = time.monotonic()
    llm.close()
    assert time.monotonic() - start < PROMPT_DEADLINE_S
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    stuck.go_on.set()


def _generate_until_closed(llm: LLM, stuck: Stuck) -> None:
    with pytest.raises(ValueError, match="closed"):
        generate(llm, [PROMPT], with_processors(stuck))


def test_functions_and_threads_are_let_go_of(checkpoint: Path) -> None:
    def function(token_ids: np.ndarray, logits: np.ndarray) -> None:
        pass

    found = weakref.ref(function)
    before = set(threading.enumerate())  # those that other tests left in their functions end late
    with LLM(checkpoint, num_threads=1, kv_cache_memory_bytes=2**22) as llm:
        generate(llm, [PROMPT], with_processors(function))
        del function
        deadline = time.monotonic() + DEADLINE_S
        while found() is not None and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.001)
        assert found() is None
    assert set(threading.enumerate()) <= before


SCRIPT = """
import sys
from llmserve import LLM, SamplingParams
llm = LLM(sys.argv[1], num_threads=1, kv_cache_memory_bytes=2**22)
params = SamplingParams(max_tokens=3, logits_processors=[lambda token_ids, logits: None])
print(len(llm.generate([[5, 6]], params, use_tqdm=False)[0].outputs[0].token_ids))
"""


def test_a_process_ends_cleanly_with_its_llm_left_open(checkpoint: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(checkpoint)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")
