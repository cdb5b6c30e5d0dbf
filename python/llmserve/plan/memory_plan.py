"""What an engine will take, as `LLM.plan` gives it."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from llmserve import _core
from llmserve.common.arguments import integer
from llmserve.common.units import human_bytes
from llmserve.errors import InvalidArgument
from llmserve.plan.bounds import decode_tokens_per_s, prefill_tokens_per_s
from llmserve.plan.experts import active_experts
from llmserve.plan.kv_rows import KvRow, kv_rows, kv_table, users_at
from llmserve.plan.table import html_page, text_table

# Contexts that users are counted for unless the caller names some, up to max_model_len.
_DEFAULT_CONTEXTS = (512, 2048, 8192, 32768, 131072)
# The groups of weights that a decode step reads as a whole; of the embedding it reads rows.
_READ_GROUPS = ("attention", "mlp", "norm", "lm_head")


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Weights of one kind, in bytes as they lie in memory."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class KvLayers:
    """Layers that keep the same of a token."""

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int  # tokens that a layer looks back, 0 for all; the pool keeps all in either case
    bytes_per_token: int  # of these layers together


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """Upper bounds of speed at one context, from a given bandwidth and rate of arithmetic."""

    context: int
    batch: int  # users that decode together: what the pool and max_num_seqs hold
    one_user_tokens_per_s: float
    all_users_tokens_per_s: float
    prefill_tokens_per_s: float | None  # None: no rate of arithmetic was given


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What a draft model takes beside the target, in bytes."""

    model: str
    architecture: str
    weight_bytes: int
    workspace_bytes: int
    kv_cache_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.workspace_bytes + self.kv_cache_bytes


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one of several ranks takes of the whole, in bytes, and its threads.

    layers: the first of its stage, and the one behind the last; None without stages. The first
    ranks are those of the last stage."""

    num_threads: int
    weight_bytes: int
    workspace_bytes: int
    kv_cache_bytes: int
    layers: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """Weights that a checkpoint has quantized alike: what is in the files, and how it runs."""

    stored: str
    runs: str
    num_weights: int

    def __str__(self) -> str:
        return f"{self.num_weights} weights of {self.stored} run {self.runs}"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What an engine takes, in bytes, and whom it serves; nothing has been loaded.

    weight_bytes, workspace_bytes and kv_cache_bytes are what the engine then holds, exactly, and
    `draft` what it holds besides where a draft model guesses; `ranks`, where there are several,
    are the parts of each, within one replica. Of num_replicas engines, which share the weights
    unless each has GPUs of its own, num_blocks, num_tokens and `rows` are of each, and the bytes of
    all together.
    mapped_bytes of the weights are read in place from the file: page cache, not memory of the
    process. integers are the formats of the linear layers that run on integers. quantized says how
    the weights run that the checkpoint has quantized, and notes what else it asks for and is done
    otherwise. available_bytes is what the machine's control group leaves now, less what other LLMs
    of this process were promised (reserved_bytes). pool_bound names the argument that set the
    pool's size. refusal says why LLM would refuse, None if it would not.
    """

    model: str
    architecture: str
    device: str
    dtype: str
    integers: tuple[str, ...]
    kv_cache_dtype: str
    num_threads: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    weights: tuple[WeightGroup, ...]
    num_experts: int
    experts_per_token: int
    weight_bytes: int
    mapped_bytes: int
    workspace_bytes: int
    kv_layers: tuple[KvLayers, ...]
    kv_bytes_per_token: int
    kv_cache_bytes: int
    block_size: int
    num_blocks: int
    num_tokens: int
    sequence_bytes: int
    pool_bound: str
    gpu_memory_utilization: float
    total_memory_bytes: int
    available_bytes: int
    reserved_bytes: int
    bounded_by: str
    contexts: tuple[int, ...]
    rows: tuple[KvRow, ...]
    speed: tuple[SpeedRow, ...]
    quantized: tuple[QuantizedWeights, ...]
    notes: tuple[str, ...]
    refusal: str | None
    draft: DraftPlan | None = None
    ranks: tuple[RankPlan, ...] = ()
    num_replicas: int = 1

    @property
    def total_bytes(self) -> int:
        """Weights, workspace and KV cache together, those of a draft model included."""
        own = self.weight_bytes + self.workspace_bytes + self.kv_cache_bytes
        return own + (self.draft.total_bytes if self.draft else 0)

    def num_users(self, context: int, dtype: str | None = None) -> int:
        """Users of one of `contexts` tokens that the pools hold at once, sharing no prefix."""
        name = self.kv_cache_dtype if dtype is None else dtype
        return self.num_replicas * users_at(self.rows, self.contexts, context, name)

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return {**dataclasses.asdict(self), "total_bytes": self.total_bytes}

    def __str__(self) -> str:
        parts = [self._summary(), text_table(*self._table())]
        if self.speed:
            parts.append(text_table(*_speed_table(self.speed)))
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        page = html_page(self._summary(), *self._table())
        return page + (html_page("", *_speed_table(self.speed)) if self.speed else "")

    def _summary(self) -> str:
        lines = [
            f"{self.architecture} in "
            + "".join(f"{name} and " for name in self.integers)
            + f"{self.dtype} on {self.device}, {self.num_threads} threads",
            *(f"quantized      {use}" for use in self.quantized),
            *(f"note           {note}" for note in self.notes),
            f"weights        {human_bytes(self.weight_bytes)}, of them "
            f"{human_bytes(self.mapped_bytes)} mapped from the file",
            *(
                f"  {group.name:<12} {human_bytes(group.num_bytes)}"
                for group in self.weights
                if group.num_bytes or group.name != "experts"
            ),
            f"workspace      {human_bytes(self.workspace_bytes)} for steps of "
            f"{self.max_num_batched_tokens} tokens",
            f"KV cache       {human_bytes(self.kv_cache_bytes)} in {self.kv_cache_dtype}: "
            + (f"{self.num_replicas} replicas with " if self.num_replicas > 1 else "")
            + f"{self.num_blocks} blocks of {self.block_size} tokens, by {self.pool_bound}",
            *(f"  {_describe(layers)}" for layers in self.kv_layers),
            *(
                [
                    f"draft          {human_bytes(self.draft.total_bytes)}: "
                    f"{self.draft.architecture} with weights of "
                    f"{human_bytes(self.draft.weight_bytes)}, workspace of "
                    f"{human_bytes(self.draft.workspace_bytes)} and a KV cache of "
                    f"{human_bytes(self.draft.kv_cache_bytes)}"
                ]
                if self.draft
                else []
            ),
            *(_describe_rank(i, rank) for i, rank in enumerate(self.ranks)),
            f"in all         {human_bytes(self.total_bytes)}",
            f"available      {human_bytes(self.available_bytes)} of "
            f"{human_bytes(self.total_memory_bytes)}"
            + (f", by {self.bounded_by}" if self.bounded_by else "")
            + (
                f", {human_bytes(self.reserved_bytes)} promised to other LLMs of this process"
                if self.reserved_bytes
                else ""
            ),
            f"a sequence     up to {self.max_model_len} tokens, "
            f"{human_bytes(self.sequence_bytes)}; "
            f"{self.max_num_seqs} at once" + (" in each replica" if self.num_replicas > 1 else ""),
        ]
        if self.refusal is not None:
            lines.append(f"does not fit   {self.refusal}")
        return "\n".join(lines)

    def _table(self) -> tuple[list[str], list[list[str]], str]:
        note = "* planned figures: llmserve does not run this KV dtype yet"
        return (*kv_table(self.rows, self.contexts), note)


def plan_memory(
    request: _core.ConfigRequest,
    contexts: Sequence[int] | None,
    bandwidth: float | None,
    flops: float | None,
) -> MemoryPlan:
    """The plan of what `request` asks for; see LLM.plan."""
    core = _core.plan_memory(request)
    config = core.config
    lengths = _resolve_contexts(contexts, config.scheduler.max_model_len)
    groups = core.weights["group_bytes"]
    return MemoryPlan(
        model=config.model_path,
        architecture=core.architecture,
        device=config.device,
        dtype=config.dtype,
        integers=tuple(core.weights["integers"]),
        quantized=tuple(QuantizedWeights(**use) for use in core.weights["quantized"]),
        notes=tuple(core.weights["notes"]),
        kv_cache_dtype=config.kv_cache_dtype,
        num_threads=config.num_threads,
        max_model_len=config.scheduler.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        weights=tuple(WeightGroup(name, size) for name, size in groups.items()),
        num_experts=core.weights["num_experts"],
        experts_per_token=core.weights["experts_per_token"],
        weight_bytes=core.weights["total_bytes"],
        mapped_bytes=core.weights["mapped_bytes"],
        workspace_bytes=core.workspace_bytes,
        kv_layers=_layer_kinds(core.cache_groups, config.kv_cache_dtype),
        kv_bytes_per_token=core.pool.bytes_per_token,
        kv_cache_bytes=core.kv_cache_bytes,
        block_size=core.pool.block_size,
        num_blocks=core.pool.num_blocks,
        num_tokens=core.pool.num_tokens,
        sequence_bytes=core.pool.sequence_bytes(config.scheduler.max_model_len),
        pool_bound=core.pool_bound,
        gpu_memory_utilization=core.memory_utilization,
        total_memory_bytes=core.machine.total_bytes,
        available_bytes=core.machine.available_bytes,
        reserved_bytes=core.machine.reserved_bytes,
        bounded_by=core.machine.bounded_by,
        contexts=lengths,
        rows=kv_rows(core.pool_by_dtype, lengths),
        speed=_speed(core, lengths, bandwidth, flops),
        refusal=core.refusal or None,
        draft=_draft(core) if core.draft_architecture else None,
        ranks=_ranks(core),
        num_replicas=config.parallel.data_parallel_size,
    )


def _draft(core: _core.MemoryPlan) -> DraftPlan:
    return DraftPlan(
        core.config.speculation.model,
        core.draft_architecture,
        core.draft_weight_bytes,
        core.draft_workspace_bytes,
        core.draft_kv_bytes,
    )


def _ranks(core: _core.MemoryPlan) -> tuple[RankPlan, ...]:
    """Of several, within a replica."""
    if len(core.ranks) == 1:
        return ()
    has_stages = core.config.parallel.pipeline_parallel_size > 1
    return tuple(
        RankPlan(
            rank.num_threads,
            rank.weight_bytes,
            rank.workspace_bytes,
            rank.kv_cache_bytes,
            (rank.first_layer, rank.first_layer + rank.num_layers) if has_stages else None,
        )
        for rank in core.ranks
    )


def _describe_rank(idx: int, rank: RankPlan) -> str:
    threads = "1 thread" if rank.num_threads == 1 else f"{rank.num_threads} threads"
    return (
        f"  {f'rank {idx}':<12} {human_bytes(rank.weight_bytes)} of weights, "
        f"{human_bytes(rank.workspace_bytes)} of workspace, "
        f"{human_bytes(rank.kv_cache_bytes)} of KV cache, {threads}"
        + (f", layers {rank.layers[0]} to {rank.layers[1] - 1}" if rank.layers else "")
    )


def _resolve_contexts(contexts: Sequence[int] | None, max_model_len: int) -> tuple[int, ...]:
    if contexts is not None:
        return tuple(integer("contexts", c, 1, max_model_len) for c in contexts)
    return (*(c for c in _DEFAULT_CONTEXTS if c < max_model_len), max_model_len)


def _layer_kinds(groups: Sequence[_core.CacheGroupSpec], dtype: str) -> tuple[KvLayers, ...]:
    def kind(group: _core.CacheGroupSpec) -> tuple[int, int, int, int]:
        return (group.num_kv_heads, group.key_dim, group.value_dim, group.window)

    rows = sorted((group for group in groups if group.state_bytes == 0), key=kind)
    return tuple(
        KvLayers(
            sum(group.num_layers for group in alike),
            *key,
            _core.kv_bytes_per_token(alike, dtype),
        )
        for key, alike in ((key, list(group)) for key, group in itertools.groupby(rows, kind))
    )


def _describe(layers: KvLayers) -> str:
    window = f", looking back {layers.window} tokens" if layers.window else ""
    return (
        f"{layers.bytes_per_token} bytes a token in {layers.num_layers} layers of "
        f"{layers.num_kv_heads} KV heads, keys of {layers.key_dim}, values of {layers.value_dim}"
        f"{window}"
    )


def _speed(
    core: _core.MemoryPlan, contexts: Sequence[int], bandwidth: float | None, flops: float | None
) -> tuple[SpeedRow, ...]:
    if bandwidth is None:
        if flops is not None:
            raise InvalidArgument("an estimate of speed needs a bandwidth beside flops")
        return ()
    # On GPUs replicas have a copy of the weights each.
    config = core.config
    copies = config.parallel.data_parallel_size if config.device == "cuda" else 1
    read_bytes = sum(core.weights["group_bytes"][name] for name in _READ_GROUPS) // copies
    expert_bytes = core.weights["group_bytes"]["experts"] // copies
    experts, each = core.weights["num_experts"], core.weights["experts_per_token"]

    def read_by(tokens: int) -> float:
        """Bytes of a step of so many users, whose experts are drawn evenly."""
        share = active_experts(experts, each, tokens) / experts if experts else 0.0
        return float(read_bytes + share * expert_bytes)

    num_params = read_by(1) / (2 if config.dtype == "bfloat16" else 4)
    prefill = None if flops is None else prefill_tokens_per_s(num_params, flops)
    rows = []
    for context in contexts:
        batch = min(core.pool.num_users(context), config.scheduler.max_num_seqs)
        kv_bytes = context * core.pool.bytes_per_token
        one = decode_tokens_per_s(read_by(1), bandwidth, 1, kv_bytes)
        every = decode_tokens_per_s(read_by(batch), bandwidth, batch, kv_bytes) if batch else 0.0
        if prefill is not None:  # a decoded token takes the same arithmetic
            one, every = min(one, prefill), min(every, prefill)
        rows.append(SpeedRow(context, batch, one, every, prefill))
    return tuple(rows)


def _speed_table(rows: Sequence[SpeedRow]) -> tuple[list[str], list[list[str]], str]:
    head = ["at most, at context", "users", "tok/s each alone", "tok/s all", "prompt tok/s"]
    body = [
        [
            str(row.context),
            str(row.batch),
            f"{row.one_user_tokens_per_s:.1f}",
            f"{row.all_users_tokens_per_s:.1f}",
            "-" if row.prefill_tokens_per_s is None else f"{row.prefill_tokens_per_s:.0f}",
        ]
        for row in rows
    ]
    return head, body, ""
