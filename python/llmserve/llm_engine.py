"""The engine of an LLM as scripts for vLLM drive it: requests go in, steps give what came."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmserve.common.arguments import describe, text
from llmserve.common.vllm_arguments import check_method_arguments
from llmserve.errors import InternalError, InvalidArgument
from llmserve.llm_base import LLMBase
from llmserve.model_config import ModelConfig, VllmConfig
from llmserve.outputs import RequestOutput
from llmserve.pooling_outputs import PoolingRequestOutput
from llmserve.pooling_params import PoolingConfig, PoolingParams
from llmserve.prompts import SinglePrompt
from llmserve.requests.pooling_state import PoolingState
from llmserve.requests.state import RequestState
from llmserve.requests.stepped import SteppedRequests
from llmserve.sampling_params import SamplingParams
from llmserve.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llmserve.options.engine_args import EngineArgs


class LLMEngine:
    """An LLM whose requests are added one by one and run while `step` is called. `llm.llm_engine`
    is that of an LLM; from_engine_args makes one with an LLM of its own.

    The engine computes on a thread of its own, between calls of `step` as well.

    >>> from llmserve import EngineArgs, LLMEngine, SamplingParams
    >>> engine = LLMEngine.from_engine_args(EngineArgs(max_model_len=64))
    >>> engine.add_request("a", "The fox", SamplingParams(max_tokens=4))
    >>> while engine.has_unfinished_requests():
    ...     outputs = engine.step()
    >>> len(outputs[0].outputs[0].token_ids)
    4
    """

    def __init__(self, llm: LLMBase) -> None:
        self.llm = llm
        self._requests: SteppedRequests = llm._stepped

    @classmethod
    def from_engine_args(
        cls,
        engine_args: "EngineArgs",
        usage_context: object = None,
        stat_loggers: object = None,
        enable_multiprocessing: bool = False,
    ) -> "LLMEngine":
        """The engine of an LLM with those arguments. The others are vLLM's, and change nothing."""
        return cls(LLMBase.from_engine_args(engine_args))

    def add_request(
        self,
        request_id: str,
        prompt: SinglePrompt,
        params: SamplingParams | PoolingParams | None = None,
        arrival_time: float | None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> None:
        """Queues a request under a name of its own; PoolingParams, of the task "embed" unless they
        say another, ask for hidden states. arrival_time is vLLM's, and the engine's own is taken.
        Raises InvalidArgument, NotSupported or QueueFull."""
        check_method_arguments(
            "add_request",
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
        )
        if not text("request_id", request_id):
            raise InvalidArgument("request_id is empty")
        llm, states = self.llm, list[RequestState]()
        llm._open_engine()
        if isinstance(params, PoolingParams):
            task = params.task or "embed"
            config = llm.pooling_config() if task == "embed" else PoolingConfig()
            states += llm._admission.admit_pooling(prompt, params, task, config)
        else:
            states += llm._admission.admit(prompt, params, priority)
        if len(states) != 1:
            raise InvalidArgument(f"add_request takes one prompt, got {len(states)}")
        self._requests.add(request_id, states[0])

    def step(self) -> list[Any]:
        """Waits until something is new, and gives a RequestOutput or PoolingRequestOutput for each
        request that it is of, as SamplingParams.output_kind says; an empty list where none runs."""
        self.llm._open_engine()
        return [_output(state) for state in self._requests.step()]

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to give."""
        return len(self._requests) > 0

    def get_num_unfinished_requests(self) -> int:
        """Requests that were added and have not finished."""
        return len(self._requests)

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Ends requests, of which `step` gives nothing more. Ids that do not run are ignored."""
        self.llm._open_engine()
        if not isinstance(request_id, Iterable):
            raise InvalidArgument(f"request_id must be a string, got {describe(request_id)}")
        names = [request_id] if isinstance(request_id, str) else request_id
        self._requests.abort(text("request_id", name) for name in names)

    @property
    def model_config(self) -> ModelConfig:
        """What is known of the model."""
        return self.llm.model_config

    @property
    def vllm_config(self) -> VllmConfig:
        """The engine's own sizes: model_config, scheduler_config, cache_config."""
        return self.llm.vllm_config

    def get_model_config(self) -> ModelConfig:
        """The same, as older versions of vLLM ask for it."""
        return self.llm.model_config

    @property
    def tokenizer(self) -> Tokenizer:
        """As get_tokenizer."""
        return self.llm.get_tokenizer()

    def get_tokenizer(self) -> Tokenizer:
        """As `LLM.get_tokenizer`."""
        return self.llm.get_tokenizer()

    def get_metrics(self) -> object:
        """As `LLM.get_metrics`."""
        return self.llm.get_metrics()

    def check_health(self) -> None:
        """Raises InternalError that says why the engine stopped, if it did."""
        if self.llm.failure is not None:
            raise InternalError(self.llm.failure)

    @property
    def errored(self) -> bool:
        """Whether the engine has stopped."""
        return self.llm.errored

    def reset_prefix_cache(self) -> bool:
        """As `LLM.reset_prefix_cache`."""
        self.llm._open_engine().reset_prefix_cache()
        return True

    def sleep(self, level: int = 1) -> None:
        """As `LLM.sleep`."""
        self.llm._sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """As `LLM.wake_up`."""
        self.llm._wake_up(tags)

    def is_sleeping(self) -> bool:
        """As `LLM.is_sleeping`."""
        return self.llm._open_engine().is_sleeping

    def start_profile(self) -> None:
        """As `LLM.start_profile`."""
        self.llm._start_profile()

    def stop_profile(self) -> None:
        """As `LLM.stop_profile`."""
        self.llm._stop_profile()

    def collective_rpc(self, *arguments: object, **keywords: object) -> None:
        """Refused, as by `LLM.collective_rpc`."""
        self.llm.collective_rpc(*arguments, **keywords)

    def apply_model(self, *arguments: object, **keywords: object) -> None:
        """Refused, as by `LLM.apply_model`."""
        self.llm.apply_model(*arguments, **keywords)


def _output(state: RequestState) -> RequestOutput | PoolingRequestOutput:
    if isinstance(state, PoolingState):
        return state.pooling_output()
    return state.output(state.params.output_kind)
