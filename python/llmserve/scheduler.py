"""The engine's scheduler by itself, for teaching, research and simulation."""

from collections.abc import Iterable, Sequence

from llmserve import _core
from llmserve.common.arguments import boolean, describe, integer, text
from llmserve.errors import InvalidArgument
from llmserve.sampling_params import SamplingParams
from llmserve.tokenization.tokenizer import Tokenizer


class Scheduler(_core.Scheduler):
    """Decides what each step of an engine runs: the C++ code that serves requests, without a model.

    ``schedule()`` gives a StepPlan: ``sequences`` (request_id, token_ids, start_position,
    block_table, is_prefill), ``copies`` of blocks to make first, ``logit_rows`` that each want a
    token, and ``decisions`` that say of every sequence why it runs or waits. ``commit()`` takes one
    token id a logit row and returns the TokenEvents. The two alternate. In between: ``add``,
    ``abort``, ``preempt``; ``sequences()``, ``metrics()``, ``ref_count(block)`` to look at it.

    Time stands still but for ``advance_us``: ``now_us`` says what it is, ``wake_us()`` when an
    empty plan may no longer be empty. Not thread-safe.

    num_blocks, block_size: the KV pool. policy: "fcfs", "priority", and to compare with "static"
    and "dynamic" batching (which waits for others max_batch_delay_us at most, and down to a fifth
    of it as batches come out full). max_num_batched_tokens: tokens a step. max_num_seqs: sequences
    a step. max_stall_us: while sequences decode, a step takes what runs in this time at the rate of
    the last steps with prompts; 0 is no bound. min_spread_tokens: while sequences decode, a step
    takes more tokens than that (twice that, and so on, where so few run slowly) only where a prompt
    has to run for its request to end with the others, if each generates its max_tokens; 0: prompts
    run as soon as they may, as those that are streamed do. max_num_queued_reqs: 0 is no bound.
    max_model_len: by default what the pool holds. tokenizer: with one, events have text and `stop`
    works.

    >>> from llmserve import SamplingParams, Scheduler
    >>> scheduler = Scheduler(num_blocks=8, block_size=4)
    >>> scheduler.add(0, [5, 6, 7, 8, 9], SamplingParams(max_tokens=2))
    >>> plan = scheduler.schedule()
    >>> [(s.request_id, s.token_ids, len(s.block_table)) for s in plan.sequences]
    [(0, [5, 6, 7, 8, 9], 2)]
    >>> [event.token_ids for event in scheduler.commit([1])]
    [[1]]
    >>> scheduler.schedule().sequences[0].token_ids, scheduler.commit([2])[0].finish_reason
    ([1], 'length')
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        policy: str = "fcfs",
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        max_num_queued_reqs: int = 0,
        max_model_len: int | None = None,
        enable_chunked_prefill: bool = True,
        enable_prefix_caching: bool = True,
        max_stall_us: int = 0,
        min_spread_tokens: int = 0,
        max_batch_delay_us: int = 10_000,
        eos_token_ids: Sequence[int] = (),
        tokenizer: Tokenizer | None = None,
    ) -> None:
        cache = _core.CacheConfig(
            num_blocks=integer("num_blocks", num_blocks, 1),
            block_size=integer("block_size", block_size, 1),
            enable_prefix_caching=boolean("enable_prefix_caching", enable_prefix_caching),
        )
        pool = max(2, cache.num_blocks * cache.block_size)
        config = _core.SchedulerConfig(
            policy=text("policy", policy),
            max_num_seqs=integer("max_num_seqs", max_num_seqs, 1),
            max_num_batched_tokens=integer("max_num_batched_tokens", max_num_batched_tokens, 1),
            max_num_queued_reqs=integer("max_num_queued_reqs", max_num_queued_reqs, 0),
            max_model_len=(
                pool if max_model_len is None else integer("max_model_len", max_model_len, 2)
            ),
            enable_chunked_prefill=boolean("enable_chunked_prefill", enable_chunked_prefill),
            max_stall_us=integer("max_stall_us", max_stall_us, 0),
            min_spread_tokens=integer("min_spread_tokens", min_spread_tokens, 0),
            max_batch_delay_us=integer("max_batch_delay_us", max_batch_delay_us, 0),
            eos_token_ids=[integer("eos_token_ids", token_id, 0) for token_id in eos_token_ids],
        )
        self._max_model_len = config.max_model_len
        super().__init__(config, cache, None if tokenizer is None else tokenizer.to_core())

    def add(
        self,
        request_id: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | _core.SamplingParams | None = None,
        priority: int = 0,
        cache_salt: str = "",
        is_streamed: bool = True,
    ) -> None:
        """Queues a request that arrives now. A seed of None is 0. is_streamed: False for one event,
        at the end, as a request of LLM.generate has.

        Raises InvalidArgument for an id in use or a prompt that can never run, ResourceExhausted
        for a full queue or a pool smaller than the prompt.
        """
        if params is None:
            params = SamplingParams()
        if isinstance(params, SamplingParams):
            params = params.to_core(max_tokens=self._max_model_len)
        elif not isinstance(params, _core.SamplingParams):
            raise InvalidArgument(f"params must be SamplingParams, got {describe(params)}")
        super().add(
            integer("request_id", request_id, -(2**63), 2**63 - 1),
            [integer("prompt_token_ids", token_id, 0) for token_id in prompt_token_ids],
            params,
            integer("priority", priority, -(2**31)),
            text("cache_salt", cache_salt),
            boolean("is_streamed", is_streamed),
        )

    def commit(self, sampled: _core.SampledTokens | Iterable[int]) -> list[_core.TokenEvent]:
        """Takes one token id for each of the plan's logit_rows, in order: a list or an array, or
        SampledTokens for log-probabilities and rows that are not valid. Returns the events.

        Raises InvalidArgument, with nothing changed, for another number of tokens.
        """
        if not isinstance(sampled, _core.SampledTokens):
            sampled = [integer("commit", token_id, 0) for token_id in sampled]
        return super().commit(sampled)
