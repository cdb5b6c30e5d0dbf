"""Models on several GPUs, whose words are the same however they lie, and faults of the emulator."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
from checkpoints import checkpoint
from llmserve import LLM, SamplingParams
from llmserve import _core_testing as testing
from llmserve.errors import NotSupported
from llmserve.outputs import RequestOutput

PROMPTS = [[5, 6, 7], list(range(3, 43)), [9] * 17]
PARAMS = [
    SamplingParams(max_tokens=8, ignore_eos=True, temperature=0, logprobs=2),
    SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.9, seed=3, n=2, top_k=40),
    SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, seed=5, repetition_penalty=1.3),
]


def plainly() -> Iterator[None]:
    """The body of a fixture: products with the same bits whatever the shape is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMSERVE_CUDA_GEMM", "plain")
        yield


def need_gpus(count: int) -> None:
    try:
        testing.nccl_library()
    except NotSupported as error:
        pytest.skip(str(error))
    if testing.num_gpus() < count:
        pytest.skip(f"{count} GPUs are needed, and {testing.num_gpus()} are visible")


class Faults:
    """What the emulated NCCL is told (tests/cuda/emulator/fake_nccl.cpp)."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(testing.nccl_library()[0])

    def __getitem__(self, name: str) -> int:
        return ctypes.c_int.in_dll(self._library, f"fake_{name}").value

    def __setitem__(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self._library, f"fake_{name}").value = value

    def tell(self, *, rank: int, call: int, fault: int, times: int = 1) -> None:
        self["num_calls"] = 0
        self["fail_call"], self["fault"], self["num_faults"] = call, fault, times
        self["fail_rank"] = rank


def told_faults() -> Iterator[Faults]:
    """The body of a fixture: Faults that are none again at its end."""
    need_gpus(2)
    try:
        told = Faults()
        told["fail_rank"] = -1
    except ValueError:
        pytest.skip("the emulator's NCCL fails on request, and no other one does")
    yield told
    told["fail_rank"] = -1


FIELDS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 48,
    "block_size": 8,
}


def make_llm(num_ranks: int, family: str = "qwen3", **options: Any) -> LLM:
    fields = {**FIELDS, "tensor_parallel_size": num_ranks, **options}
    return LLM(checkpoint(family), **fields)


def run(llm: LLM) -> list[RequestOutput]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return llm.generate(prompts, PARAMS, use_tqdm=False)


def words(outputs: list[RequestOutput]) -> list[object]:
    return [
        (sample.token_ids, sample.finish_reason, repr(sample.logprobs))
        for output in outputs
        for sample in output.outputs
    ]


def expected(family: str = "qwen3", **options: Any) -> list[object]:
    with make_llm(1, family, **options) as llm:
        return words(run(llm))
