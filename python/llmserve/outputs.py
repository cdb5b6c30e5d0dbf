"""What `LLM.generate` returns: names as users of vLLM know them; additions are marked."""

from dataclasses import dataclass

from llmserve.common.html_table import html_table
from llmserve.common.refused_names import REFUSED_NAMES, refused_class
from llmserve.pooling_outputs import EmbeddingOutput as EmbeddingOutput  # as vLLM has them
from llmserve.pooling_outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
from llmserve.pooling_outputs import PoolingOutput as PoolingOutput
from llmserve.pooling_outputs import PoolingRequestOutput as PoolingRequestOutput


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability: natural logarithm, of the raw distribution (before temperature
    and truncation)."""

    logprob: float
    rank: int | None = None  # 1 is the most likely
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of a request's n continuations."""

    index: int  # which of the n
    text: str
    token_ids: list[int]  # an end-of-sequence or stop token is included; its text is not
    cumulative_logprob: float | None  # sum over token_ids, where logprobs were asked for
    logprobs: list[dict[int, Logprob]] | None  # one dict a token: the sampled one, then the top
    finish_reason: str | None = None  # "stop", "length", "abort", "error"; None: still running
    stop_reason: int | str | None = None  # the stop string or stop token id, if one ended it
    lora_request: None = None
    error: str | None = None  # llmserve's own: what went wrong where finish_reason is "error"
    seed: int | None = None  # llmserve's own: passing it again gives these tokens again

    def finished(self) -> bool:
        """Whether nothing will be added."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When things happened to one request, in this order. Seconds since the epoch, all on one clock
    that never goes back: set by the machine's when llmserve was imported; 0 where it has not
    happened."""

    arrival_time: float  # given to `generate`
    queued_ts: float  # given to the engine
    scheduled_ts: float  # first in a step
    first_token_ts: float
    last_token_ts: float
    num_preemptions: int
    num_generation_tokens: int
    num_draft_tokens: int = 0  # llmserve's own: guesses that were run, over all n
    num_accepted_tokens: int = 0  # of them, those that were right


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its continuations."""

    request_id: str
    prompt: str | None  # whole, also where it was truncated; None where it came as token ids
    prompt_token_ids: list[int]  # what the model read
    # Where asked for, and from the moment the prompt has run: None for the first token, which has
    # nothing before it, then a dict a token: the prompt's, then the top.
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]  # in the order of their index
    finished: bool
    metrics: RequestMetrics
    lora_request: None = None
    num_cached_tokens: int = 0  # prompt tokens read from the prefix cache

    def _repr_html_(self) -> str:
        return RequestOutputs([self])._repr_html_()


class RequestOutputs(list[RequestOutput]):
    """The list that `LLM.generate` returns: a table in a notebook."""

    def _repr_html_(self) -> str:
        head = ["request", "prompt", "sample", "text", "tokens", "finish_reason"]
        rows = [
            (
                output.request_id,
                output.prompt if output.prompt is not None else output.prompt_token_ids,
                completion.index,
                completion.text or completion.token_ids,
                len(completion.token_ids),
                completion.error or completion.finish_reason or "running",
            )
            for output in self
            for completion in output.outputs
        ]
        return html_table(f"{len(self)} outputs", head, rows)


def __getattr__(name: str) -> type:
    """The outputs of vLLM's tasks that are not here."""
    if name not in REFUSED_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return refused_class(name)
