"""A conversation's answer as OpenAI's responses word it."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from llmserve.outputs import CompletionOutput
from llmserve.requests.state import RequestState
from llmserve.server.http.errors import ApiError
from llmserve.server.http.events import named_event
from llmserve.server.routes.chat_parser import ChatFormat
from llmserve.server.routes.chat_reader import ChatReader
from llmserve.server.routes.logprobs import chat_logprobs
from llmserve.server.routes.responses.bodies import ResponsesBody
from llmserve.server.routes.responses.items import OutputItems
from llmserve.server.running.answer import EVENTS
from llmserve.server.running.failures import generation_error
from llmserve.server.running.job import Job

Document = dict[str, Any]


class ResponseAnswer:
    """See Answer."""

    form = EVENTS
    is_plain = False  # each event has a number
    words_empty_texts = False

    def __init__(
        self,
        job: Job,
        body: ResponsesBody,
        form: ChatFormat,
        ended: Callable[[Document], None],
    ) -> None:
        """ended: told of a response that has ended without an error."""
        self._job = job
        self._body = body
        self._reader = ChatReader(form, job.model.tokenizer())
        self._ended = ended
        self._output = OutputItems(job.request_id)
        self._num_events = 0
        self._end: Document | None = None  # of the stream
        self._has_failed = False

    @property
    def tells_all_logprobs(self) -> bool:
        """Whether the stream's last event repeats those of all tokens."""
        return self._job.states[0].params.has_logprobs

    def go_on_at(self, num_events: int) -> None:
        """See NumbersEvents."""
        self._num_events = num_events

    def queued(self) -> Document:
        """Before it runs."""
        return self._response("queued")

    def prepare(self, prompt_idx: int) -> None:
        """See Answer: prompts have no log-probabilities."""

    def document(self, states: Sequence[RequestState], cause: str) -> object:
        """See Answer."""
        (state,) = states
        (completion,) = state.completions()
        for _ in self._add(completion, cause):
            pass
        document = self._ending(completion, cause)
        self._ended(document)
        return document

    def lines(
        self, prompt_idx: int, news: Sequence[CompletionOutput], cause: str
    ) -> Iterable[bytes]:
        """See Answer."""
        for completion in news:
            if not self._reader.has_begun(completion.index):
                response = self._response("in_progress")
                yield self._event({"type": "response.created", "response": response})
                yield self._event({"type": "response.in_progress", "response": response})
            yield from map(self._event, self._add(completion, cause))
            if completion.error:
                yield self._failure(generation_error(completion.error, self._job))
            elif completion.finish_reason is not None:
                self._end = self._ending(completion, cause)

    def error_line(self, error: ApiError) -> bytes:
        """See Answer."""
        self._has_failed = True
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return self._event({"type": "error", **fields})

    def last_lines(self) -> Iterable[bytes]:
        """See Answer."""
        if self._has_failed or self._end is None:
            return
        kind = f"response.{self._end['status']}"
        yield self._event({"type": kind, "response": self._end})
        self._ended(self._end)

    def _event(self, data: Document) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event(data["type"], {**data, "sequence_number": number})

    def _failure(self, error: ApiError) -> bytes:
        self._has_failed = True
        failure = {"code": "server_error", "message": error.message}
        response = {**self._response("failed"), "error": failure}
        return self._event({"type": "response.failed", "response": response})

    def _add(self, completion: CompletionOutput, cause: str) -> Iterator[Document]:
        """The events of new text."""
        pieces = self._reader.read(completion)
        yield from self._output.add(pieces, self._logprobs(completion))
        if completion.finish_reason is not None and not completion.error:
            yield from self._output.finish(self._status(completion, cause))

    def _status(self, completion: CompletionOutput, cause: str) -> str:
        reason = self._reader.finish_reason(completion, cause)
        return "completed" if reason in ("stop", "tool_calls") else "incomplete"

    def _ending(self, completion: CompletionOutput, cause: str) -> Document:
        document = self._response(self._status(completion, cause))
        if document["status"] == "incomplete":
            document["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            document["completed_at"] = int(time.time())
        return document | {"usage": self._usage()}

    def _usage(self) -> Document:
        (state,) = self._job.states
        num_prompt, num_new = len(state.prompt.token_ids), state.num_generation_tokens
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {
                "cached_tokens": state.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": num_new,
            "output_tokens_details": {"reasoning_tokens": self._reader.num_reasoning_tokens},
            "total_tokens": num_prompt + num_new,
        }

    def _logprobs(self, completion: CompletionOutput) -> list[Any]:
        if completion.logprobs is None:
            return []
        tokenizer, num_top = self._job.model.tokenizer(), self._body.top_logprobs or 0
        content: list[Any] = chat_logprobs(completion.logprobs, num_top, (), tokenizer)["content"]
        return content

    def _response(self, status: str) -> Document:
        """With what the request asked for, as the API repeats it."""
        body, params = self._body, self._job.states[0].params
        return {
            "id": self._job.request_id,
            "object": "response",
            "created_at": self._job.created,
            "completed_at": None,
            "status": status,
            "background": bool(self._body.background),
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "model": self._job.model.name,
            "output": list(self._output.items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **(body.text or {})},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"strict": None, **tool} for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }
