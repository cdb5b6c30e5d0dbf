"""Where requests come in: a call's prompts and parameters are all checked before any runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from llmserve import _core
from llmserve.arguments import INT32_MIN, describe, integer
from llmserve.errors import InvalidArgument
from llmserve.prompts import parse_prompts
from llmserve.request_state import RequestState
from llmserve.sampling_params import SamplingParams
from llmserve.tokenizer import Tokenizer
from llmserve.word_tokens import ThinkingTokens, bad_word_token_ids


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the engine takes."""

    vocab_size: int  # V
    max_model_len: int
    max_logprobs: int  # -1: no bound


@dataclass(frozen=True, slots=True)
class RequestDoor:
    """Turns the arguments of a call into requests. Raises InvalidArgument that names the first bad
    one by its index."""

    tokenizer: Tokenizer | None
    limits: RequestLimits
    default_params: SamplingParams
    thinking: ThinkingTokens | None

    def admit(self, prompts: object, params: object, priority: object) -> list[RequestState]:
        """One request a prompt, in their order; `params` and `priority` are one for all or one a
        prompt, None takes the defaults."""
        parsed = parse_prompts(
            prompts, self.tokenizer, self.limits.vocab_size, self.limits.max_model_len
        )
        all_params = self._one_a_prompt(params, len(parsed))
        priorities = _priorities(priority, len(parsed))
        core_params = self._core_params(all_params)
        return [
            RequestState(*request, self.tokenizer)
            for request in zip(parsed, all_params, core_params, priorities, strict=True)
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

    def _core_params(self, all_params: Sequence[SamplingParams]) -> list[_core.SamplingParams]:
        """The engine's structs, one a prompt, checked as far as this side can."""
        bad_words: dict[int, list[list[int]]] = {}  # by identity: often one is for all
        result = []
        for idx, params in enumerate(all_params):
            core = params.to_core(self.limits.max_model_len)
            core.detokenize = core.detokenize and self.tokenizer is not None
            if params.bad_words and self.tokenizer is not None:
                if id(params) not in bad_words:
                    bad_words[id(params)] = bad_word_token_ids(params.bad_words, self.tokenizer)
                core.bad_words = bad_words[id(params)]
            if params.thinking_token_budget is not None and self.thinking is not None:
                core.thinking_budget = self.thinking.budget(params.thinking_token_budget)
            try:
                core.validate()
                core.validate_token_ids(self.limits.vocab_size)
            except InvalidArgument as error:
                raise InvalidArgument(f"sampling_params[{idx}]: {error}") from None
            result.append(core)
        return result

    def _check_params(self, label: str, params: object) -> None:
        if not isinstance(params, SamplingParams):
            raise InvalidArgument(f"{label} must be SamplingParams, got {describe(params)}")
        num_logprobs = self.limits.vocab_size if params.logprobs == -1 else params.logprobs or 0
        if 0 <= self.limits.max_logprobs < num_logprobs:
            raise InvalidArgument(
                f"{label}: logprobs={params.logprobs} is more than "
                f"max_logprobs={self.limits.max_logprobs}; raise it with LLM(max_logprobs=...), "
                f"-1 for no bound"
            )
        if self.tokenizer is None and params.stop:
            raise InvalidArgument(
                f"{label}: stop strings need a tokenizer, and the model has no tokenizer.json; "
                f"use stop_token_ids"
            )
        if self.tokenizer is None and params.bad_words:
            raise InvalidArgument(
                f"{label}: bad_words need a tokenizer, and the model has no tokenizer.json"
            )
        if self.thinking is None and params.thinking_token_budget is not None:
            raise InvalidArgument(
                f"{label}: thinking_token_budget needs to know what opens and ends a section of "
                f"thinking, and the tokenizer has no <think> and </think>; give "
                f"LLM(reasoning_config={{'reasoning_start_str': ..., 'reasoning_end_str': ...}})"
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
