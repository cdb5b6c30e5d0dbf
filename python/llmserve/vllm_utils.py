"""Small things that scripts import from vLLM beside its engine."""

import enum
import gc
import itertools
import logging
import os
import uuid

from llmserve.checkpoint.model_files import find_checkpoint, text_source
from llmserve.errors import InvalidArgument
from llmserve.tokenization.tokenizer import Tokenizer


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


def get_tokenizer(
    tokenizer_name: str | os.PathLike[str],
    *,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> Tokenizer:
    """The tokenizer of a checkpoint. tokenizer_mode and trust_remote_code are vLLM's: there is one
    way to read it, and nothing is executed. Raises InvalidArgument where it has none.

    >>> from llmserve import demo_model_path
    >>> get_tokenizer(demo_model_path()).encode("The fox") != []
    True
    """
    tokenizer = Tokenizer.from_path(text_source(find_checkpoint(tokenizer_name, revision)), None)
    if tokenizer is None:
        raise InvalidArgument(f"{tokenizer_name} has no tokenizer")
    return tokenizer
