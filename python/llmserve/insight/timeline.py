"""What a request did at every moment of its life, and why: read from the engine's trace."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType

from llmserve import _core

# Why a sequence was not in a step, by the kind of its decision; {} is the decision's detail.
_WAITS = {
    "waits_for_budget": "the step's tokens were taken (max_num_batched_tokens)",
    "waits_for_pace": "others decoded, and the step was full (max_stall_ms)",
    "waits_to_spread": "it had time: others generate for longer, and such prompts are spread",
    "waits_for_seqs": "all seats were taken (max_num_seqs, or fewer after a step that failed)",
    "waits_for_blocks": "the KV pool lacked {} blocks",
    "waits_for_prefix": "request {} was computing the next blocks of its prompt",
    "waits_for_batch": "the policy was filling a batch",
    "waits_for_beams": "it had its candidates, and other beams of its request had not",
    "waits_for_step": "what it runs next depended on a step that was under way",
    "preempted": "the KV pool was full: it gave {} blocks back, to be recomputed",
}
# What holds up those who stand behind it in the queue; the others are passed over.
_BLOCKING = (
    "waits_for_budget",
    "waits_for_pace",
    "waits_to_spread",
    "waits_for_seqs",
    "waits_for_blocks",
    "waits_for_batch",
)

# A request is in the scheduler for no longer than this before a step begins.
_MAX_INTAKE_US = 10_000


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a request's life. Times are on the engine's clock, in microseconds."""

    start_us: int
    end_us: int
    activity: str  # "waiting", "prefill" or "decode"
    reason: str  # of a wait; else what ran
    steps: tuple[int, ...]  # ids of its first and its last; empty before any

    @property
    def duration_us(self) -> int:
        """Its length."""
        return self.end_us - self.start_us


@dataclass(frozen=True, slots=True)
class _Decision:
    request_id: int
    kind: str
    detail: int


class _Step:
    """A record with its decisions sorted out, once for all requests."""

    def __init__(self, record: _core.StepRecord, names: Mapping[int, str]) -> None:
        self.step_id = record.step_id
        self.start_us = record.start_us
        elapsed_us = record.draft_us + record.schedule_us + record.execute_us + record.commit_us
        self.end_us = record.start_us + elapsed_us
        self.num_prefill_tokens = record.num_prefill_tokens
        self.by_request: dict[int, list[_Decision]] = {}
        # Why those waited of whom nothing was said: they stood behind somebody.
        self.queue_reason = "nothing was said of it"
        for item in record.decisions:
            decision = _Decision(item.request_id, item.kind, item.detail)
            self.by_request.setdefault(decision.request_id, []).append(decision)
            name = names.get(decision.request_id, decision.request_id)
            if decision.kind == "preempted":
                self.queue_reason = (
                    f"request {name} was preempted, and in such a step nobody is admitted"
                )
            elif decision.kind in _BLOCKING:
                why = _reason(decision, names)
                self.queue_reason = f"behind request {name} in the queue: {why}"


def _reason(decision: _Decision, names: Mapping[int, str]) -> str:
    """Of a wait."""
    detail: int | str = decision.detail
    if decision.kind == "waits_for_prefix":  # the detail is a request
        detail = names.get(decision.detail, detail)
    return _WAITS[decision.kind].format(detail)


class Timelines:
    """The lives of the requests of a trace."""

    def __init__(
        self, steps: Sequence[_core.StepRecord], names: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        """names: of requests, for the reasons of others; those without are named by their id."""
        self._names = names
        self._steps = [_Step(step, names) for step in steps]
        self._starts = [step.start_us for step in self._steps]
        self._decided: dict[int, list[int]] = {}  # by request: the steps that decided on it
        for idx, step in enumerate(self._steps):
            for request_id in step.by_request:
                self._decided.setdefault(request_id, []).append(idx)
        # By step: the first one after it whose queue waits for something else.
        self._next_reason = list(range(1, len(self._steps) + 1))
        for idx in range(len(self._steps) - 2, -1, -1):
            if self._steps[idx].queue_reason == self._steps[idx + 1].queue_reason:
                self._next_reason[idx] = self._next_reason[idx + 1]

    def of(self, request: _core.RequestRecord) -> list[Span]:
        """From arrival to end without a gap: waits with their reasons, and what ran. The end of a
        request that has none yet is that of the last step."""
        spans: list[Span] = []
        for span in self._pieces(request):
            if spans and (spans[-1].activity, spans[-1].reason) == (span.activity, span.reason):
                steps = (*spans[-1].steps, *span.steps)
                span = replace(span, start_us=spans[-1].start_us, steps=(steps[0], steps[-1]))
                spans.pop()
            spans.append(span)
        return [self._with_step_times(span) for span in spans]

    def _with_step_times(self, span: Span) -> Span:
        """Of what is decoded: how long its steps took, from one's start to the next one's, and
        whether the longest ran others' prompts, which may be why."""
        begin, end = (bisect_left(self._starts, us) for us in (span.start_us, span.end_us))
        if span.activity != "decode" or end - begin < 2:
            return span
        starts = [*self._starts[begin:end], span.end_us]
        by_time = sorted((b - a, begin + idx) for idx, (a, b) in enumerate(pairwise(starts)))
        (median_us, _), (longest_us, idx) = by_time[len(by_time) // 2], by_time[-1]
        longest = self._steps[idx]
        times = f"median {_ms(median_us)}, longest {_ms(longest_us)} (step {longest.step_id}"
        return replace(span, reason=f"{span.reason}; {times}{_prompts_run(longest)})")

    def _pieces(self, request: _core.RequestRecord) -> Iterator[Span]:
        """What was before the first step of its lifetime; then a step that decided on it, or
        several that have the same to say of those that they passed over."""
        num_steps = len(self._steps)
        end_us = request.finished_us or (self._steps[-1].end_us if num_steps else 0)
        idx = bisect_left(self._starts, request.queued_us)
        until_us = min(end_us, self._starts[idx]) if idx < num_steps else end_us
        if until_us > request.arrival_us:
            reason = self._reason_before(request, idx)
            yield Span(request.arrival_us, until_us, "waiting", reason, ())
        decided = [*self._decided.get(request.request_id, ()), num_steps]
        while idx < num_steps and self._starts[idx] < end_us:
            next_decided = decided[bisect_left(decided, idx)]
            if next_decided == idx:
                until = idx + 1
                activity, reason = _activity(self._steps[idx], request, self._names)
            else:
                until = min(next_decided, self._next_reason[idx])
                activity, reason = "waiting", self._steps[idx].queue_reason
            until_us = min(self._starts[until], end_us) if until < num_steps else end_us
            steps = (self._steps[idx].step_id, self._steps[until - 1].step_id)
            yield Span(self._starts[idx], until_us, activity, reason, steps)
            idx = until

    def _reason_before(self, request: _core.RequestRecord, first: int) -> str:
        if first == 0 and self._starts and self._starts[0] - request.queued_us > _MAX_INTAKE_US:
            return "the trace has forgotten the steps of that time"
        if first > 0 and request.arrival_us < self._steps[first - 1].end_us:
            return f"step {self._steps[first - 1].step_id} was running when it came"
        return "on its way to the engine's thread"


def _prompts_run(step: _Step) -> str:
    """The prompt tokens of a step, and whose they were, to be told to one that decoded in it."""
    if not step.num_prefill_tokens:
        return ""
    num_requests = sum(
        any(decision.kind == "scheduled" and decision.detail > 1 for decision in decisions)
        and not any(decision.kind == "drafted" for decision in decisions)
        for decisions in step.by_request.values()
    )
    whose = f"{num_requests} others" if num_requests > 1 else "another"
    return f", with {step.num_prefill_tokens} prompt tokens of {whose}"


def _activity(
    step: _Step, request: _core.RequestRecord, names: Mapping[int, str]
) -> tuple[str, str]:
    decisions = step.by_request[request.request_id]
    details = {decision.kind: decision.detail for decision in decisions}
    if "scheduled" not in details:
        reasons = [_reason(decision, names) for decision in decisions if decision.kind in _WAITS]
        return "waiting", reasons[0] if reasons else step.queue_reason
    num_tokens = [decision.detail for decision in decisions if decision.kind == "scheduled"]
    num_guessed = details.get("drafted", 0)
    if 0 < request.first_token_us <= step.start_us and max(num_tokens) <= 1 + num_guessed:
        if num_guessed:
            return "decode", "guessed tokens, checked together"
        if "drafts_off" in details:
            return "decode", "a token a step, since guessing does not pay"
        return "decode", "a token a step"
    reason = f"{sum(num_tokens)} tokens"
    if details.get("admitted"):
        reason += f", {details['admitted']} more found in the prefix cache"
    if "chunked" in details:
        reason += f", {details['chunked']} left for later steps"
    if "chunked_for_pace" in details:
        reason += f", {details['chunked_for_pace']} left, since others decode (max_stall_ms)"
    if "chunked_to_spread" in details:
        reason += f", {details['chunked_to_spread']} left, since others generate for longer"
    return "prefill", reason


def describe_life(name: str, summary: str, spans: Sequence[Span]) -> Iterator[str]:
    """A request in words, a line a span; times from its arrival on."""
    yield f"request {name}: {summary}"
    start_us = spans[0].start_us if spans else 0
    for span in spans:
        yield (
            f"  {_ms(span.start_us - start_us):>14} + {_ms(span.duration_us):>14}  "
            f"{span.activity:<7}{_step_range(span)}: {span.reason}"
        )
    waited_us = sum(span.duration_us for span in spans if span.activity == "waiting")
    yield f"  waited {_ms(waited_us)} of {_ms(spans[-1].end_us - start_us if spans else 0)}"


def describe_request(record: _core.RequestRecord) -> str:
    """Its tokens, and how it ended."""
    parts = [f"{record.num_prompt_tokens} prompt tokens"]
    if record.num_cached_tokens > 0:
        parts.append(f"{record.num_cached_tokens} of them from the prefix cache")
    parts.append(f"{record.num_generation_tokens} generated")
    if record.num_draft_tokens > 0:
        parts.append(f"{record.num_accepted_tokens} of {record.num_draft_tokens} guesses right")
    if record.num_samples > 1:
        parts.append(f"in {record.num_samples} samples")
    if record.num_preemptions > 0:
        parts.append(f"preemptions: {record.num_preemptions}")
    parts.append(f"finished: {record.finish_reason}" if record.finish_reason else "not finished")
    return ", ".join(parts)


def _ms(microseconds: int) -> str:
    return f"{microseconds / 1e3:.3f} ms"


def _step_range(span: Span) -> str:
    if not span.steps:
        return ""
    first, last = span.steps[0], span.steps[-1]
    return f" step {first}" if first == last else f" steps {first} to {last}"
