"""A request on its way: the events of the engine gathered into outputs."""

import math
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from llmserve import _core
from llmserve.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from llmserve.requests.blocks_of import BlocksOf
from llmserve.requests.prompt_parser import Prompt
from llmserve.sampling_params import RequestOutputKind, SamplingParams
from llmserve.tokenization.tokenizer import Tokenizer

# A dict a token, the prompt's own token first; None for the first of all.
PromptLogprobs = Iterable[dict[int, Logprob] | None]

# The epoch on the engine's clock, which is that of time.monotonic.
_EPOCH_US = time.monotonic_ns() // 1000 - time.time_ns() // 1000


@dataclass(slots=True)
class SampleState:
    """One of a request's n continuations so far."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    # What logprobs are to be made of, when an output is or by make_rows(): they take several times
    # the memory, and longer than an event loop that applies events may stand still.
    unmade: list[_core.TokenEvent] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    last: _core.TokenEvent | None = None
    # What a DELTA output has given already.
    num_given_texts: int = 0
    num_given_tokens: int = 0
    has_news: bool = False


class RequestState:
    """One request: what went in, and what has come out."""

    # What a request may want instead of sampled tokens.
    pooling: _core.PoolingParams | None = None
    beam_search: _core.BeamSearchParams | None = None

    def __init__(
        self,
        prompt: Prompt,
        params: SamplingParams,
        core_params: _core.SamplingParams,
        priority: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.prompt = prompt
        self.params = params
        self.asked = params  # by its user, where what runs for it differs
        self.core_params = core_params  # of all requests of a call with these parameters
        self.priority = priority
        self.processors = tuple(params.logits_processors or ())
        self.engine_request: _core.EngineRequest | None = None  # that was checked, until it goes in
        self.request_id = -1  # the engine gives it
        self.name = ""  # as its user knows it; empty: by the engine's id
        self.is_finished = False
        self._tokenizer = tokenizer
        self._arrival_us = time.monotonic_ns() // 1000
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._prompt_event: _core.TokenEvent | None = None  # which has what they are made of
        self._samples = [SampleState(index) for index in range(params.n)]
        self._making = threading.Lock()  # held while rows are made, in the order of their events
        self._last: _core.TokenEvent | None = None
        self._num_cached_tokens = 0
        self._num_preemptions = 0
        self._is_cut_short = False
        self._resumed_token_ids: Sequence[int] = ()
        self.blocks_of = BlocksOf()  # set before the request goes in

    def resume(self, token_ids: Sequence[int], text: str) -> None:
        """Goes on after tokens that were generated, and given out with this text, before; they have
        no log-probabilities. Before the request goes in."""
        (sample,) = self._samples
        self._resumed_token_ids = token_ids
        sample.token_ids += token_ids
        sample.texts.append(text)
        sample.num_given_texts = len(sample.texts)
        sample.num_given_tokens = len(sample.token_ids)
        if self.params.has_logprobs:  # what they were is known to who has them
            sample.logprobs += [self._unknown_logprob(token_id) for token_id in token_ids]

    def given_before(self) -> CompletionOutput | None:
        """What was given out before, of a request that goes on."""
        if not self._resumed_token_ids:
            return None
        ids, text = list(self._resumed_token_ids), self._samples[0].texts[0]
        rows = list(map(self._unknown_logprob, ids)) if self.params.has_logprobs else None
        return CompletionOutput(0, text, ids, None, rows)

    def _unknown_logprob(self, token_id: int) -> dict[int, Logprob]:
        text = None if self._tokenizer is None else self._tokenizer.token_text(token_id)
        return {token_id: Logprob(math.nan, None, text)}

    def to_core(self) -> _core.EngineRequest:
        """What the engine takes for it. Raises InvalidArgument for ids beyond 32 bits."""
        prompt = self.prompt
        return _core.EngineRequest(
            prompt.token_ids,
            self.core_params,
            self.priority,
            prompt.cache_salt,
            prompt_embeds=prompt.embeds,
            pooling=self.pooling,
            beam_search=self.beam_search,
            resumed_token_ids=self._resumed_token_ids,
            send_to=self.blocks_of.send_to,
            receive_from=self.blocks_of.receive_from,
        )

    def renewed(self) -> "RequestState":
        """The same request, before anything came out."""
        state = type(self)(
            self.prompt, self.asked, self.core_params, self.priority, self._tokenizer
        )
        state.request_id, state.name = self.request_id, self.name
        state.processors = self.processors
        state._arrival_us = self._arrival_us
        if (given := self.given_before()) is not None:
            state.resume(given.token_ids, given.text)
        return state

    @property
    def num_returned(self) -> int:
        """Continuations that come out."""
        return self.params.n

    @property
    def num_generation_tokens(self) -> int:
        """Over all n."""
        return sum(len(sample.token_ids) for sample in self._samples)

    @property
    def max_num_sample_tokens(self) -> int:
        """Of the longest of the n."""
        return max(len(sample.token_ids) for sample in self._samples)

    @property
    def error(self) -> str | None:
        """What went wrong with one of its samples, if anything did."""
        errors = (sample.last.error for sample in self._samples if sample.last)
        return next(filter(None, errors), None)

    @property
    def has_news(self) -> bool:
        """Whether something came since the last DELTA output."""
        return any(sample.has_news for sample in self._samples)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that came since the last DELTA output, over all n."""
        return sum(len(sample.token_ids) - sample.num_given_tokens for sample in self._samples)

    @property
    def pending_text(self) -> str:
        """The text of those."""
        return "".join(
            text for sample in self._samples for text in sample.texts[sample.num_given_texts :]
        )

    def apply(self, event: _core.TokenEvent) -> None:
        """Adds an event of this request."""
        sample = self._samples[event.sample_index]
        if event.text:
            sample.texts.append(event.text)
        token_ids = event.token_ids
        sample.token_ids += token_ids
        if self.params.has_logprobs:
            sample.unmade.append(event)
        if self.params.prompt_logprobs is not None and not self.has_prompt_rows:
            self._note_prompt_rows(event, token_ids)
        sample.last = self._last = event
        sample.has_news = True
        self.is_finished = event.is_request_finished
        # Of the prompt: where it goes on after tokens, these may be cached, too.
        num_cached = min(event.num_cached_tokens, len(self.prompt.token_ids))
        self._num_cached_tokens = max(self._num_cached_tokens, num_cached)
        self._num_preemptions = max(self._num_preemptions, event.num_preemptions)

    def cut_short(self) -> None:
        """Nothing more comes, of whatever the engine may still do: its samples that have not ended
        have been aborted."""
        self.is_finished = self._is_cut_short = True
        for sample in self._samples:
            sample.has_news = True

    def note_given(self, sample_index: int, token_ids: list[int]) -> None:
        """Instead of `apply`, where nothing is pending and the text went to the reader at once."""
        sample = self._samples[sample_index]
        sample.token_ids += token_ids
        sample.num_given_tokens = len(sample.token_ids)

    def output(self, kind: RequestOutputKind = RequestOutputKind.CUMULATIVE) -> RequestOutput:
        """Everything so far or, for DELTA, what is new since the last call, of those of the n
        that have something new."""
        is_delta = kind is RequestOutputKind.DELTA
        return RequestOutput(
            request_id=self.name or str(self.request_id),
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            prompt_logprobs=self.prompt_logprobs,
            outputs=self.take_news() if is_delta else self.completions(),
            finished=self.is_finished,
            metrics=self._metrics(),
            num_cached_tokens=self._num_cached_tokens,
        )

    def take_news(self) -> list[CompletionOutput]:
        """What a DELTA output has in `outputs`, without what is around it: what a server makes a
        line of for every token."""
        return [self._completion(sample, True) for sample in self._samples if sample.has_news]

    def take_news_apart(self) -> list[CompletionOutput]:
        """Likewise, but a sample's first token is an output of its own where others have come with
        it, and its text can be told from theirs."""
        news: list[CompletionOutput] = []
        for sample in self._samples:
            if not sample.has_news:
                continue
            is_first = not sample.num_given_tokens
            completion = self._completion(sample, True)
            news += self._apart(completion) if is_first else (completion,)
        return news

    def completions(self) -> list[CompletionOutput]:
        """Likewise, of a CUMULATIVE output."""
        return [self._completion(sample, False) for sample in self._samples]

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were read from the prefix cache."""
        return self._num_cached_tokens

    @property
    def num_unmade_rows(self) -> int:
        """Tokens whose log-probabilities are still to be made, at 2 us each of these."""
        num_rows = 0
        if self._prompt_event is not None and self._prompt_logprobs is None:
            num_rows += len(self.prompt.token_ids)
        if self.params.has_logprobs:
            num_rows += sum(len(s.token_ids) - len(s.logprobs) for s in self._samples)
        return num_rows

    def make_rows(self) -> None:
        """Makes the log-probabilities that have come. On any thread, also while events are applied;
        an output that is made meanwhile waits."""
        for sample in self._samples:
            self._make_logprobs(sample)
        _ = self.prompt_logprobs

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """As RequestOutput has them."""
        if self._prompt_logprobs is None and (rows := self.prompt_rows()) is not None:
            self._prompt_logprobs = list(rows)
            self._prompt_event = None
        return self._prompt_logprobs

    @property
    def has_prompt_rows(self) -> bool:
        """Whether the prompt's log-probabilities were asked for and have come."""
        return self._prompt_event is not None or self._prompt_logprobs is not None

    def prompt_rows(self) -> PromptLogprobs | None:
        """`prompt_logprobs`, of which nothing is kept: each row is made when it is read."""
        event = self._prompt_event
        if event is None:
            return self._prompt_logprobs
        rows = event.prompt_logprobs
        if len(rows) + 1 != len(self.prompt.token_ids):
            return None
        return chain((None,), map(self._logprob_dict, rows, event.prompt_top_logprobs))

    def _note_prompt_rows(self, event: _core.TokenEvent, token_ids: list[int]) -> None:
        """They come with the first token of the first sample."""
        if event.sample_index == 0 and token_ids:
            self._prompt_event = event

    def _make_logprobs(self, sample: SampleState) -> None:
        with self._making:
            while sample.unmade:
                event = sample.unmade.pop(0)  # at once, whatever another thread adds
                for sampled, top in zip(event.logprobs, event.top_logprobs, strict=True):
                    sample.cumulative_logprob += sampled.logprob
                    sample.logprobs.append(self._logprob_dict(sampled, top))

    def _apart(self, completion: CompletionOutput) -> tuple[CompletionOutput, ...]:
        """A sample's first output, in two where that can be."""
        ids, text, rows = completion.token_ids, completion.text, completion.logprobs
        if len(ids) < 2 or self._tokenizer is None:
            return (completion,)
        begin = self._tokenizer.token_text(ids[0])
        if not begin or not text.startswith(begin):
            return (completion,)
        first = replace(
            completion,
            text=begin,
            token_ids=ids[:1],
            logprobs=rows and rows[:1],
            finish_reason=None,
            stop_reason=None,
            error=None,
        )
        rest = replace(
            completion, text=text[len(begin) :], token_ids=ids[1:], logprobs=rows and rows[1:]
        )
        return first, rest

    def _completion(self, sample: SampleState, is_delta: bool) -> CompletionOutput:
        first_text = sample.num_given_texts if is_delta else 0
        first_token = sample.num_given_tokens if is_delta else 0
        sample.num_given_texts = len(sample.texts)
        sample.num_given_tokens = len(sample.token_ids)
        sample.has_news = False
        has_logprobs = self.params.has_logprobs
        if has_logprobs:
            self._make_logprobs(sample)
        last = sample.last
        finish_reason = last.finish_reason if last else None
        if finish_reason is None and self._is_cut_short:
            finish_reason = "abort"
        return CompletionOutput(
            index=sample.index,
            text="".join(sample.texts[first_text:]),
            token_ids=sample.token_ids[first_token:],
            cumulative_logprob=sample.cumulative_logprob if has_logprobs else None,
            logprobs=sample.logprobs[first_token:] if has_logprobs else None,
            finish_reason=finish_reason,
            stop_reason=self._stop_reason(last) if last else None,
            error=(last.error or None) if last else None,
            seed=last.seed if last else None,
        )

    def _stop_reason(self, event: _core.TokenEvent) -> int | str | None:
        """None for the model's own end of sequence, as users of vLLM expect."""
        reason = event.stop_reason
        if isinstance(reason, int) and reason not in (self.params.stop_token_ids or ()):
            return None
        return reason

    def _logprob_dict(
        self, sampled: _core.TokenLogprob, top: list[_core.TokenLogprob]
    ) -> dict[int, Logprob]:
        return {token.token_id: self.to_logprob(token) for token in (sampled, *top)}

    def to_logprob(self, token: _core.TokenLogprob) -> Logprob:
        """The record that users see."""
        text = None if self._tokenizer is None else self._tokenizer.token_text(token.token_id)
        return Logprob(token.logprob, token.rank, text)

    @property
    def num_draft_tokens(self) -> int:
        """Guesses that were run, of all samples."""
        return sum(s.last.num_draft_tokens for s in self._samples if s.last)

    @property
    def num_accepted_tokens(self) -> int:
        """Of them, those that were right."""
        return sum(s.last.num_accepted_tokens for s in self._samples if s.last)

    def _metrics(self) -> RequestMetrics:
        arrival_time = _epoch_seconds(self._arrival_us)
        if self._last is None:
            return RequestMetrics(arrival_time, 0.0, 0.0, 0.0, 0.0, 0, 0)
        times = self._last.times
        return RequestMetrics(
            arrival_time=arrival_time,
            queued_ts=_epoch_seconds(times.arrival_us),
            scheduled_ts=_epoch_seconds(times.scheduled_us),
            first_token_ts=_epoch_seconds(times.first_token_us),
            last_token_ts=_epoch_seconds(times.last_token_us),
            num_preemptions=self._num_preemptions,
            num_generation_tokens=self.num_generation_tokens,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
        )


def _epoch_seconds(engine_us: int) -> float:
    return (engine_us - _EPOCH_US) / 1e6 if engine_us > 0 else 0.0
