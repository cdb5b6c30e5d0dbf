"""Where requests come in: a call's prompts and parameters become requests, which the engine checks
before any runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from llmserve import _core
from llmserve.beam_search_params import BeamSearchParams
from llmserve.common.arguments import INT32_MIN, describe, integer
from llmserve.errors import InvalidArgument, NotSupported, ResourceExhausted
from llmserve.pooling_params import PoolingConfig, PoolingParams
from llmserve.requests.beam_search_state import BeamSearchState
from llmserve.requests.best_of_state import BestOfState
from llmserve.requests.blocks_of import BlocksOf
from llmserve.requests.grammars import Grammars
from llmserve.requests.pooling_state import PoolingState
from llmserve.requests.prompt_parser import (
    PromptLimits,
    parse_prompts,
    prompt_label,
    split_prompts,
)
from llmserve.requests.state import RequestState
from llmserve.requests.word_tokens import ThinkingTokens, bad_word_token_ids
from llmserve.sampling_params import SamplingParams
from llmserve.tokenization.length_bound import LengthBound
from llmserve.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llmserve.requests.processor_classes import ProcessorClasses

_State = TypeVar("_State", bound=RequestState)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What is refused here, where the engine does not see it."""

    max_model_len: int
    scheduling_policy: str
    takes_embeds: bool = False
    length_bound: LengthBound | None = None  # of texts; None: without a tokenizer

    def prompt_limits(self, num_new_tokens: int = 1) -> PromptLimits:
        """Of a prompt that is to be followed by so many tokens at least."""
        return PromptLimits(
            self.max_model_len, self.takes_embeds, num_new_tokens, self.length_bound
        )


@dataclass(slots=True)
class RequestAdmission:
    """Turns the arguments of a call into requests. Raises InvalidArgument, or ResourceExhausted for
    what the KV cache does not hold, that names the first bad one by its index."""

    engine: _core.Engine
    tokenizer: Tokenizer | None
    limits: RequestLimits
    default_params: SamplingParams
    thinking: ThinkingTokens | None
    grammars: Grammars | None  # None without a tokenizer
    processor_classes: "ProcessorClasses | None" = None  # of LLM(logits_processors=[...])

    def admit(
        self,
        prompts: object,
        params: object,
        priority: object,
        resumed_token_ids: Sequence[int] = (),
        blocks_of: BlocksOf | None = None,
    ) -> list[RequestState]:
        """One request a prompt, in their order; `params` and `priority` are one for all or one a
        prompt, None takes the defaults. resumed_token_ids: what the only one goes on after.
        blocks_of: what becomes of the only one's blocks."""
        items = split_prompts(prompts)
        all_params = self._one_a_prompt(params, len(items))
        truncations = [one.truncate_prompt_tokens for one in all_params]
        limits = self.limits.prompt_limits()
        parsed = parse_prompts(items, self.tokenizer, limits, truncations)
        priorities = _priorities(priority, len(parsed))
        self._check_priorities(priorities)
        core_params = self._core_params(all_params)
        states = [
            (RequestState if request[1].best_of is None else BestOfState)(*request, self.tokenizer)
            for request in zip(parsed, all_params, core_params, priorities, strict=True)
        ]
        if resumed_token_ids:
            self._resume(states, resumed_token_ids)
        if blocks_of is not None:
            if len(states) != 1:
                raise InvalidArgument("hand_over_ticket: one prompt is handed over at a time")
            states[0].blocks_of = blocks_of
        self._checked(states)
        if self.processor_classes is not None:
            for state in states:
                more = self.processor_classes.functions(state.prompt.token_ids, state.params)
                state.processors = (*state.processors, *more)
        return states

    def admit_pooling(
        self, prompts: object, params: object, task: str, config: PoolingConfig
    ) -> list[PoolingState]:
        """One pooling request a prompt; `params` is one for all or one a prompt, or None."""
        items = split_prompts(prompts)
        one = PoolingParams() if params is None else params
        all_params: Sequence[Any] = one if isinstance(one, Sequence) else [one] * len(items)
        if len(all_params) != len(items):
            raise InvalidArgument(
                f"{len(items)} prompts need one PoolingParams or {len(items)}, "
                f"got {len(all_params)}"
            )
        core_params = [
            _pooling_to_core(f"pooling_params[{idx}]", params, task, config)
            for idx, params in enumerate(all_params)
        ]
        truncations = [params.truncate_prompt_tokens for params in all_params]
        limits = self.limits.prompt_limits(0)
        parsed = parse_prompts(items, self.tokenizer, limits, truncations)
        return self._checked(list(map(PoolingState, parsed, core_params)))

    def admit_beam_search(
        self, prompts: object, params: object, skip_special_tokens: bool = True
    ) -> list[BeamSearchState]:
        """One beam search a prompt, with the same parameters."""
        if not isinstance(params, BeamSearchParams):
            raise InvalidArgument(f"params must be BeamSearchParams, got {describe(params)}")
        items = split_prompts(prompts)
        parsed = parse_prompts(items, self.tokenizer, self.limits.prompt_limits())
        states = [
            BeamSearchState(prompt, params, self.tokenizer, skip_special_tokens)
            for prompt in parsed
        ]
        return self._checked(states)

    def _resume(self, states: list[RequestState], token_ids: Sequence[int]) -> None:
        if len(states) != 1 or states[0].params.n != 1:
            raise InvalidArgument(
                "resume_token_ids go on with one sequence: give one prompt, and leave n at 1"
            )
        core = states[0].core_params
        text = ""
        if self.tokenizer is not None and core.detokenize:
            text = self.tokenizer.to_core().text_given_out(token_ids, core)
        states[0].resume(token_ids, text)

    def _checked(self, states: list[_State]) -> list[_State]:
        """All requests of a call, if the engine would take each of them."""
        requests = []
        for idx, state in enumerate(states):
            try:
                state.engine_request = state.to_core()
            except InvalidArgument as error:
                label = prompt_label(idx, len(states))
                raise InvalidArgument(f"{label}: {error}") from None
            requests.append(state.engine_request)
        self.engine.check(requests)
        return states

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
        made: dict[int, SamplingParams] = {}  # by identity: often one is for all
        for idx, item in enumerate(params):
            if id(item) not in made:
                made[id(item)] = self._taken(f"sampling_params[{idx}]", item)
        return [made[id(item)] for item in params]

    def _taken(self, label: str, params: object) -> SamplingParams:
        """Parameters as they are now, whatever is assigned to them later."""
        if not isinstance(params, SamplingParams):
            raise InvalidArgument(f"{label} must be SamplingParams, got {describe(params)}")
        try:
            taken = params.checked()
        except InvalidArgument as error:
            raise InvalidArgument(f"{label}: {error}") from None
        self._check_params(label, taken)
        if self.processor_classes is not None:
            self.processor_classes.check(label, taken)
        elif taken.extra_args:
            raise NotSupported(
                f"{label}: extra_args={describe(taken.extra_args)} is read by classes of "
                f"LLM(logits_processors=[...]) alone, and there are none; leave it at None"
            )
        return taken

    def _core_params(self, all_params: Sequence[SamplingParams]) -> list[_core.SamplingParams]:
        """The engine's structs, one a prompt. Parameters that several prompts share are one
        struct."""
        made: dict[int, _core.SamplingParams] = {}  # by identity: often one is for all
        for idx, params in enumerate(all_params):
            if id(params) not in made:
                made[id(params)] = self._to_core(f"sampling_params[{idx}]", params)
        return [made[id(params)] for params in all_params]

    def _to_core(self, label: str, params: SamplingParams) -> _core.SamplingParams:
        core = params.to_core(self.limits.max_model_len)
        core.detokenize = core.detokenize and self.tokenizer is not None
        if params.bad_words and self.tokenizer is not None:
            core.bad_words = bad_word_token_ids(params.bad_words, self.tokenizer)
        if params.thinking_token_budget is not None and self.thinking is not None:
            core.thinking_budget = self.thinking.budget(params.thinking_token_budget)
        if params.structured_outputs is not None and self.grammars is not None:
            try:
                core.grammar = self.grammars.compile(params.structured_outputs)
            except (InvalidArgument, ResourceExhausted) as error:
                raise type(error)(f"{label}: {error}") from None
        return core

    def _check_priorities(self, priorities: Sequence[int]) -> None:
        policy = self.limits.scheduling_policy
        ignored = next(filter(None, priorities), 0)
        if ignored and policy not in (names := _core.policies_with_priority()):
            raise InvalidArgument(
                f"priority={ignored} has no effect under scheduling_policy={policy!r}; leave it at "
                f"0, or start with scheduling_policy={names[0]!r} (llmserve serve "
                f"--scheduling-policy {names[0]})"
            )

    def _check_params(self, label: str, params: SamplingParams) -> None:
        if self.tokenizer is None and params.bad_words:
            raise InvalidArgument(
                f"{label}: bad_words need a tokenizer, and the model has no tokenizer"
            )
        if self.tokenizer is None and params.structured_outputs is not None:
            raise InvalidArgument(
                f"{label}: structured_outputs needs a tokenizer, and the model has no "
                f"tokenizer.json"
            )
        if self.thinking is None and params.thinking_token_budget is not None:
            raise InvalidArgument(
                f"{label}: thinking_token_budget needs to know what opens and ends a section of "
                f"thinking, and the tokenizer has no <think> and </think>; give "
                f"LLM(reasoning_config={{'reasoning_start_str': ..., 'reasoning_end_str': ...}})"
            )


def _pooling_to_core(
    label: str, params: object, task: str, config: PoolingConfig
) -> _core.PoolingParams:
    if not isinstance(params, PoolingParams):
        raise InvalidArgument(f"{label} must be PoolingParams, got {describe(params)}")
    if params.task not in (None, task):
        raise InvalidArgument(f"{label}: task={params.task!r}, but this call's is {task!r}")
    return params.to_core(task, config)


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
