"""The KV calculator: how many users of a model fit in so much memory, by KV dtype and context."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmserve import _core
from llmserve.checkpoint.model_files import (
    MAX_CONFIG_BYTES,
    JsonObject,
    check_access,
    checked_field,
    is_gguf,
    only_gguf,
    parse_json_object,
    read_bytes,
)
from llmserve.common.arguments import INT32_MAX, integer
from llmserve.common.units import human_bytes
from llmserve.errors import InvalidArgument, NotSupported
from llmserve.plan.kv_rows import KvRow, kv_rows, kv_table, users_at
from llmserve.plan.table import html_page, text_table

_MAX_LAYERS = 4096
_MAX_WIDTH = 2**16  # KV heads, elements of one: the bytes of a block of all layers stay below 2^63


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a KV cache needs to know of a model.

    cache_groups: what its layers keep of a token. weight_bytes: the whole model's, 0 if unknown.
    """

    cache_groups: tuple[_core.CacheGroupSpec, ...]
    weight_bytes: int = 0

    @staticmethod
    def of(
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        weight_bytes: int = 0,
    ) -> "ModelShape":
        """Layers that are all alike; values are as wide as keys unless value_dim says otherwise.

        A latent cache (MLA) is one head whose parts add up, in DeepSeek-V2 and V3 512 + 64:

        >>> ModelShape.of(61, 1, 512, value_dim=64).kv_bytes(1) == 61 * 576 * 2
        True
        """
        count = integer("num_layers", num_layers, 1, _MAX_LAYERS)
        heads = integer("num_kv_heads", num_kv_heads, 1, _MAX_WIDTH)
        keys = integer("head_dim", head_dim, 1, _MAX_WIDTH)
        values = keys if value_dim is None else integer("value_dim", value_dim, 0, _MAX_WIDTH)
        group = _core.CacheGroupSpec(
            num_layers=count, num_kv_heads=heads, key_dim=keys, value_dim=values
        )
        return ModelShape((group,), integer("weight_bytes", weight_bytes, 0, 2**63 - 1))

    @staticmethod
    def from_config(path: str | os.PathLike[str], *, weight_bytes: int = 0) -> "ModelShape":
        """Of a Hugging Face config.json (or the folder that holds one, or the .safetensors file
        beside one), whether llmserve runs the architecture or not; or of a GGUF file, alone or the
        only one of a folder, if it does. Raises CorruptFile, InvalidArgument, NotSupported."""
        file = Path(os.fsdecode(os.fspath(path)))
        check_access(file)
        file = only_gguf(file) or file
        if is_gguf(file):
            plan = _core.plan_memory(_core.ConfigRequest(model=str(file)))
            return ModelShape(tuple(plan.cache_groups), weight_bytes)
        file = file.parent if file.suffix == ".safetensors" else file
        file = file / "config.json" if file.is_dir() else file
        data = read_bytes(file.parent, file.name, MAX_CONFIG_BYTES)
        if data is None:
            raise InvalidArgument(f"model: there is no {file}")
        fields = parse_json_object(data, file)
        if _is_known(fields):  # windows and absent fields are the family's, which the core knows
            with contextlib.suppress(NotSupported):
                plan = _core.plan_memory(_core.ConfigRequest(model=str(file)))
                return ModelShape(tuple(plan.cache_groups), weight_bytes)
        return _shape_of(file, fields, weight_bytes)

    def kv_bytes(self, num_tokens: int, dtype: str = "bfloat16") -> int:
        """Bytes of the KV cache of `num_tokens` tokens: over the layers, num_tokens x KV heads x
        (key dim + value dim) x bytes an element; 2 x layers x KV heads x head dim x bytes where
        keys and values are alike. dtype: float32, bfloat16, float16, fp8, int8 or int4, whose
        scales are not counted.

        >>> ModelShape.of(28, 4, 128).kv_bytes(4096)
        234881024
        """
        tokens = integer("num_tokens", num_tokens, 0, 2**62)
        return tokens * _core.kv_bytes_per_token(self.cache_groups, dtype, with_scales=False)


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many users fit; made by `plan_capacity`."""

    memory_bytes: int
    overhead: float
    weight_bytes: int
    kv_cache_bytes: int  # what is left for the cache; negative if the weights do not fit
    block_size: int
    contexts: tuple[int, ...]
    rows: tuple[KvRow, ...] = field(default=())

    def num_users(self, context: int, dtype: str = "bfloat16") -> int:
        """Users of one of `contexts` tokens at one of the dtypes."""
        return users_at(self.rows, self.contexts, context, dtype)

    def __str__(self) -> str:
        left = (
            human_bytes(self.kv_cache_bytes)
            if self.kv_cache_bytes >= 0
            else f"none: {human_bytes(-self.kv_cache_bytes)} too little"
        )
        return (
            f"memory         {human_bytes(self.memory_bytes)}, of which {self.overhead:.0%} "
            f"overhead\n"
            f"weights        {human_bytes(self.weight_bytes)}\n"
            f"KV cache       {left}\n\n{text_table(*self._table())}"
        )

    def _repr_html_(self) -> str:
        return html_page(str(self).split("\n\n")[0], *self._table())

    def _table(self) -> tuple[list[str], list[list[str]], str]:
        note = "* arithmetic only: llmserve does not run this KV dtype yet"
        return (*kv_table(self.rows, self.contexts), note)


def plan_capacity(
    shape: ModelShape,
    memory_bytes: int,
    contexts: Sequence[int] = (4096,),
    *,
    overhead: float = 0.0,
    block_size: int = 16,
) -> Capacity:
    """Users that fit in memory of a given size: floor((memory x (1 - overhead) - weights) / KV
    bytes of a context), in whole blocks, for every KV dtype.

    Llama-3-70B (70 G parameters of 2 bytes) on 4 x 80 GiB, a tenth of it for activations and
    fragmentation, at 4,096 tokens: (288 GiB - 140 GB) / 1.25 GiB, and twice and four times that.

    >>> llama_3_70b = ModelShape.of(80, 8, 128, weight_bytes=140 * 10**9)
    >>> capacity = plan_capacity(llama_3_70b, 4 * 80 * 2**30, overhead=0.1)
    >>> [capacity.num_users(4096, dtype) for dtype in ("bfloat16", "fp8", "int4")]
    [126, 252, 504]
    """
    total = integer("memory_bytes", memory_bytes, 1, 2**62)
    if not 0 <= overhead < 1:
        raise InvalidArgument(f"overhead must be in [0, 1), got {overhead!r}")
    lengths = tuple(integer("contexts", context, 1) for context in contexts)
    left = round(total * (1 - overhead)) - shape.weight_bytes
    tokens_of_block = integer("block_size", block_size, 1, 256)
    pools = [
        _core.KvPool(max(0, left), shape.kv_bytes(1, dtype.name), tokens_of_block)
        for dtype in _core.kv_cache_dtypes()
    ]
    rows = kv_rows(pools, lengths)
    return Capacity(total, overhead, shape.weight_bytes, left, block_size, lengths, rows)


def _is_known(fields: JsonObject) -> bool:
    names = fields.get("architectures")
    known = [name for name, _ in (*_core.supported_architectures(), *_core.supported_wrappers())]
    return isinstance(names, list) and names[:1] != [] and names[0] in known


def _shape_of(path: Path, fields: JsonObject, weight_bytes: int) -> ModelShape:
    inner = fields.get("text_config")  # models of several senses keep the language model there
    fields = inner if isinstance(inner, dict) else fields

    def read(*names: str) -> int | None:
        for name in names:
            value = checked_field(path, fields, name, lambda n, v: integer(n, v, 1, INT32_MAX))
            if value is not None:
                return value
        return None

    layers = read("num_hidden_layers", "n_layer")
    heads = read("num_attention_heads", "n_head")
    if layers is None or heads is None:
        raise NotSupported(
            f"{path}: has no num_hidden_layers and num_attention_heads; pass a shape"
        )
    latent = read("kv_lora_rank")
    if latent is not None:  # MLA: one latent vector and one rotated key a token, for all heads
        rotated = read("qk_rope_head_dim") or 0
        return ModelShape.of(layers, 1, latent, value_dim=rotated, weight_bytes=weight_bytes)
    kv_heads = read("num_key_value_heads") or (1 if fields.get("multi_query") is True else heads)
    head_dim = read("head_dim")
    if head_dim is None:
        width = read("hidden_size", "n_embd")
        if width is None or width % heads:
            raise NotSupported(f"{path}: has no head_dim, nor a hidden_size that the heads divide")
        head_dim = width // heads
    return ModelShape.of(layers, kv_heads, head_dim, weight_bytes=weight_bytes)
