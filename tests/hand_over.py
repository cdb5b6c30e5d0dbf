"""Engines that hand prompts over to each other."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import checkpoints
from llmserve import LLM, SamplingParams
from llmserve.outputs import RequestOutput

DEADLINE_S = 30.0
KEY = "a key that both sides know"
SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, seed=3, ignore_eos=True, logprobs=1)
ONE = SamplingParams(max_tokens=1)
PROMPT = [3 + i * 7 % 60 for i in range(77)]  # four blocks of 16 and a part of one


def make_llm(family: str = "llama", path: object = None, **options: Any) -> LLM:
    defaults = {
        "dtype": "float32",
        "max_model_len": 128,
        "num_gpu_blocks_override": 64,
        "max_num_batched_tokens": 50,
        "num_threads": 1,
    }
    return LLM(str(path or checkpoints.checkpoint(family)), **{**defaults, **options})


def addresses(transport: str) -> list[str]:
    """Where a sender listens, for the receiver to have this one way alone."""
    return {
        "local": [],
        "shm": [f"shm:llmserve-test-{secrets.token_hex(8)}"],
        "tcp": ["tcp:127.0.0.1:0"],
        "tcp6": ["tcp:[::1]:0"],
    }[transport]


def open_both(sender: LLM, receiver: LLM, transport: str = "tcp", **options: Any) -> None:
    """Whoever shares a process finds the other in it, unless it is asked to go by a socket."""
    place = sender.open_hand_over(KEY, addresses(transport), **options)
    if transport != "local":
        place.addresses = place.addresses[1:]
    receiver.open_hand_over(KEY, **options)


def run(llm: LLM, prompt: Sequence[int], params: SamplingParams, ticket: str = "") -> RequestOutput:
    prompts = [{"prompt_token_ids": list(prompt)}]
    (state,) = llm._admission.admit(prompts, params, 0, (), llm._blocks_of(ticket))
    for _ in llm._runner.run([state], is_streamed=False):
        pass
    return state.output()


def words(output: RequestOutput) -> list[object]:
    return [(sample.token_ids, sample.text, sample.logprobs) for sample in output.outputs]


def hand_over(sender: LLM, receiver: LLM, prompt: Sequence[int], params: SamplingParams) -> Any:
    """What the receiver answers to a prompt that the sender has computed."""
    assert sender.hand_over is not None
    ticket = sender.hand_over.ticket()
    run(sender, prompt, ONE, ticket)
    return run(receiver, prompt, params, ticket)


def hand_over_at_once(
    sender: LLM, receiver: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[object]:
    """The words of each prompt's answer, handed over by a thread of its own."""
    got: dict[int, object] = {}

    def go(i: int) -> None:
        got[i] = words(hand_over(sender, receiver, prompts[i], params))

    threads = [threading.Thread(target=go, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    return [got[i] for i in range(len(prompts))]


def wait_until(holds: Callable[[], object]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.005)


def failures(llm: LLM) -> dict[str, int]:
    """Prompts that were computed again, by cause."""
    return {cause: n for cause, n in llm.get_metrics().num_hand_overs_failed.items() if n}


def check_idle(*engines: LLM) -> None:
    for llm in engines:
        wait_until(lambda llm=llm: llm.get_metrics().num_blocks_used == 0)  # type: ignore[misc]


class Paced:
    """A request beside others, whose sampling holds up each step of its engine until it is let."""

    def __init__(self, llm: LLM, max_tokens: int = 100) -> None:
        self._llm = llm
        self._steps = threading.Semaphore(0)
        self.num_held = 0
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, logits_processors=[self._hold]
        )
        self._thread = threading.Thread(target=self._run, args=(params,), daemon=True)
        self._thread.start()
        self.wait(1)

    def _hold(self, token_ids: Any, logits: Any) -> None:
        self.num_held += 1
        self._steps.acquire(timeout=DEADLINE_S)

    def _run(self, params: SamplingParams) -> None:
        with suppress(Exception):  # the engine is closed
            run(self._llm, [3, 4], params)

    def wait(self, num_held: int) -> None:
        wait_until(lambda: self.num_held == num_held)

    def step(self) -> None:
        held = self.num_held
        self._steps.release()
        self.wait(held + 1)

    def end(self) -> None:
        self._steps.release(1000)
        self._thread.join(DEADLINE_S)


def counter(metrics: str, name: str, **labels: str) -> int:
    """Of a server's /metrics, summed over what is not given."""
    total = 0.0
    for found in re.finditer(rf"^{re.escape(name)}(?:{{(.*?)}})? (\S+)$", metrics, re.MULTILINE):
        if all(f'{key}="{value}"' in (found[1] or "") for key, value in labels.items()):
            total += float(found[2])
    return int(total)
