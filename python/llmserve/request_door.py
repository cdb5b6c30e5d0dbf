"""Where requests come in: a call's prompts and parameters are all checked before any runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from llmserve.arguments import INT32_MIN, describe, integer
from llmserve.errors import InvalidArgument
from llmserve.prompts import parse_prompts
from llmserve.request_state import RequestState
from llmserve.sampling_params import SamplingParams
from llmserve.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the engine takes."""

    vocab_size: int  # V
    max_model_len: int
    max_logprobs: int


@dataclass(frozen=True, slots=True)
class RequestDoor:
    """Turns the arguments of a call into requests. Raises InvalidArgument that names the first bad
    one by its index."""

    tokenizer: Tokenizer | None
    limits: RequestLimits
    default_params: SamplingParams

    def admit(self, prompts: object, params: object, priority: object) -> list[RequestState]:
        """One request a prompt, in their order; `params` and `priority` are one for all or one a
        prompt, None takes the defaults."""
        parsed = parse_prompts(
            prompts, self.tokenizer, self.limits.vocab_size, self.limits.max_model_len
        )
        all_params = self._one_a_prompt(params, len(parsed))
        priorities = _priorities(priority, len(parsed))
        return [
            RequestState(*request, self.tokenizer)
            for request in zip(parsed, all_params, priorities, strict=True)
        ]

    def _one_a_prompt(self, params: object, num_prompts: int) -> Sequence[SamplingParams]:
        if params is None:
            params = self.default_params
        if isinstance(params, SamplingParams):
            params = [params] * num_prompts
        if not isinstance(params, Sequence) or isinstance(params, str):
            raise InvalidArgument(
                f"sampling_params must be SamplingParams or a list of them, got {describe(params)}"
            )
        if len(params) != num_prompts:
            raise InvalidArgument(
                f"{num_prompts} prompts need one SamplingParams or {num_prompts}, got {len(params)}"
            )
        for idx, item in enumerate(params):
            self._check_params(f"sampling_params[{idx}]", item)
        return params

    def _check_params(self, label: str, params: object) -> None:
        if not isinstance(params, SamplingParams):
            raise InvalidArgument(f"{label} must be SamplingParams, got {describe(params)}")
        if params.logprobs is not None and params.logprobs > self.limits.max_logprobs:
            raise InvalidArgument(
                f"{label}: logprobs={params.logprobs} is more than "
                f"max_logprobs={self.limits.max_logprobs}; raise it with LLM(max_logprobs=...)"
            )
        for token_id in params.stop_token_ids or ():
            if token_id >= self.limits.vocab_size:
                raise InvalidArgument(
                    f"{label}: stop_token_ids has {token_id}, outside the model's vocabulary "
                    f"(0 to {self.limits.vocab_size - 1})"
                )
        if self.tokenizer is None and params.stop:
            raise InvalidArgument(
                f"{label}: stop strings need a tokenizer, and the model has no tokenizer.json; "
                f"use stop_token_ids"
            )


def _priorities(priority: object, num_prompts: int) -> list[int]:
    if not isinstance(priority, Sequence):
        one = 0 if priority is None else integer("priority", priority, INT32_MIN)
        return [one] * num_prompts
    if len(priority) != num_prompts:
        raise InvalidArgument(
            f"priority must be a list with one integer for each of the {num_prompts} prompts, "
            f"got {describe(priority)}"
        )
    return [integer(f"priority[{idx}]", value, INT32_MIN) for idx, value in enumerate(priority)]
