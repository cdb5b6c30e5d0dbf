"""Classes of logits processors in vLLM's form: what they are given, and that rows keep apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llmserve import LLM, InvalidArgument, NotSupported, SamplingParams
from llmserve.v1.sample.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
)
from offline import GREEDY, generate, tokens

PROMPT = [5, 6, 7]


class Only(LogitsProcessor):
    """Draws the target of a request, and the token after it at every second place."""

    seen: list[Any] = []  # noqa: RUF012  # what all of them were given

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if (sampling_params.extra_args or {}).get("target", 0) < 0:
            raise ValueError("target is negative")

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        assert vllm_config.scheduler_config.max_num_seqs >= 1
        assert vllm_config.model_config.vocab_size == 320
        assert (device.type, is_pin_memory) == ("cpu", False)
        self.rows: dict[int, tuple[int, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self.rows.pop(row)
        for row, params, prompt, output in batch_update.added:
            self.seen.append((row, prompt, list(output)))
            target = (params.extra_args or {}).get("target")
            if target is not None:
                self.rows[row] = (target, output)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (target, output) in self.rows.items():
            logits[row] = float("-inf")
            logits[row, target + len(output) % 2] = 0.0
        return logits


class Adapted(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        args = params.extra_args or {}
        if "two" in args:
            return lambda output, logits: self.force(logits, args["two"] + len(output))
        if "three" in args:
            return lambda prompt, output, logits: self.force(logits, prompt[0] + len(output))
        return None

    @staticmethod
    def force(logits: torch.Tensor, token_id: int) -> torch.Tensor:
        forced = torch.full_like(logits, float("-inf"))
        forced[token_id] = 0.0
        return forced


def with_args(**args: object) -> SamplingParams:
    return GREEDY.clone(max_tokens=4, extra_args=args or None)


def test_each_request_has_its_own_row(checkpoint: Path) -> None:
    Only.seen.clear()
    with LLM(checkpoint, kv_cache_memory_bytes=2**22, logits_processors=[Only]) as llm:
        params = [with_args(target=20), with_args(), with_args(target=30)]
        outputs = generate(llm, [PROMPT] * 3, params)
        plain = generate(llm, [PROMPT], with_args())
    assert tokens(outputs)[::2] == [[20, 21, 20, 21], [30, 31, 30, 31]]
    assert tokens(outputs)[1] == tokens(plain)[0]
    assert Only.seen == [(0, PROMPT, [])] * 4


def test_samples_of_a_request_do_not_mix(checkpoint: Path) -> None:
    with LLM(checkpoint, kv_cache_memory_bytes=2**22, logits_processors=[Only]) as llm:
        (output,) = generate(llm, [PROMPT], with_args(target=20).clone(n=3, temperature=1.0))
    assert [c.token_ids for c in output.outputs] == [[20, 21, 20, 21]] * 3


def test_an_adapter_makes_functions_of_two_arguments_or_three(checkpoint: Path) -> None:
    with LLM(checkpoint, kv_cache_memory_bytes=2**22, logits_processors=[Adapted]) as llm:
        params = [with_args(two=40), with_args(three=True), with_args()]
        outputs = generate(llm, [PROMPT] * 3, params)
    assert tokens(outputs)[:2] == [[40, 41, 42, 43], [5, 6, 7, 8]]
    assert tokens(outputs)[2] not in tokens(outputs)[:2]


def test_functions_of_a_request_run_beside_them(checkpoint: Path) -> None:
    def next_one(token_ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        return np.roll(logits, 1)

    params = with_args(target=20)
    with LLM(checkpoint, kv_cache_memory_bytes=2**22, logits_processors=[Only]) as llm:
        outputs = generate(llm, [PROMPT], params.clone(logits_processors=[next_one]))
        llm.enqueue([PROMPT], params)
        enqueued = llm.wait_for_completion(use_tqdm=False)
    assert tokens(outputs) == tokens(enqueued) == [[20, 21, 20, 21]]


class Broken(Only):
    def __init__(self, *_: object) -> None:
        raise RuntimeError("no file of words")


REFUSED = [
    ("x", "logits_processors must be a list of classes, got 'x'"),
    ([print], r"logits_processors\[0\] must be a class, got <built-in"),
    (["x"], r"logits_processors\[0\] must be a class or module:Class, got 'x'"),
    (["nowhere:X"], r"logits_processors\[0\]: 'nowhere:X' cannot be imported"),
    ([dict], r"logits_processors\[0\]: dict has no method apply"),
]


@pytest.mark.parametrize(("value", "message"), REFUSED)
def test_what_is_no_class_is_refused(checkpoint: Path, value: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        LLM(checkpoint, kv_cache_memory_bytes=2**22, logits_processors=value)


def test_what_a_class_refuses_is_refused_before_anything_runs(checkpoint: Path) -> None:
    with LLM(checkpoint, kv_cache_memory_bytes=2**22, logits_processors=[Only]) as llm:
        with pytest.raises(InvalidArgument, match=r"sampling_params\[1\]: Only refuses it: target"):
            generate(llm, [PROMPT] * 2, [with_args(), with_args(target=-1)])
        assert llm.get_metrics().num_prompt_tokens == 0
    named = [f"{__name__}:Broken"]
    with (
        LLM(checkpoint, kv_cache_memory_bytes=2**22, logits_processors=named) as llm,
        pytest.raises(InvalidArgument, match="raised RuntimeError: no file of words"),
    ):
        generate(llm, [PROMPT], with_args())


def test_arguments_that_nobody_reads_are_refused(llm: LLM) -> None:
    with pytest.raises(NotSupported, match=r"extra_args={'target': 3} is read by classes of LLM"):
        generate(llm, [PROMPT], with_args(target=3))
