"""Classes of logits processors in vLLM's form, which edit the logits of a batch in place.

Each request has an object of its own, for which the batch is one row: its state is that of the
request, whatever runs beside it.
"""

import enum
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmserve.common.arguments import describe
from llmserve.errors import InvalidArgument
from llmserve.model_config import VllmConfig
from llmserve.sampling_params import PythonLogitsProcessor, SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# fn(output_ids, logits) or fn(prompt_ids, output_ids, logits), which gives the logits.
RequestLogitsProcessor = Callable[..., Any]


class MoveDirectionality(enum.Enum):
    """How a row of the batch moves; no row moves here."""

    UNIDIRECTIONAL = 0
    SWAP = 1


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """What has changed of the batch since the last step."""

    batch_size: int
    removed: Sequence[int] = ()
    # (row, parameters, ids of the prompt, ids of the output, which go on growing)
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]] = ()
    moved: Sequence[tuple[int, int, MoveDirectionality]] = ()


class LogitsProcessor(ABC):
    """What LLM(logits_processors=[...]) takes: a class whose objects edit logits [B, V].

    Its __init__ takes (vllm_config, device, is_pin_memory). Logits are torch tensors where torch
    has been imported, and NumPy arrays elsewhere.
    """

    @classmethod  # noqa: B027
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises ValueError for parameters that it cannot take; called when a request comes in."""

    @abstractmethod
    def apply(self, logits: Any) -> Any:
        """The logits, edited in place or others."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the most likely token stays that; nobody asks here."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Before each step: what has changed of the batch, None for nothing."""


class AdapterLogitsProcessor(LogitsProcessor):
    """A class that makes a function for each request that wants one."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._functions: dict[int, Callable[[Any], Any]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The function of a request with these parameters, None for none."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Takes the functions of new rows."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._functions.pop(row, None)
        for row, params, prompt_ids, output_ids in batch_update.added:
            self._functions.pop(row, None)
            function = self.new_req_logits_processor(params)
            if function is not None:
                self._functions[row] = _bound(function, prompt_ids, output_ids)

    def apply(self, logits: Any) -> Any:
        """Each row by its function."""
        for row, function in self._functions.items():
            edited = function(logits[row])
            if edited is not None:  # else in place
                logits[row] = edited
        return logits


def _bound(
    function: RequestLogitsProcessor, prompt_ids: list[int] | None, output_ids: list[int]
) -> Callable[[Any], Any]:
    """Of two arguments or three, as it takes them."""
    import inspect

    if len(inspect.signature(function).parameters) == 3:
        return lambda logits: function(prompt_ids, output_ids, logits)
    return lambda logits: function(output_ids, logits)


@dataclass(frozen=True, slots=True)
class ProcessorClasses:
    """Those of one LLM."""

    classes: tuple[type[Any], ...]
    config: VllmConfig

    @classmethod
    def from_argument(cls, value: object, config: VllmConfig) -> "ProcessorClasses | None":
        """Classes, or texts "module:Class". Raises InvalidArgument."""
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise InvalidArgument(
                f"logits_processors must be a list of classes, got {describe(value)}"
            )
        classes = tuple(_class(f"logits_processors[{idx}]", one) for idx, one in enumerate(value))
        return cls(classes, config) if classes else None

    def check(self, label: str, params: SamplingParams) -> None:
        """Raises InvalidArgument for what one of them refuses."""
        for kind in self.classes:
            validate = getattr(kind, "validate_params", None)
            if validate is None:
                continue
            try:
                validate(params)
            except Exception as error:
                raise InvalidArgument(f"{label}: {kind.__name__} refuses it: {error}") from error

    def functions(self, prompt: list[int], params: SamplingParams) -> list[PythonLogitsProcessor]:
        """For one request, in the form of SamplingParams.logits_processors. Raises InvalidArgument
        where an object cannot be made."""
        result: list[PythonLogitsProcessor] = []
        for kind in self.classes:
            try:
                made = kind(self.config, _device(), False)
            except Exception as error:
                raise InvalidArgument(
                    f"logits_processors: {kind.__name__}(vllm_config, device, is_pin_memory) "
                    f"raised {type(error).__name__}: {error}"
                ) from error
            result.append(_OneRow(made, prompt, params))
        return result


@dataclass(slots=True)
class _OneRow:
    """An object whose batch is one request."""

    made: Any
    prompt: list[int]
    params: SamplingParams
    output: list[int] | None = field(default=None)  # what the object knows of it

    def __call__(
        self, token_ids: "npt.NDArray[np.int32]", logits: "npt.NDArray[np.float32]"
    ) -> object:
        """As a function of SamplingParams.logits_processors."""
        output: list[int] = token_ids[len(self.prompt) :].tolist()
        if self.output is not None and output[: len(self.output)] == self.output:
            self.output += output[len(self.output) :]
            self.made.update_state(None)
        else:  # the first token, or another of the request's samples
            removed = [] if self.output is None else [0]
            self.output = output
            added = [(0, self.params, self.prompt, self.output)]
            self.made.update_state(BatchUpdate(1, removed, added, []))
        torch = sys.modules.get("torch")
        rows = logits[None, :] if torch is None else torch.from_numpy(logits)[None, :]
        return self.made.apply(rows)[0]


def _class(label: str, value: object) -> type[Any]:
    if isinstance(value, str):
        module, colon, name = value.partition(":")
        if not colon:
            raise InvalidArgument(f"{label} must be a class or module:Class, got {value!r}")
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
            value = found
        except (ImportError, AttributeError) as error:
            raise InvalidArgument(f"{label}: {value!r} cannot be imported: {error}") from error
    if not isinstance(value, type):
        raise InvalidArgument(
            f"{label} must be a class, got {describe(value)}; functions are taken by "
            f"SamplingParams(logits_processors=[...])"
        )
    missing = [name for name in ("apply", "update_state") if not hasattr(value, name)]
    if missing:
        raise InvalidArgument(f"{label}: {value.__name__} has no method {missing[0]}")
    return value


def _device() -> object:
    """Where the logits are."""
    torch = sys.modules.get("torch")
    return "cpu" if torch is None else torch.device("cpu")
