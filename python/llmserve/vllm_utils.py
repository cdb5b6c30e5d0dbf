"""Small things that scripts import from vLLM beside its engine."""

import enum
import gc
import itertools
import logging
import uuid

from llmserve.errors import NotSupported


class UsageContext(str, enum.Enum):
    """Where an engine is used; nobody is told."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


class Counter:
    """Counts from a number on, at each next().

    >>> counter = Counter()
    >>> next(counter), next(counter)
    (0, 1)
    """

    def __init__(self, start: int = 0) -> None:
        self._numbers = itertools.count(start)

    def __next__(self) -> int:
        return next(self._numbers)

    def reset(self) -> None:
        """Counts from 0 again."""
        self._numbers = itertools.count()


class LoRARequest:
    """Not here: raises NotSupported that says what to use."""

    def __init__(self, *_arguments: object, **_keywords: object) -> None:
        raise NotSupported(
            "LoRARequest is not supported: adapters are not applied; merge them into the "
            "checkpoint (peft's merge_and_unload), and load that"
        )


def random_uuid() -> str:
    """A name for a request that no other has: 32 hexadecimal digits.

    >>> len(random_uuid())
    32
    """
    return uuid.uuid4().hex


def init_logger(name: str) -> logging.Logger:
    """logging.getLogger(name)."""
    return logging.getLogger(name)


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collects garbage: an LLM that nobody holds any more gives its memory back by itself."""
    gc.collect()
