"""Steps the real scheduler by hand, with a model whose every output is known in advance."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from llmserve import _core
from llmserve import _core_testing as testing
from llmserve._core import Scheduler, TokenEvent

VOCAB_SIZE = 1000
GONE = -1  # in a block table: the block has left its group's window


@dataclass(slots=True)
class Output:
    """What one sequence of a request got."""

    token_ids: list[int] = field(default_factory=list)
    text: bytes = b""
    finish_reason: str = ""
    events: list[TokenEvent] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Step:
    """What is kept of a plan: (request, sample, start, tokens) a sequence, and its decisions."""

    sequences: list[tuple[int, int, int, int]]
    num_tokens: int
    num_prefill_tokens: int
    num_logit_rows: int
    copies: list[tuple[int, int]]
    decisions: list[tuple[int, int, str, int]]


def make_scheduler(
    *,
    num_blocks: int,
    block_size: int = 16,
    enable_prefix_caching: bool = True,
    bytes_by_id: list[bytes] | None = None,
    special_token_ids: list[int] | None = None,
    forge_collisions: bool = False,
    is_fair: bool = False,
    windows: list[int] | None = None,
    max_in_flight: int = 1,
    runs_ahead: bool = True,
    **fields: Any,
) -> Scheduler:
    cache = _core.CacheConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
        groups=[_core.CacheGroupSpec(window=window) for window in windows or [0]],
    )
    config = _core.SchedulerConfig(**{"max_model_len": 1024, **fields})
    if forge_collisions:
        return testing.forged_scheduler(config, cache)
    if is_fair:
        return testing.fair_scheduler(config, cache, max_in_flight)
    vocabulary = None
    if bytes_by_id is not None:
        vocabulary = _core.Vocabulary(bytes_by_id, special_token_ids or [])
    return Scheduler(config, cache, vocabulary, max_in_flight, runs_ahead)


def add_request(scheduler: Scheduler, request_id: int, prompt: list[int], **fields: Any) -> None:
    """`fields` are those of a request and of its sampling parameters."""
    request = {
        name: fields.pop(name)
        for name in ("priority", "cache_salt", "is_streamed")
        if name in fields
    }
    kinds = (
        "is_pooled",
        "has_embeds",
        "resumed_token_ids",
        "has_drafter",
        "awaits_grammar",
        "tenant",
        "adapter",
        "receive_from",
        "send_to",
    )
    kind = {name: fields.pop(name) for name in kinds if name in fields}
    beams = {name: fields.pop(name) for name in ("beam_width", "length_penalty") if name in fields}
    if beams.get("beam_width"):
        kind["beam_search"] = _core.BeamSearchParams(**beams)
    if any(kind.values()):
        params = _core.SamplingParams(**fields)
        return testing.add_request(scheduler, request_id, prompt, params, **kind, **request)
    scheduler.add(request_id, prompt, _core.SamplingParams(**fields), **request)


class Runner:
    """A scheduler and a shadow model; `outputs[request_id, sample_index]` grows with each step.

    With two steps in flight, each is carried out as it is scheduled and committed after the next.
    """

    def __init__(self, *, num_blocks: int, block_size: int = 4, **config: Any) -> None:
        config.setdefault("max_num_seqs", 8)
        config.setdefault("max_num_batched_tokens", 64)
        self.us_per_token = config.pop("us_per_token", 0)
        self.scheduler = make_scheduler(num_blocks=num_blocks, block_size=block_size, **config)
        windows = config.get("windows") or [0]
        self.model = testing.ShadowModel(num_blocks, block_size, VOCAB_SIZE, windows)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_ahead = config.get("max_in_flight", 1) - 1
        self.flights: deque[_core.SampledTokens] = deque()
        self.outputs: dict[tuple[int, int], Output] = {}
        self.finished_requests: list[int] = []
        self.transfers: list[testing.Transfer] = []  # of all plans

    def add(self, request_id: int, prompt: list[int], **params: Any) -> None:
        add_request(self.scheduler, request_id, prompt, **params)

    def step(self) -> Step:
        plan = self.scheduler.schedule()
        self.transfers += testing.transfers(plan)
        step = Step(
            [
                (s.request_id, s.sample_index, s.start_position, s.num_tokens)
                for s in plan.sequences
            ],
            plan.num_tokens,
            plan.num_prefill_tokens,
            len(plan.logit_rows),
            plan.copies,
            [(d.request_id, d.sample_index, d.kind, d.detail) for d in plan.decisions],
        )
        self.scheduler.advance_us(self.us_per_token * plan.num_tokens)
        self.flights.append(self.model.execute(plan))
        self.finish_steps(self.num_ahead if plan.sequences else 0)
        return step

    def finish_steps(self, num_left: int = 0) -> None:
        while len(self.flights) > num_left:
            self.take(self.scheduler.commit(self.flights.popleft()))

    def take(self, events: list[TokenEvent]) -> None:
        for event in events:
            output = self.outputs.setdefault((event.request_id, event.sample_index), Output())
            assert output.finish_reason == "", "no event follows the last one"
            output.token_ids += event.token_ids
            output.text += event.text.encode()
            output.finish_reason = event.finish_reason or ""
            output.events.append(event)
            if event.is_request_finished:
                assert event.request_id not in self.finished_requests
                self.finished_requests.append(event.request_id)

    def run(self, max_steps: int = 10_000) -> list[Step]:
        """Steps until all have finished; a scheduler that makes no progress fails the test."""
        steps = []
        while self.scheduler.has_unfinished():
            assert len(steps) < max_steps, "the workload does not end"
            steps.append(self.step())
        return steps

    def check(self) -> None:
        """The scheduler's own check, and reference counts against a count of the holders."""
        self.scheduler.check_integrity()
        if self.flights:  # they hold blocks of sequences that have ended
            return
        held = Counter(
            block
            for sequence in self.scheduler.sequences()
            for table in sequence.block_tables
            for block in table
            if block != GONE
        )
        assert all(self.scheduler.ref_count(b) == held[b] for b in range(self.num_blocks))
        metrics = self.scheduler.metrics()
        assert metrics.num_blocks_used == len(held)
        assert metrics.num_blocks_free + metrics.num_blocks_cached + len(held) == self.num_blocks

    def tokens(self, request_id: int, sample_index: int = 0) -> list[int]:
        return self.outputs[request_id, sample_index].token_ids


def expected_tokens(
    prompt: list[int], num_tokens: int, *, seed: int = 0, sample_index: int = 0
) -> list[int]:
    """What the shadow model generates after a prompt, whatever company it keeps."""
    sample_seed = testing.sample_seed(seed, sample_index)
    return testing.ShadowModel.expected(prompt, sample_seed, VOCAB_SIZE, num_tokens)


def tuples(entries: list[_core.TokenLogprob]) -> list[tuple[int, float, int]]:
    return [(entry.token_id, entry.logprob, entry.rank) for entry in entries]


def random_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


def pareto_length(rng: random.Random, *, shape: float = 1.5, scale: float = 20, cap: int) -> int:
    """Pareto(shape, scale): at least `scale`, a heavy tail, cut at `cap`."""
    return min(cap, int(rng.paretovariate(shape) * scale))
