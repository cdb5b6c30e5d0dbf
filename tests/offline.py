"""What tests of `LLM` have in common."""

from __future__ import annotations

import os
from pathlib import Path

from llmserve import LLM, RequestOutput, SamplingParams

# Tells an answer from a hang; the calls take milliseconds.
DEADLINE_S = 60.0
# Long enough to be interrupted, short enough not to hang a test that fails to.
LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def generate(llm: LLM, prompts: object, params: object = GREEDY) -> list[RequestOutput]:
    """`LLM.generate` without a progress bar, of anything."""
    return llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    """The first continuation of each."""
    return [output.outputs[0].token_ids for output in outputs]


def memory_bytes() -> tuple[int, int]:
    """(address space, resident) of this process."""
    address_space, resident = Path("/proc/self/statm").read_text().split()[:2]
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return int(address_space) * page_bytes, int(resident) * page_bytes
