"""What `LLM.embed` and `LLM.encode` return of a prompt, and where a checkpoint says it."""

import json
from dataclasses import dataclass
from pathlib import Path

from llmserve import _core
from llmserve.checkpoint.model_files import MAX_CONFIG_BYTES, parse_json_object, read_bytes
from llmserve.common.arguments import describe, optional_integer, refuse_unknown, truncation
from llmserve.common.init_signature import InitSignature
from llmserve.common.pooler_config import PoolerConfig
from llmserve.errors import CorruptFile, InvalidArgument, NotSupported

TASKS = ("embed", "token_embed", "token_logits")
# Tasks of vLLM's that need a head of another kind.
_TASKS_NOT_YET_SUPPORTED = ("classify", "score", "reward", "token_classify", "plugin")


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Pooling parameters of one request; names as users of vLLM know them.

    task: "embed", one vector a prompt; "token_embed", the last hidden states [T, E];
    "token_logits" (llmserve's own), the logits [T, V].
    dimensions: keep the first so many of an embedding (Matryoshka), before it is normalized.
    use_activation: bring embeddings to an L2 norm of 1; None does for "embed", as far as the
    checkpoint's sentence-transformers files do not say otherwise, and not for "token_embed".
    normalize: the same by its older name.
    truncate_prompt_tokens: so many of the prompt's last tokens alone; -1 as many as the model can
    take.

    Raises InvalidArgument that names the field and the value, or NotSupported.

    >>> PoolingParams(dimensions=64).dimensions
    64
    """

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    task: str | None = None
    skip_reading_prefix_cache: bool | None = None

    __signature__ = InitSignature()

    def __new__(cls, *args: object, **kwargs: object) -> "PoolingParams":
        """Refuses unknown names with a hint before the generated __init__ sees them."""
        refuse_unknown("PoolingParams", kwargs, cls.__slots__)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        truncation("truncate_prompt_tokens", self.truncate_prompt_tokens)
        optional_integer("dimensions", self.dimensions, 1)
        for name in ("use_activation", "normalize", "skip_reading_prefix_cache"):
            value = getattr(self, name)
            if value not in (None, True, False):
                raise InvalidArgument(f"{name} must be True, False or None, got {describe(value)}")
            object.__setattr__(self, name, None if value is None else bool(value))  # NumPy's
        if self.skip_reading_prefix_cache is False:
            raise NotSupported(
                "skip_reading_prefix_cache=False: the cache holds no hidden states, so that "
                "pooling always runs the whole prompt; leave it at None"
            )
        if self.task is not None:
            check_task("task", self.task)

    def to_core(self, task: str, pooling: "PoolingConfig") -> _core.PoolingParams:
        """The engine's struct for a task of TASKS."""
        wanted = self.normalize if self.use_activation is None else self.use_activation
        default = task == "embed" and pooling.normalize
        params = _core.PoolingParams(
            task=task,
            pooling=pooling.type,
            normalize=default if wanted is None else wanted,
            dimensions=self.dimensions or pooling.dimensions,
        )
        params.validate()
        return params


def check_task(name: str, task: object) -> str:
    """`task`, which must be one of TASKS. Raises InvalidArgument or NotSupported."""
    if task in _TASKS_NOT_YET_SUPPORTED:
        raise task_not_supported(str(task))
    if task not in TASKS:
        raise InvalidArgument(f"{name} must be one of {', '.join(TASKS)}, got {describe(task)}")
    return str(task)


def task_not_supported(task: str) -> NotSupported:
    """The refusal of a task that is not there yet."""
    return NotSupported(
        f"{task} is not supported yet: heads for classification and scores are not loaded; the "
        f"pooling tasks are {', '.join(TASKS)}"
    )


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """How a model makes one vector of a prompt."""

    type: str = "last"  # "last", "cls" or "mean"
    normalize: bool = True
    dimensions: int = 0  # of requests that say nothing; 0: all

    def overridden(self, config: PoolerConfig) -> "PoolingConfig":
        """With what LLM(pooler_config) says."""
        kind, normalize = config.pooling_type, config.normalize
        if normalize is None:
            normalize = config.use_activation
        return PoolingConfig(
            self.type if kind is None else kind.lower(),
            self.normalize if normalize is None else normalize,
            config.dimensions or self.dimensions,
        )


_TYPE_OF_MODE = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
}


def read_pooling_config(directory: Path) -> PoolingConfig:
    """What modules.json of sentence-transformers and the pooling module's config.json say; the
    defaults without them. Raises CorruptFile, or NotSupported that names what is there."""
    data = read_bytes(directory, "modules.json", MAX_CONFIG_BYTES)
    if data is None:
        return PoolingConfig()
    path = directory / "modules.json"
    try:
        modules = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{path}: not JSON: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CorruptFile(f"{path}: expected a list of modules, got {describe(modules)}")
    types = {str(m.get("type", "")).rsplit(".", 1)[-1]: str(m.get("path", "")) for m in modules}
    unknown = types.keys() - {"Transformer", "Pooling", "Normalize"}
    if unknown:
        raise NotSupported(
            f"{path}: module {min(unknown)} is not supported (Transformer, Pooling and Normalize "
            f"are); encode(..., pooling_task='token_embed') gives the hidden states before it"
        )
    pooling = _read_pooling_type(directory, types["Pooling"]) if "Pooling" in types else "last"
    return PoolingConfig(pooling, "Normalize" in types)


def _read_pooling_type(directory: Path, module: str) -> str:
    name = f"{module}/config.json"
    data = read_bytes(directory, name, MAX_CONFIG_BYTES)
    if data is None:
        raise CorruptFile(f"{directory / name}: modules.json names it, and it is not there")
    fields = parse_json_object(data, directory / name)
    modes = [key for key, on in fields.items() if key.startswith("pooling_mode_") and on is True]
    if len(modes) != 1 or modes[0] not in _TYPE_OF_MODE:
        raise NotSupported(
            f"{directory / name}: pooling by {' and '.join(modes) or 'nothing'} is not supported; "
            f"one of {', '.join(_TYPE_OF_MODE)} is"
        )
    return _TYPE_OF_MODE[modes[0]]
