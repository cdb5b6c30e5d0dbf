"""POST /completion: goes on from a prompt, in the words of llama.cpp's server."""

from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmserve.outputs import CompletionOutput
from llmserve.requests.state import RequestState
from llmserve.server.context import context
from llmserve.server.http.errors import ApiError
from llmserve.server.http.events import event
from llmserve.server.routes.bodies import CompletionBody
from llmserve.server.routes.completion_job import CompletionJob, completion_job
from llmserve.server.routes.llama_cpp.bodies import LlamaCompletionBody
from llmserve.server.routes.llama_fields import FIELDS
from llmserve.server.routes.logprobs import chat_logprobs
from llmserve.server.routes.neutral_fields import check_neutral
from llmserve.server.routes.request_body import read_json
from llmserve.server.routes.wire import error_line, finish_reason
from llmserve.server.running.answer import EVENTS
from llmserve.server.running.failures import generation_error

_BANNED = -100.0
_SAME = (
    *("model", "prompt", "n", "stream", "temperature", "top_k", "top_p", "min_p", "top_n_sigma"),
    *("presence_penalty", "frequency_penalty", "seed", "ignore_eos", "stop"),
)


async def llama_completion(request: Request) -> Response:
    """Continues prompts."""
    body = await read_json(request, LlamaCompletionBody, context(request).settings)
    check_neutral(body, FIELDS)
    if body.n_predict == 0:
        raise ApiError(400, "n_predict must be at least 1, or -1", param="n_predict")
    found = await completion_job(request, _completion_body(body), "cmpl")
    return found.response(_Answer(found, body))


def _completion_body(body: LlamaCompletionBody) -> CompletionBody:
    """The same in OpenAI's words. Raises ApiError."""
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    constraint: dict[str, Any] | None = None
    if body.grammar and body.json_schema is not None:
        raise ApiError(400, "grammar and json_schema: give one", param="grammar")
    if body.grammar:
        constraint = {"grammar": body.grammar}
    elif body.json_schema is not None:
        constraint = {"json": body.json_schema}
    bias = body.logit_bias
    if isinstance(bias, list):
        bias = {str(token_id): _BANNED if b is False else float(b) for token_id, b in bias}
    fields |= {
        "max_tokens": body.n_predict,
        "repetition_penalty": body.repeat_penalty,
        "logit_bias": bias,
        "logprobs": body.n_probs or None,
        "structured_outputs": constraint,
        "skip_reading_prefix_cache": True if body.cache_prompt is False else None,
        "timeout": body.t_max_predict_ms / 1000 if body.t_max_predict_ms else None,
    }
    return CompletionBody(**fields)


class _Answer:
    form = EVENTS
    is_plain = False  # each line counts its tokens
    words_empty_texts = False

    def __init__(self, found: CompletionJob, body: LlamaCompletionBody) -> None:
        self._job = found.job
        self._body = body
        self._n = found.job.states[0].params.n
        self._num_new: dict[int, int] = {}  # tokens, by result
        self._text: dict[int, str] = {}

    def prepare(self, prompt_idx: int) -> None:
        """See Answer: prompts have no log-probabilities."""

    def document(self, states: Sequence[RequestState], cause: str) -> object:
        """See Answer: one result by itself, several as a list."""
        results = [
            self._result(idx, completion, cause)
            for idx, state in enumerate(states)
            for completion in state.completions()
        ]
        return results[0] if len(results) == 1 else results

    def lines(
        self, prompt_idx: int, news: Sequence[CompletionOutput], cause: str
    ) -> Iterable[bytes]:
        """See Answer."""
        for completion in news:
            if completion.text or (completion.finish_reason is not None and not completion.error):
                yield event(self._result(prompt_idx, completion, cause))
            if completion.error:
                yield self.error_line(generation_error(completion.error, self._job))

    def error_line(self, error: ApiError) -> bytes:
        """See Answer."""
        return error_line(error)

    def last_lines(self) -> Iterable[bytes]:
        """See Answer: the last result says that it is the last."""
        return ()

    def _result(self, prompt_idx: int, completion: CompletionOutput, cause: str) -> dict[str, Any]:
        index = prompt_idx * self._n + completion.index
        state = self._job.states[prompt_idx]
        self._num_new[index] = self._num_new.get(index, 0) + len(completion.token_ids)
        self._text[index] = self._text.get(index, "") + completion.text
        is_end = completion.finish_reason is not None and not completion.error
        result: dict[str, Any] = {
            "index": index,
            "content": completion.text,
            "tokens": completion.token_ids if self._body.return_tokens else [],
            "stop": is_end,
            "id_slot": -1,
            "tokens_predicted": self._num_new[index],
            "tokens_evaluated": len(state.prompt.token_ids),
        }
        if self._body.n_probs and completion.logprobs is not None:
            result["completion_probabilities"] = self._probabilities(completion)
        return {**result, **self._ending(index, state, completion, cause)} if is_end else result

    def _probabilities(self, completion: CompletionOutput) -> list[Any]:
        tokenizer = self._job.model.tokenizer()
        rows = completion.logprobs or []
        content = chat_logprobs(rows, self._body.n_probs or 0, (), tokenizer)["content"]
        ids = [next(iter(row)) for row in rows]
        return [{"id": token_id, **entry} for token_id, entry in zip(ids, content, strict=True)]

    def _ending(
        self, index: int, state: RequestState, completion: CompletionOutput, cause: str
    ) -> dict[str, Any]:
        is_word = completion.finish_reason == "stop" and isinstance(completion.stop_reason, str)
        reason = finish_reason(completion, cause)
        kind = {"stop": "word" if is_word else "eos", "length": "limit"}.get(reason or "", "none")
        params = state.params
        return {
            "model": self._job.model.name,
            "prompt": state.prompt.text or "",
            "generation_settings": {
                "n_predict": self._body.n_predict or -1,
                "temperature": params.temperature,
                "top_k": params.top_k,
                "top_p": params.top_p,
                "min_p": params.min_p,
                "seed": completion.seed,
                "stop": list(params.stop or ()),
            },
            "has_new_line": "\n" in self._text[index],
            "truncated": False,
            "stop_type": kind,
            "stopping_word": completion.stop_reason if is_word else "",
            "tokens_cached": state.num_cached_tokens,
            "timings": self._timings(index, state),
        }

    def _timings(self, index: int, state: RequestState) -> dict[str, float]:
        """Of the request as a whole, in milliseconds."""
        metrics = state.output().metrics
        assert metrics is not None
        first = metrics.first_token_ts or metrics.arrival_time
        prompt_ms = max(first - metrics.arrival_time, 0.0) * 1000
        new_ms = max((metrics.last_token_ts or first) - first, 0.0) * 1000
        num_cached, num_new = state.num_cached_tokens, self._num_new[index]
        num_prompt = len(state.prompt.token_ids) - num_cached
        return {
            "cache_n": num_cached,
            "prompt_n": num_prompt,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / max(num_prompt, 1),
            "prompt_per_second": 1000 * num_prompt / prompt_ms if prompt_ms else 0.0,
            "predicted_n": num_new,
            "predicted_ms": new_ms,
            "predicted_per_token_ms": new_ms / max(num_new, 1),
            "predicted_per_second": 1000 * num_new / new_ms if new_ms else 0.0,
        }
