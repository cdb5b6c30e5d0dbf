"""What an engine's trace says of the time of its decode steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from llmserve import _core


def decode_times(steps: Sequence[_core.StepRecord], num_sequences: int) -> dict[str, float]:
    """Medians, in microseconds, over the steps in which so many sequences decode; beyond execution
    is from one step's start to the next one's, without the execution."""
    pairs = [
        (step, after)
        for step, after in pairwise(steps)
        if step.phase == after.phase == "decode" and step.num_sequences == num_sequences
    ]
    beyond = [after.start_us - step.start_us - step.execute_us for step, after in pairs]
    return {
        "schedule_us": statistics.median(step.schedule_us for step, _ in pairs),
        "execute_us": statistics.median(step.execute_us for step, _ in pairs),
        "commit_us": statistics.median(step.commit_us for step, _ in pairs),
        "beyond_execution_us": statistics.median(beyond),
    }
