"""Threads that race on one LLM: each output is what it is alone."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
from llmserve import LLM, QueueFull, SamplingParams
from offline import DEADLINE_S, generate, tokens

NUM_THREADS = 8
# Prompts that share prefixes, of several blocks and of one; ends by length, stop token and text.
PROMPTS = [[5, 6, *range(7, 7 + n)] for n in (0, 1, 3, 15, 16, 17, 30, 33)]
PARAMS = [
    SamplingParams(max_tokens=1, temperature=0.0),
    SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=0.9, seed=3),
    SamplingParams(max_tokens=9, temperature=1.2, seed=4, top_p=0.7, repetition_penalty=1.2),
    SamplingParams(max_tokens=7, temperature=0.8, seed=5, logprobs=2, n=3),
]
Case = tuple[int, int]


class Racers:
    """Threads that do what comes up by chance, and what was wrong with it."""

    def __init__(self, llm: LLM, num_calls: int) -> None:
        self.llm = llm
        self.num_calls = num_calls
        self.wrong: list[str] = []
        self.num_checked = 0
        self.enqueued: dict[str, Case] = {}
        self.lock = threading.Lock()
        cases = [(p, s) for p in range(len(PROMPTS)) for s in range(len(PARAMS))]
        self.expected = {case: self.samples(case) for case in cases}

    def samples(self, case: Case) -> list[list[int]]:
        (output,) = generate(self.llm, [PROMPTS[case[0]]], PARAMS[case[1]])
        return [sample.token_ids for sample in output.outputs]

    def check(self, case: Case, got: list[list[int]]) -> None:
        with self.lock:
            self.num_checked += len(got)
            if got != self.expected[case]:
                self.wrong.append(f"{case}: {got} instead of {self.expected[case]}")

    def work(self, idx: int) -> None:
        rng = random.Random(idx)
        try:
            for _ in range(self.num_calls):
                cases = [self.draw(rng) for _ in range(rng.randint(1, 4))]
                rng.choice([self.generate, self.stream, self.leave, self.enqueue])(cases)
                if rng.random() < 0.1:
                    self.llm.reset_prefix_cache()
                    self.llm.get_metrics()
            if idx == 0:
                self.wait()
        except Exception as error:
            self.wrong.append(repr(error))

    def draw(self, rng: random.Random) -> Case:
        return rng.randrange(len(PROMPTS)), rng.randrange(len(PARAMS))

    def generate(self, cases: list[Case]) -> None:
        outputs = generate(self.llm, [PROMPTS[p] for p, _ in cases], [PARAMS[s] for _, s in cases])
        for case, output in zip(cases, outputs, strict=True):
            self.check(case, [sample.token_ids for sample in output.outputs])

    def stream(self, cases: list[Case]) -> None:
        *_, last = self.llm.stream(PROMPTS[cases[0][0]], PARAMS[cases[0][1]])
        self.check(cases[0], [sample.token_ids for sample in last.outputs])

    def leave(self, cases: list[Case]) -> None:
        next(self.llm.stream(PROMPTS[cases[0][0]], PARAMS[cases[0][1]]))

    def enqueue(self, cases: list[Case]) -> None:
        with self.lock:  # so that an id is known before its output comes
            ids = self.llm.enqueue([PROMPTS[p] for p, _ in cases], [PARAMS[s] for _, s in cases])
            self.enqueued.update(zip(ids, cases, strict=True))
        if cases[0][0] % 2:
            self.wait()

    def wait(self) -> None:
        for output in self.llm.wait_for_completion(use_tqdm=False):
            case = self.enqueued.pop(output.request_id)
            self.check(case, [sample.token_ids for sample in output.outputs])


def race(checkpoint: Path, num_calls: int) -> int:
    with LLM(checkpoint, num_threads=1, max_num_seqs=6, num_gpu_blocks_override=40) as llm:
        racers = Racers(llm, num_calls)
        threads = [threading.Thread(target=racers.work, args=(i,)) for i in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        racers.wait()
        assert racers.wrong == []
        assert not racers.enqueued
        metrics = llm.get_metrics()
        assert metrics.num_requests_running + metrics.num_requests_waiting == 0
        assert metrics.num_blocks_used == 0
    return racers.num_checked


def test_outputs_under_eight_racing_threads_are_those_of_each_alone(checkpoint: Path) -> None:
    assert race(checkpoint, num_calls=20) > NUM_THREADS * 20


@pytest.mark.long
def test_outputs_under_eight_racing_threads_for_long(checkpoint: Path) -> None:
    print(f"{race(checkpoint, num_calls=4000)} outputs")


def test_requests_are_enqueued_in_one_thread_while_another_waits(checkpoint: Path) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with LLM(checkpoint, num_threads=1) as llm:
        (expected,) = tokens(generate(llm, [[5, 6]], params))
        ids: list[str] = []
        errors: list[BaseException] = []
        is_over = threading.Event()

        def enqueue() -> None:
            try:
                while not is_over.is_set():
                    ids.extend(llm.enqueue([[5, 6]] * 40, params))
            except QueueFull as error:
                errors.append(error)

        thread = threading.Thread(target=enqueue)
        thread.start()
        outputs = []
        deadline = time.monotonic() + DEADLINE_S
        while len(outputs) < 2000 and time.monotonic() < deadline:
            outputs += llm.wait_for_completion(use_tqdm=False)
        is_over.set()
        thread.join()
        outputs += llm.wait_for_completion(use_tqdm=False)
        assert errors == []
        assert [output.request_id for output in outputs] == ids
        assert all(output.outputs[0].token_ids == expected for output in outputs)
