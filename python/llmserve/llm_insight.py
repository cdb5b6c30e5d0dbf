"""What `LLM` and `AsyncLLM` tell of what their engine has done and holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmserve import _core
from llmserve.common.arguments import INT64_MAX, integer, optional_integer

if TYPE_CHECKING:
    from llmserve.insight.trace import Trace


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One of the engines of an LLM, and where its router stands with it. num_routed and
    num_hit_tokens: requests that it was given since the start, and tokens of their prompts that it
    was thought to have in its prefix cache. num_taken_over: requests that it goes on with, since
    another one could not execute them. failure: why it has stopped, None while it runs."""

    replica: int
    metrics: _core.EngineMetrics
    failure: str | None
    num_routed: int
    num_hit_tokens: int
    num_taken_over: int


class EngineInsight:
    """Of one engine, or of several replicas together."""

    _config: _core.EngineConfig

    def _open_engine(self) -> _core.Engine:
        raise NotImplementedError

    def _request_names(self) -> Mapping[str, int]:
        """The engine's ids of requests that their users gave a name."""
        return {}

    @property
    def num_replicas(self) -> int:
        """Engines that run the model: data_parallel_size."""
        return self._config.parallel.data_parallel_size

    def stood_still_s(self) -> list[float]:
        """Of each replica, for how many seconds its thread has stood still in the midst of a step,
        where that is longer than any step takes; otherwise 0. When it does not come back within ten
        seconds its requests end with an error, and `failure` says why."""
        return self._open_engine().stood_still_s

    def replicas(self) -> list[ReplicaState]:
        """Each of several replicas: its own counters, and what it was given. Empty of one engine,
        whose counters are those of `get_metrics`.

        >>> from llmserve import LLM, demo_model_path
        >>> with LLM(demo_model_path(), data_parallel_size=2) as llm:
        ...     outputs = llm.generate(["The fox", "The dog"], use_tqdm=False)
        ...     [replica.num_routed for replica in llm.replicas()]
        [1, 1]
        """
        engine = self._open_engine()
        return [
            ReplicaState(
                idx,
                engine.replica_metrics(idx),
                engine.replica_failure(idx) or None,
                load.num_routed,
                load.num_hit_tokens,
                engine.replica_taken_over(idx),
            )
            for idx, load in enumerate(engine.loads())
        ]

    def expert_loads(self) -> dict[int, list[int]]:
        """Rows that each expert was given since the start, by layer; empty without
        `count_expert_loads`. `llmserve.plan.load_balance` says how even they are."""
        return self._open_engine().expert_loads

    def expert_rank_rows(self) -> dict[int, list[int]]:
        """Rows of experts that each rank has run since the start, by layer; empty without
        `enable_eplb`. `llmserve.plan.load_balance` says how even they are."""
        return self._open_engine().expert_rank_rows

    def block_snapshot(self, replica: int | None = None) -> tuple[int, bytes]:
        """The blocks that the prefix cache holds, for who routes by prefixes: their chained hashes,
        32 bytes each, and the number of the last batch of events before. From then on
        `block_events` tells what changes. replica: of several the one whose cache is asked for;
        None: all together."""
        return self._open_engine().block_snapshot(self._replica(replica))

    def block_events(
        self, after: int, replica: int | None = None
    ) -> list[tuple[int, list[tuple[str, bytes]]]] | None:
        """The batches after this number, in order: (number, [("stored", "removed" or "cleared",
        hashes)]). None where some are not kept any more: `block_snapshot` starts anew."""
        engine = self._open_engine()
        return engine.block_events(integer("after", after, 0, INT64_MAX), self._replica(replica))

    def _replica(self, replica: object) -> int | None:
        return optional_integer("replica", replica, 0, self.num_replicas - 1)

    def trace(self) -> "Trace":
        """The last few thousand steps and requests: what each step ran, why each sequence ran or
        waited, and how long the phases took."""
        from llmserve.insight.trace import Trace  # which no start needs

        engine = self._open_engine()
        steps, requests = engine.trace(), engine.request_records()
        num_blocks, names = self._config.cache.num_blocks, self._request_names()
        return Trace(steps, requests, num_blocks, names, engine.exchanges())
