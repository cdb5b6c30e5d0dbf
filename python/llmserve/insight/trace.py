"""What the engine did of late, step by step, and what that meant for each request."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, overload

from llmserve import _core
from llmserve.common.arguments import describe
from llmserve.common.html_table import html_table
from llmserve.errors import InvalidArgument, NotSupported
from llmserve.insight.perfetto import engine_events, exchange_events, request_events
from llmserve.insight.timeline import Span, Timelines, describe_life, describe_request

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUM_STEPS_SHOWN = 20  # in a notebook


class Trace(Sequence[_core.StepRecord]):
    """The engine's last 4,096 steps, oldest first, and its last 4,096 requests.

    A step's record has its phase ("prefill", "decode", or "idle" where nothing could run), the
    start and the durations of scheduling, execution and commit in microseconds on the engine's
    clock (that of `time.monotonic`), its tokens, the gauges after it, and for each sequence why it
    ran or waited.

    >>> from llmserve import LLM, SamplingParams, demo_model_path
    >>> with LLM(demo_model_path()) as llm:
    ...     (output,) = llm.generate("The fox", SamplingParams(max_tokens=4), use_tqdm=False)
    ...     trace = llm.trace()
    >>> [step.phase for step in trace]
    ['prefill', 'decode', 'decode', 'decode']
    >>> [span.activity for span in trace.timeline(output.request_id)]
    ['waiting', 'prefill', 'decode']
    """

    def __init__(
        self,
        steps: Sequence[_core.StepRecord],
        requests: Sequence[_core.RequestRecord],
        num_blocks: int,
        names: Mapping[str, int],
        exchanges: Sequence[_core.ExchangeRecord] = (),
    ) -> None:
        self._exchanges = list(exchanges)
        self._steps = list(steps)
        self._requests = {record.request_id: record for record in requests}
        self._num_blocks = num_blocks
        self._ids = dict(names)
        self._names = {request_id: name for name, request_id in names.items()}

    @overload
    def __getitem__(self, idx: int) -> _core.StepRecord: ...
    @overload
    def __getitem__(self, idx: slice) -> list[_core.StepRecord]: ...
    def __getitem__(self, idx: int | slice) -> _core.StepRecord | list[_core.StepRecord]:
        return self._steps[idx]

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[_core.StepRecord]:
        return iter(self._steps)

    @property
    def requests(self) -> list[_core.RequestRecord]:
        """The last requests, in the order of their coming: times, tokens, how they ended."""
        return list(self._requests.values())

    @property
    def exchanges(self) -> list[_core.ExchangeRecord]:
        """What rank 0 has exchanged with other nodes of late, in the order of their ends: "Gather
        of columns", "All-to-all communication" of what experts make, "Send" to the next stage.
        `half` is which half of a step it was of, 1 or 2, and 0 of a step that ran at once."""
        return list(self._exchanges)

    def since(self, start_us: int) -> "Trace":
        """What began at that time of the engine's clock or later."""
        steps = [step for step in self._steps if step.start_us >= start_us]
        requests = [record for record in self.requests if record.arrival_us >= start_us]
        exchanges = [exchange for exchange in self._exchanges if exchange.start_us >= start_us]
        return Trace(steps, requests, self._num_blocks, self._ids, exchanges)

    def steps_of(self, request_id: str | int) -> list[_core.StepRecord]:
        """The steps that decided something about this request."""
        wanted = self._record(request_id).request_id
        return [
            step
            for step in self._steps
            if any(decision.request_id == wanted for decision in step.decisions)
        ]

    def timeline(self, request_id: str | int) -> list[Span]:
        """The request's life from its arrival on, without a gap: each wait with its reason, each
        prefill chunk, and what was decoded."""
        return self._spans(self._record(request_id))

    def replica(self, request_id: str | int) -> int:
        """Which of several engines ran it; 0 of one."""
        return self._record(request_id).replica

    def explain(self, request_id: str | int) -> str:
        """The request's life in words: every moment of waiting has a reason."""
        record = self._record(request_id)
        spans = self._spans(record)
        return "\n".join(describe_life(self._name(record), self._describe(record), spans))

    def to_perfetto(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace for https://ui.perfetto.dev: a slice a step with its phases, what went
        to other nodes, a track a request, and counters of tokens, running, waiting and KV use.
        Chrome's JSON trace events; microseconds on the engine's clock."""
        lives = [
            (
                record,
                self._name(record),
                self._describe(record),
                self._spans(record),
            )
            for record in self.requests
        ]
        events = list(
            chain(
                engine_events(self._steps),
                exchange_events(self._exchanges),
                request_events(lives),
            )
        )
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)

    def plot(self) -> "Figure":
        """Tokens of each step, running and waiting sequences, and the share of the KV pool in use,
        over time. Raises NotSupported without matplotlib (`pip install 'llmserve[plot]'`)."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise NotSupported(
                "Trace.plot needs matplotlib; pip install 'llmserve[plot]'"
            ) from error
        figure = Figure(figsize=(9, 6), layout="constrained")
        tokens, sequences, blocks = figure.subplots(3, 1, sharex=True)
        start_us = self._steps[0].start_us if self._steps else 0
        seconds = [(step.start_us - start_us) / 1e6 for step in self._steps]
        prefill = [step.num_prefill_tokens for step in self._steps]
        decode = [step.num_tokens - step.num_prefill_tokens for step in self._steps]
        tokens.stackplot(seconds, prefill, decode, labels=["prefill", "decode"], step="post")
        tokens.set_ylabel("tokens a step")
        for label, values in (
            ("running", self._totals("num_running")),
            ("waiting", self._totals("num_waiting")),
        ):
            sequences.step(seconds, values, where="post", label=label)
        sequences.set_ylabel("sequences")
        num_blocks = self._num_blocks * max(len(self._replicas), 1)
        used = [100 * count / num_blocks for count in self._totals("num_blocks_used")]
        blocks.step(seconds, used, where="post", color="C2")
        blocks.set(ylabel="KV pool in use (%)", xlabel="seconds", ylim=(0, 105))
        for axes in (tokens, sequences):
            axes.legend(loc="upper right")
        return figure

    def __repr__(self) -> str:
        return f"Trace({len(self)} steps, {len(self._requests)} requests)"

    def _repr_html_(self) -> str:
        are_several = len(self._replicas) > 1
        head = ["replica"] if are_several else []
        head += ["step", "phase", "ms", "tokens", "prefill", "running", "waiting", "KV blocks"]
        rows = [
            (
                *((step.replica,) if are_several else ()),
                step.step_id,
                step.phase,
                f"{(step.schedule_us + step.execute_us + step.commit_us) / 1e3:.3f}",
                step.num_tokens,
                step.num_prefill_tokens,
                step.num_running,
                step.num_waiting,
                f"{step.num_blocks_used} of {self._num_blocks}",
            )
            for step in self._steps[-_NUM_STEPS_SHOWN:]
        ]
        title = f"{self!r}; the last {len(rows)} steps" if len(rows) < len(self) else repr(self)
        return html_table(title, head, rows)

    @cached_property
    def _timelines(self) -> dict[int, Timelines]:
        """By replica: a request waits for what its own one does."""
        replicas = self._replicas | {record.replica for record in self.requests}
        return {
            replica: Timelines(
                [step for step in self._steps if step.replica == replica], self._names
            )
            for replica in replicas
        }

    def _spans(self, record: _core.RequestRecord) -> list[Span]:
        """Of a request that another replica took over, what it did at the first until then."""
        spans = self._timelines[record.replica].of(record)
        former = self._timelines.get(record.former_replica)
        if former is None:
            return spans
        at_us = record.taken_over_us
        before = [
            replace(span, end_us=min(span.end_us, at_us))
            for span in former.of(record)
            if span.start_us < at_us
        ]
        after = [
            replace(span, start_us=max(span.start_us, at_us))
            for span in spans
            if span.end_us > at_us
        ]
        return before + after

    @cached_property
    def _replicas(self) -> set[int]:
        return {step.replica for step in self._steps}

    def _totals(self, gauge: str) -> list[int]:
        """A gauge after each step, of all replicas: of the others what they had last."""
        last = dict.fromkeys(self._replicas, 0)
        totals = []
        for step in self._steps:
            last[step.replica] = getattr(step, gauge)
            totals.append(sum(last.values()))
        return totals

    def _describe(self, record: _core.RequestRecord) -> str:
        where = f"replica {record.replica}, " if len(self._timelines) > 1 else ""
        if record.former_replica >= 0:
            where += f"which took it over from replica {record.former_replica}, "
        return where + describe_request(record)

    def _name(self, record: _core.RequestRecord) -> str:
        return self._names.get(record.request_id, str(record.request_id))

    def _record(self, request_id: str | int) -> _core.RequestRecord:
        number = self._ids.get(str(request_id))
        if number is None and str(request_id).isdecimal():
            number = int(request_id)
        if number not in self._requests:
            raise InvalidArgument(
                f"the trace has no request {describe(request_id)}; it has the last "
                f"{len(self._requests)}"
                + (f", {min(self._requests)} to {max(self._requests)}" if self._requests else "")
            )
        return self._requests[number]
