"""POST /v1/completions."""

from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmserve.outputs import CompletionOutput
from llmserve.requests.state import RequestState
from llmserve.server.context import context
from llmserve.server.http.errors import ApiError
from llmserve.server.http.events import DONE, event
from llmserve.server.http.head import given_request_id
from llmserve.server.models import ServedModel
from llmserve.server.routes.bodies import CompletionBody, StreamOptions
from llmserve.server.routes.completion_job import completion_job
from llmserve.server.routes.generation_job import check_stream_options
from llmserve.server.routes.logprobs import CompletionLogprobs, PromptRows
from llmserve.server.routes.request_body import read_json
from llmserve.server.routes.sampling import (
    refuse_given,
)
from llmserve.server.routes.wire import (
    NULLS,
    error_event,
    error_line,
    finish_reason,
    head,
    stop_reason,
    usage,
)
from llmserve.server.running.answer import EVENTS
from llmserve.server.running.job import Job

_DEFAULT_MAX_TOKENS = 16  # OpenAI's
_KIND = "text_completion"


async def completions(request: Request) -> Response:
    """Continues prompts."""
    body = await read_json(request, CompletionBody, context(request).settings)
    _check(body)
    given_id = body.request_id or given_request_id(request.scope).decode("ascii")
    found = await completion_job(request, body, "cmpl", _DEFAULT_MAX_TOKENS, given_id)
    job, model = found.job, found.job.model
    texts = []
    if body.echo:
        is_whole = body.truncate_prompt_tokens is None
        texts = [
            _prompt_text(s.prompt.text if is_whole else None, s.prompt.token_ids, model)
            for s in job.states
        ]
    return found.response(_Answer(job, body, texts))


def _check(body: CompletionBody) -> None:
    refuse_given(body, ("suffix",), "models that fill in the middle are not served")
    refuse_given(body, ("prompt_embeds",), "send text or token ids")
    if body.stream and body.best_of not in (None, body.n or 1):
        raise ApiError(
            400,
            f"best_of={body.best_of} is not streamed: which are the best is known at the end; "
            f"leave best_of or stream out",
            param="best_of",
        )
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens must be at least 1, or echo true", param="max_tokens")
    if body.logprob_token_ids and (body.logprobs is None or body.max_tokens == 0):
        raise ApiError(
            400,
            "logprob_token_ids needs logprobs, and a max_tokens of at least 1",
            param="logprob_token_ids",
        )
    check_stream_options(body)


def _prompt_text(text: str | None, token_ids: list[int], model: ServedModel) -> str:
    if text is not None or not model.llm.has_tokenizer:
        return text or ""
    return model.tokenizer().decode(token_ids, skip_special_tokens=False)


class _Answer:
    form = EVENTS

    def __init__(self, job: Job, body: CompletionBody, texts: list[str]) -> None:
        self._job = job
        self._body = body
        self._options = body.stream_options or StreamOptions()
        self._texts = texts
        self._n = job.states[0].num_returned
        self._num_told = 0  # new tokens of the chunks so far
        self._is_begun: set[int] = set()  # choices
        self._prompt_rows = PromptRows(job.states)
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._echoed: dict[int, dict[str, Any]] = {}  # logprobs of prompts
        self._has_output = body.max_tokens != 0

    @property
    def is_plain(self) -> bool:
        """See Answer."""
        body = self._body
        says_more = body.return_token_ids or self._options.continuous_usage_stats
        return body.logprobs is None and body.max_tokens != 0 and not says_more

    words_empty_texts = True

    def prepare(self, prompt_idx: int) -> None:
        """See Answer."""
        if self._body.prompt_logprobs is not None:
            self._prompt_rows.of(prompt_idx)
        if self._body.echo and self._body.logprobs is not None:
            self._echo(prompt_idx)

    def document(self, states: Sequence[RequestState], cause: str) -> object:
        """See Answer."""
        choices = [
            self._choice(idx, completion, cause)
            for idx, state in enumerate(states)
            for completion in state.completions()
        ]
        counts = usage(states)
        if self._body.max_tokens == 0:
            counts |= {"completion_tokens": 0, "total_tokens": counts["prompt_tokens"]}
        for choice in choices:
            for name in ("token_ids", "prompt_logprobs", "prompt_token_ids"):
                choice.setdefault(name, None)
        return {**head(_KIND, self._job), "choices": choices, **NULLS, "usage": counts}

    def lines(
        self, prompt_idx: int, news: Sequence[CompletionOutput], cause: str
    ) -> Iterable[bytes]:
        """See Answer."""
        for completion in news:
            error = completion.error  # an event of its own, after what came with it
            if not error or completion.text or completion.token_ids:
                choice = self._choice(prompt_idx, completion, cause)
                if error:
                    choice |= {"finish_reason": None, "stop_reason": None}
                chunk = {**head(_KIND, self._job), "choices": [choice]}
                self._num_told += len(completion.token_ids)
                if self._options.continuous_usage_stats:
                    chunk["usage"] = usage(self._job.states, num_told=self._num_told)
                yield event(chunk)
            if error:
                yield error_event(error, self._job)

    def error_line(self, error: ApiError) -> bytes:
        """See Answer."""
        return error_line(error)

    def last_lines(self) -> Iterable[bytes]:
        """See Answer."""
        if self._options.include_usage:
            yield event({**head(_KIND, self._job), "choices": [], "usage": usage(self._job.states)})
        yield DONE

    def _choice(self, prompt_idx: int, completion: CompletionOutput, cause: str) -> dict[str, Any]:
        state = self._job.states[prompt_idx]
        index = prompt_idx * self._n + completion.index
        is_first = index not in self._is_begun
        self._is_begun.add(index)
        text = completion.text if self._has_output else ""
        if self._body.echo and is_first:
            text = self._texts[prompt_idx] + text
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._choice_logprobs(prompt_idx, completion, is_first),
            "finish_reason": finish_reason(completion, cause) if self._has_output else "length",
            "stop_reason": stop_reason(completion, cause),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = completion.token_ids
            if is_first:
                choice["prompt_token_ids"] = state.prompt.token_ids
        if self._body.prompt_logprobs is not None and is_first:
            choice["prompt_logprobs"] = self._prompt_rows.of(prompt_idx)
        return choice

    def _choice_logprobs(
        self, prompt_idx: int, completion: CompletionOutput, is_first: bool
    ) -> dict[str, Any] | None:
        if self._body.logprobs is None or completion.logprobs is None:
            return None
        index = prompt_idx * self._n + completion.index
        if is_first:
            self._logprobs[index] = self._words(prompt_idx)
        fields = self._logprobs[index].rows(completion.logprobs if self._has_output else ())
        if self._body.echo and is_first:
            echoed = self._echo(prompt_idx)
            fields = {name: [*echoed[name], *values] for name, values in fields.items()}
        return fields

    def _echo(self, prompt_idx: int) -> dict[str, Any]:
        """The log-probabilities of a prompt, worded once for all its choices; none if they have not
        come."""
        if prompt_idx in self._echoed:
            return self._echoed[prompt_idx]
        state, text = self._job.states[prompt_idx], self._texts[prompt_idx]
        rows, first = state.prompt_rows(), state.prompt.token_ids[0]
        echoed = self._words(prompt_idx).prompt_rows(rows or (), first, text)
        if rows is not None:
            self._echoed[prompt_idx] = echoed
        return echoed

    def _words(self, prompt_idx: int) -> CompletionLogprobs:
        llm = self._job.model.llm
        return CompletionLogprobs(
            self._body.logprobs or 0,
            self._body.logprob_token_ids or (),
            llm.get_tokenizer() if llm.has_tokenizer else None,
            self._job.states[prompt_idx].params.skip_special_tokens,
            begin=len(self._texts[prompt_idx]) if self._body.echo else 0,
            as_ids=bool(self._body.return_tokens_as_token_ids),
        )
