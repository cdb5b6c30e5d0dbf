"""POST /completion: goes on from a prompt, in the words of llama.cpp's server."""

from collections.abc import Iterable, Sequence
from functools import partial
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
from llmserve.server.routes.llama_cpp.texts import bias_by_id, plain_prompts
from llmserve.server.routes.llama_fields import FIELDS
from llmserve.server.routes.logprobs import chat_logprobs
from llmserve.server.routes.neutral_fields import check_neutral
from llmserve.server.routes.request_body import off_the_loop, read_json
from llmserve.server.routes.wire import error_line, finish_reason
from llmserve.server.running.answer import EVENTS
from llmserve.server.running.failures import generation_error

_NEUTRAL = {name: field for name, field in FIELDS.items() if name != "response_fields"}
_SAME = (
    *("model", "n", "stream", "temperature", "top_k", "top_p", "min_p", "top_n_sigma"),
    *("presence_penalty", "frequency_penalty", "seed", "ignore_eos", "stop"),
)


async def llama_completion(request: Request) -> Response:
    """Continues prompts."""
    body = await read_json(request, LlamaCompletionBody, context(request).settings)
    check_neutral(body, _NEUTRAL)
    if body.n_predict == 0:
        raise ApiError(400, "n_predict must be at least 1, or -1", param="n_predict")
    completion = await off_the_loop(request, partial(_completion_body, request, body))
    found = await completion_job(request, completion, "cmpl")
    return found.response(_Answer(found, body))


def _completion_body(request: Request, body: LlamaCompletionBody) -> CompletionBody:
    """The same in OpenAI's words. Raises ApiError."""
    tokenizer = context(request).models.get(body.model).tokenizer()
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    constraint: dict[str, Any] | None = None
    if body.grammar and body.json_schema is not None:
        raise ApiError(400, "grammar and json_schema: give one", param="grammar")
    if body.grammar:
        constraint = {"grammar": body.grammar}
    elif body.json_schema is not None:
        constraint = {"json": body.json_schema}
    bias = body.logit_bias
    fields |= {
        "prompt": plain_prompts(body.prompt, tokenizer),
        "max_tokens": body.n_predict,
        "repetition_penalty": body.repeat_penalty,
        "logit_bias": None if bias is None else bias_by_id(bias, tokenizer),
        "logprobs": body.n_probs or None,
        "structured_outputs": constraint,
        "skip_reading_prefix_cache": True if body.cache_prompt is False else None,
        "timeout": body.t_max_predict_ms / 1000 if body.t_max_predict_ms else None,
    }
    return CompletionBody(**fields)


# Settings that are reported beside those that are here: what is not done has its neutral value.
_SETTINGS_OFF = {
    "mirostat": 0,
    "typical_p": 1.0,
    "dynatemp_range": 0.0,
    "xtc_probability": 0.0,
    "dry_multiplier": 0.0,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.0,
    "n_keep": 0,
    "n_discard": 0,
    "lora": [],
}
_LACKS = object()
# Of an event that is not the last.
_PIECE = (
    *("index", "content", "tokens", "id_slot", "tokens_predicted", "tokens_evaluated"),
    "completion_probabilities",
)


class _Answer:
    form = EVENTS
    is_plain = False  # each line counts its tokens
    words_empty_texts = False

    def __init__(self, found: CompletionJob, body: LlamaCompletionBody) -> None:
        self._job = found.job
        self._body = body
        self._n = found.job.states[0].params.n
        self._gives_tokens = bool(body.return_tokens or body.stream)
        self._num_new: dict[int, int] = {}  # tokens, by result
        self._text: dict[int, str] = {}

    def prepare(self, prompt_idx: int) -> None:
        """See Answer: prompts have no log-probabilities."""

    def document(self, states: Sequence[RequestState], cause: str) -> object:
        """See Answer: one result by itself, several as a list."""
        results = [
            self._wanted(self._result(idx, completion, cause))
            for idx, state in enumerate(states)
            for completion in state.completions()
        ]
        return results[0] if len(results) == 1 else results

    def lines(
        self, prompt_idx: int, news: Sequence[CompletionOutput], cause: str
    ) -> Iterable[bytes]:
        """See Answer."""
        for completion in news:
            result = self._result(prompt_idx, completion, cause)
            if completion.token_ids or completion.text:
                # What is the last of the text has an event of its own: clients take none from the
                # one that says the end.
                piece = {name: result[name] for name in _PIECE if name in result}
                yield event(piece | {"stop": False})
            if result["stop"]:
                result.pop("completion_probabilities", None)
                yield event(self._wanted(result | {"content": "", "tokens": []}))
            if completion.error:
                yield self.error_line(generation_error(completion.error, self._job))

    def error_line(self, error: ApiError) -> bytes:
        """See Answer."""
        return error_line(error)

    def last_lines(self) -> Iterable[bytes]:
        """See Answer: the last result says that it is the last."""
        return ()

    def _wanted(self, result: dict[str, Any]) -> dict[str, Any]:
        """What `response_fields` asks for, an inner field by its path."""
        if not self._body.response_fields:
            return result
        found = {}
        for path in self._body.response_fields:
            value: Any = result
            for name in path.split("/"):
                value = value.get(name, _LACKS) if isinstance(value, dict) else _LACKS
            if value is not _LACKS:
                found[path] = value
        return found

    def _result(self, prompt_idx: int, completion: CompletionOutput, cause: str) -> dict[str, Any]:
        index = prompt_idx * self._n + completion.index
        state = self._job.states[prompt_idx]
        self._num_new[index] = self._num_new.get(index, 0) + len(completion.token_ids)
        self._text[index] = self._text.get(index, "") + completion.text
        is_end = completion.finish_reason is not None and not completion.error
        result: dict[str, Any] = {
            "index": index,
            "content": completion.text,
            "tokens": completion.token_ids if self._gives_tokens else [],
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
        num_top = self._body.n_probs or 0
        content: list[Any] = chat_logprobs(rows, num_top, (), tokenizer, has_ids=True)["content"]
        return content

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
                **_SETTINGS_OFF,
                "n_predict": params.max_tokens or -1,
                "temperature": params.temperature,
                "top_k": params.top_k,
                "top_p": params.top_p,
                "min_p": params.min_p,
                "top_n_sigma": params.top_n_sigma,
                "repeat_penalty": params.repetition_penalty,
                "presence_penalty": params.presence_penalty,
                "frequency_penalty": params.frequency_penalty,
                "ignore_eos": params.ignore_eos,
                "n_probs": self._body.n_probs or 0,
                "stream": bool(self._body.stream),
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
