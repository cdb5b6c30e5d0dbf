"""`sleep` and `wake_up`: memory goes and comes back, tokens are the same, nothing is stale."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import re
import shutil
import threading
import time
from pathlib import Path

import checkpoints
import pytest
from llmserve import (
    LLM,
    AsyncLLM,
    CorruptFile,
    InvalidArgument,
    RequestOutput,
    SamplingParams,
    _core,
)
from offline import DEADLINE_S, GREEDY, LONG, generate, memory_bytes, tokens

KV_BYTES = 2**25
# What a measurement of resident pages may be off by: allocators keep some.
SLACK_BYTES = KV_BYTES // 8
LOGPROBS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)
# 4,000 of the pool's 4,096 tokens, so that its pages are resident.
PROMPTS = [[5 + i, *range(6, 255 - 6)] for i in range(16)]


@pytest.fixture(scope="module")
def wide_checkpoint() -> Path:
    """20 MiB of weights, 8 KiB of KV cache a token."""
    return checkpoints.checkpoint(
        "llama",
        hidden_size=512,
        intermediate_size=1024,
        num_attention_heads=8,
        num_key_value_heads=8,
    )


def memory_use(llm: LLM) -> _core.MemoryUse:
    """What the engine says that it holds."""
    return llm._open_engine().memory_use


def exact(outputs: list[RequestOutput]) -> list[object]:
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("level", [1, 2])
def test_memory_goes_and_comes_back_and_the_tokens_are_the_same(
    wide_checkpoint: Path, level: int
) -> None:
    with LLM(wide_checkpoint, num_threads=1, kv_cache_memory_bytes=KV_BYTES) as llm:
        expected = exact(generate(llm, PROMPTS, LOGPROBS))
        use = memory_use(llm)
        _, awake_bytes = memory_bytes()
        llm.sleep(level)
        asleep = memory_use(llm)
        _, asleep_bytes = memory_bytes()
        given_back = use.kv_cache_bytes + (use.weight_bytes if level == 2 else 0)
        assert awake_bytes - asleep_bytes > given_back - SLACK_BYTES
        assert asleep.kv_cache_bytes == 0
        assert asleep.weight_bytes == (0 if level == 2 else use.weight_bytes)
        llm.wake_up()
        assert exact(generate(llm, PROMPTS, LOGPROBS)) == expected
        # No more than before; less where the system has taken other pages back.
        assert memory_bytes()[1] - awake_bytes < SLACK_BYTES
        assert memory_use(llm).kv_cache_bytes == use.kv_cache_bytes


def test_a_first_prompt_touches_little_of_a_large_pool(wide_checkpoint: Path) -> None:
    with LLM(wide_checkpoint, num_threads=1, kv_cache_memory_bytes=4 * KV_BYTES) as llm:
        generate(llm, [[5] * 16])  # touches the workspace
        llm.sleep()
        llm.wake_up()
        untouched_bytes = _core.host_allocations().untouched_bytes
        generate(llm, [[5] * 16])
        touched_bytes = untouched_bytes - _core.host_allocations().untouched_bytes
    # Two blocks of 128 KiB, all layers together, and not a large page of 2 MiB in each pool.
    assert 2**17 <= touched_bytes < 2**20


@pytest.mark.skipif(
    tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (5, 14),
    reason="needs MADV_POPULATE_WRITE of Linux 5.14",
)
def test_an_idle_engine_has_as_much_of_the_pool_at_hand_as_was_used(wide_checkpoint: Path) -> None:
    # 16 blocks of 128 KiB each: of 4 pools, which end in large pages of 2 MiB.
    prompts = [[5 + i] * 240 for i in range(4)]
    used_bytes = len(prompts) * 16 * 2**17
    with LLM(wide_checkpoint, num_threads=1, kv_cache_memory_bytes=4 * KV_BYTES) as llm:
        generate(llm, prompts)  # touches the workspace
        llm.sleep()
        llm.wake_up()
        untouched_bytes = _core.host_allocations().untouched_bytes
        generate(llm, prompts)
        deadline = time.monotonic() + DEADLINE_S
        touched_bytes, before = 0, -1
        while (touched_bytes < 2 * used_bytes or touched_bytes != before) and (
            time.monotonic() < deadline
        ):
            before = touched_bytes
            time.sleep(0.3)
            touched_bytes = untouched_bytes - _core.host_allocations().untouched_bytes
    assert 2 * used_bytes <= touched_bytes < 2 * used_bytes + 4 * 2**21 + SLACK_BYTES


def test_nothing_of_before_is_found_in_the_prefix_cache(checkpoint: Path) -> None:
    prompt = list(range(5, 100))
    with LLM(checkpoint, num_threads=1) as llm:
        generate(llm, prompt)
        assert generate(llm, prompt)[0].num_cached_tokens == 80
        llm.sleep()
        metrics = llm.get_metrics()
        assert metrics.num_blocks_cached == 0
        assert metrics.num_blocks_free == metrics.num_blocks_total
        llm.wake_up()
        assert [generate(llm, prompt)[0].num_cached_tokens for _ in range(2)] == [0, 80]


def test_a_cache_in_fp8_comes_back_as_it_was(checkpoint: Path) -> None:
    prompt = list(range(5, 100))
    with LLM(checkpoint, num_threads=1, kv_cache_dtype="fp8") as llm:
        use, expected = memory_use(llm), exact(generate(llm, prompt, LOGPROBS))
        for level in (1, 2):
            llm.sleep(level)
            assert memory_use(llm).kv_cache_bytes == 0
            llm.wake_up()
            assert memory_use(llm).kv_cache_bytes == use.kv_cache_bytes
            for _ in range(2):  # computed, and found in the prefix cache
                assert exact(generate(llm, prompt, LOGPROBS)) == expected


def test_requests_are_refused_until_all_is_back(checkpoint: Path) -> None:
    with LLM(checkpoint, num_threads=1) as llm:
        expected = tokens(generate(llm, "hello"))
        assert not llm.is_sleeping()
        llm.sleep(2)
        for tags in (None, ["kv_cache"]):
            assert llm.is_sleeping()
            for call in (lambda: generate(llm, "hello"), lambda: llm.enqueue("hello", GREEDY)):
                with pytest.raises(InvalidArgument, match="is asleep; call wake_up"):
                    call()
            if tags:
                llm.wake_up(tags)
        llm.wake_up(["weights"])
        assert not llm.is_sleeping()
        assert tokens(generate(llm, "hello")) == expected
        llm.wake_up()
        llm.sleep()
        llm.sleep(2)
        llm.sleep()
        llm.wake_up()
        assert tokens(generate(llm, "hello")) == expected


def test_a_busy_engine_does_not_sleep(checkpoint: Path) -> None:
    with LLM(checkpoint, num_threads=1, max_num_seqs=1) as llm:
        llm.enqueue([[5, 6 + i] for i in range(50)], LONG)
        with pytest.raises(InvalidArgument, match=r"only an idle engine can sleep, and it has"):
            llm.sleep()
        assert not llm.is_sleeping()
        outputs = llm.wait_for_completion(use_tqdm=False)
        assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
        llm.sleep()


def test_a_checkpoint_that_is_gone_leaves_it_asleep_and_may_come_back(tmp_path: Path) -> None:
    source = checkpoints.checkpoint("llama")
    directory = checkpoints.copy_checkpoint(source, tmp_path / "model")
    with LLM(directory, num_threads=1) as llm:
        expected = tokens(generate(llm, "hello"))
        llm.sleep(2)
        (directory / "model.safetensors").write_bytes(b"damaged!")
        with pytest.raises(CorruptFile):
            llm.wake_up()
        shutil.copytree(
            checkpoints.checkpoint("llama", num_hidden_layers=1), directory, dirs_exist_ok=True
        )
        with pytest.raises(InvalidArgument, match="holds another model than when it was first"):
            llm.wake_up()
        assert llm.is_sleeping()
        shutil.copytree(source, directory, dirs_exist_ok=True)
        llm.wake_up()
        assert tokens(generate(llm, "hello")) == expected


def test_bad_arguments_are_refused_by_name(llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match="level must be between 1 and 2, got 3"):
        llm.sleep(3)
    with pytest.raises(InvalidArgument, match="tags must be a list"):
        llm.wake_up("weights")
    with pytest.raises(InvalidArgument, match="tags must be of 'weights' and 'kv_cache', got 'kv'"):
        llm.wake_up(["kv"])
    assert not llm.is_sleeping()


def test_requests_and_sleep_race_and_each_is_answered_or_refused(checkpoint: Path) -> None:
    answers: list[list[int]] = []
    refusals: list[str] = []
    is_done = threading.Event()
    with LLM(checkpoint, num_threads=1) as llm:
        (expected,) = tokens(generate(llm, "hello"))

        def ask() -> None:
            while not is_done.is_set():
                try:
                    answers.extend(tokens(generate(llm, "hello")))
                except InvalidArgument as error:
                    refusals.append(str(error))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + DEADLINE_S
        for _ in range(20):
            while not llm.is_sleeping():
                assert time.monotonic() < deadline
                with contextlib.suppress(InvalidArgument):
                    llm.sleep(2)
            llm.wake_up()
        is_done.set()
        for thread in threads:
            thread.join()
        answers.extend(tokens(generate(llm, "hello")))
    assert all(answer == expected for answer in answers)
    assert all("is asleep" in refusal for refusal in refusals)


def test_an_async_llm_sleeps_too(checkpoint: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(checkpoint, num_threads=1) as llm:
            first = [output async for output in llm.generate("hello", GREEDY)][-1]
            await llm.sleep(2)
            assert await llm.is_sleeping()
            with pytest.raises(InvalidArgument, match="is asleep"):
                await anext(llm.generate("hello", GREEDY))
            await llm.wake_up()
            again = [output async for output in llm.generate("hello", GREEDY)][-1]
            assert tokens([first]) == tokens([again])

    asyncio.run(main())


def test_closing_while_asleep_is_fine(checkpoint: Path) -> None:
    llm = LLM(checkpoint, num_threads=1)
    llm.sleep(2)
    llm.close()
    with pytest.raises(InvalidArgument, match="this LLM is closed"):
        llm.wake_up()
