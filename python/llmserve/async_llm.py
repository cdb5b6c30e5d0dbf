"""`LLM` for event loops: async generators on the same engine."""

import asyncio
import logging
import os
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from contextlib import AbstractContextManager, aclosing, contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from llmserve.beam_search import BeamSearchOutput
from llmserve.beam_search_params import BeamSearchParams
from llmserve.chat.chat_messages import Conversation
from llmserve.chat.chat_template import chat_request
from llmserve.chat.tool_schema import Tool
from llmserve.common.arguments import describe, text
from llmserve.common.text_threads import MAX_SHORT_SIZE, on_text_thread
from llmserve.common.vllm_arguments import check_method_arguments
from llmserve.errors import InternalError, InvalidArgument
from llmserve.llm_base import LLMBase
from llmserve.outputs import RequestOutput
from llmserve.pooling_outputs import EmbeddingRequestOutput, PoolingRequestOutput
from llmserve.pooling_params import (
    PoolingConfig,
    PoolingParams,
    check_task,
)
from llmserve.prompts import Prompts, SinglePrompt
from llmserve.requests.async_stream import AsyncStream
from llmserve.requests.beam_search_state import BeamSearchState
from llmserve.requests.loop_waker import LoopWaker
from llmserve.requests.pooling_state import PoolingState
from llmserve.requests.prompt_parser import chat_prompts
from llmserve.requests.state import RequestState
from llmserve.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from llmserve.model_config import ModelConfig, VllmConfig

# Requests of more characters (or token ids) are tokenized and checked on a thread: the tokenizers
# library takes about a microsecond a character, and an event loop should not stand still for more
# than a few milliseconds.
_MAX_SIZE_IN_LOOP = 4096

# Requests whose names `trace` knows: as many as the engine's trace holds.
_MAX_NUM_NAMES = 4096

_State = TypeVar("_State", bound=RequestState)

_log = logging.getLogger(__name__)


_Output = TypeVar("_Output")


class Answer(Generic[_Output]):
    """An output that is awaited, or read by `async for` as vLLM's users do. Each runs the request
    anew."""

    def __init__(self, run: Callable[[], Coroutine[Any, Any, _Output]]) -> None:
        self._run = run

    def __await__(self) -> Generator[Any, None, _Output]:
        return self._run().__await__()

    async def __aiter__(self) -> AsyncIterator[_Output]:
        yield await self._run()


class AsyncLLM(LLMBase):
    """`LLM` for asyncio: the same arguments, the same engine, the same tokens.

    Requests run side by side in the engine's continuous batches, in scripts, servers and notebook
    cells alike. Cancelling the task that reads a request, or leaving its loop, aborts it: its
    blocks are free after the running step. A reader who falls behind holds nothing up and then
    finds what came meanwhile in one output. One AsyncLLM may serve several event loops, each in a
    thread of its own.

    >>> import asyncio
    >>> from llmserve import AsyncLLM, SamplingParams, demo_model_path
    >>> async def main():
    ...     async with AsyncLLM(demo_model_path()) as llm:
    ...         async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=8)):
    ...             pass
    ...     return len(output.outputs[0].token_ids)
    >>> asyncio.run(main())
    8
    """

    _default_max_stall_ms = 1000
    _spreads_prompts = False

    async def generate(
        self,
        prompt: SinglePrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        prompt_text: None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continues one prompt and yields an output whenever there is something new.

        prompt, sampling_params and priority are those of `LLM.stream`; each output holds everything
        so far, or what SamplingParams.output_kind says. request_id: the output's, None takes a new
        one; one that is running is refused. Raises InvalidArgument, NotSupported, or QueueFull
        where max_num_queued_reqs requests wait already.
        """
        self._open_engine()
        check_method_arguments(
            "generate",
            prompt_text=prompt_text,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            data_parallel_rank=data_parallel_rank,
        )
        admitted = await self.admit(prompt, sampling_params, priority=priority)
        state = _only("generate", admitted)
        kind = state.params.output_kind
        is_streamed = kind is not RequestOutputKind.FINAL_ONLY
        async with aclosing(self._run(state, request_id, is_streamed)) as news:
            async for _ in news:
                yield state.output(kind)

    async def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_template: str | os.PathLike[str] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answers one conversation as `generate` continues a prompt. The arguments are those of
        `LLM.chat`; the template runs on a thread.

        >>> import asyncio
        >>> from llmserve import AsyncLLM, SamplingParams, demo_model_path
        >>> async def main():
        ...     messages = [{"role": "user", "content": "Tell me a story."}]
        ...     async with AsyncLLM(demo_model_path()) as llm:
        ...         async for output in llm.chat(messages, SamplingParams(max_tokens=4)):
        ...             pass
        ...     return len(output.outputs[0].token_ids)
        >>> asyncio.run(main())
        4
        """
        request = chat_request(
            add_generation_prompt, continue_final_message, tools, chat_template_kwargs
        )
        tokenizer = self.get_tokenizer()
        rendered = partial(chat_prompts, messages, chat_template, request, tokenizer)
        prompts = await on_text_thread(_size(messages), rendered)
        if len(prompts) != 1:
            raise InvalidArgument(f"chat takes one conversation, got {len(prompts)}")
        outputs = self.generate(prompts[0], sampling_params, request_id, priority=priority)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    def embed(
        self,
        prompt: SinglePrompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
    ) -> Answer[EmbeddingRequestOutput]:
        """One vector of a prompt, as `LLM.embed` gives it: to be awaited, or read by `async for`,
        which gives it once. Cancelling the task aborts it."""

        async def answer() -> EmbeddingRequestOutput:
            state = await self._pool(prompt, pooling_params, "embed", request_id)
            return state.embedding_output()

        return Answer(answer)

    def encode(
        self,
        prompt: SinglePrompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: None = None,
        trace_headers: Mapping[str, str] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        pooling_task: str | None = None,
    ) -> Answer[PoolingRequestOutput]:
        """What the model makes of a prompt, as `LLM.encode` gives it: to be awaited, or read by
        `async for`."""
        check_method_arguments(
            "encode",
            lora_request=lora_request,
            trace_headers=trace_headers,
            tokenization_kwargs=tokenization_kwargs,
        )
        task = pooling_task
        if task is None and isinstance(pooling_params, PoolingParams):
            task = pooling_params.task
        checked = check_task("pooling_task", "token_embed" if task is None else task)

        async def answer() -> PoolingRequestOutput:
            return (await self._pool(prompt, pooling_params, checked, request_id)).pooling_output()

        return Answer(answer)

    async def beam_search(
        self, prompt: SinglePrompt, params: BeamSearchParams, request_id: str | None = None
    ) -> BeamSearchOutput:
        """The most likely continuations of a prompt, as `LLM.beam_search` finds them."""
        state = _only("beam_search", await self.admit_beam_search(prompt, params))
        await self._finish(state, request_id)
        return state.beam_output()

    async def _pool(
        self, prompt: object, params: object, task: str, request_id: str | None
    ) -> PoolingState:
        state = _only(task, await self.admit_pooling(prompt, params, task))
        await self._finish(state, request_id)
        return state

    async def admit_pooling(
        self, prompts: object, params: object, task: str
    ) -> Sequence[PoolingState]:
        """As `admit`, of requests for hidden states: task is one of `encode`."""
        self._open_engine()
        config = PoolingConfig()
        if task == "embed":
            config = self.pooling_config()
        admit = partial(self._admission.admit_pooling, prompts, params, task, config)
        return await _admitted(admit, _size(prompts))

    async def _finish(self, state: RequestState, request_id: str | None) -> None:
        async with aclosing(self._run(state, request_id, is_streamed=False)) as news:
            async for _ in news:
                pass

    async def admit(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        resumed_token_ids: Sequence[int] = (),
        hand_over_ticket: str = "",
    ) -> Sequence[RequestState]:
        """The first half of `generate`, for servers: checks requests, one a prompt, and tokenizes
        them, queues nothing. `running` is the second half. resumed_token_ids: tokens that were
        generated and given out before, by this engine or another one of its numerics_class, after
        which the only request goes on as if it had never ended; its seed has to be given.
        hand_over_ticket: of `HandOver.ticket`, an own one to keep the only request's blocks for
        another engine, or another's to fetch them."""
        admit = partial(
            self._admission.admit,
            prompts,
            sampling_params,
            priority,
            resumed_token_ids,
            self._blocks_of(hand_over_ticket),
        )
        return await _admitted(
            admit, _size(prompts) + _params_size(sampling_params), _has_grammar(sampling_params)
        )

    async def admit_beam_search(
        self, prompts: Prompts, params: BeamSearchParams, skip_special_tokens: bool = True
    ) -> Sequence[BeamSearchState]:
        """As `admit`, of beam searches. skip_special_tokens: of their `completions`."""
        self._open_engine()
        admit = partial(self._admission.admit_beam_search, prompts, params, skip_special_tokens)
        return await _admitted(admit, _size(prompts))

    @contextmanager
    def running(
        self,
        state: RequestState,
        request_id: str | None,
        is_streamed: bool,
        has_news: asyncio.Event | None = None,
    ) -> Iterator[AsyncStream]:
        """Within it an admitted request runs; leaving aborts it if it is not finished. has_news
        is set whenever its state has changed or, if not streamed, at its end; one may serve
        several requests. Raises QueueFull, InvalidArgument."""
        stream = AsyncStream(self._runner, state, has_news)
        try:
            with self._waker.watch():
                self._start(stream, request_id, is_streamed)
                yield stream
        finally:
            self._end(stream)

    def watched(self) -> AbstractContextManager[None]:
        """Within it the running loop stays ready for events while nothing runs: for servers, of
        which not every request has to make it so."""
        return self._waker.watch()

    async def _run(
        self, state: RequestState, request_id: str | None, is_streamed: bool
    ) -> AsyncGenerator[None, None]:
        """Runs a request; yields whenever its state has changed or, if not streamed, at its end."""
        with self.running(state, request_id, is_streamed) as stream:
            is_finished = False
            while not is_finished:
                await stream.wait()
                is_finished = state.is_finished  # now: more may come while the reader is away
                if is_finished or is_streamed:
                    yield

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests, whoever reads them: their last output has finish_reason "abort" and what
        they had so far. Ids that are not running are ignored."""
        engine = self._open_engine()
        for name in [request_id] if isinstance(request_id, str) else request_id:
            state = self._running.get(text("request_id", name))
            if state is not None:
                engine.abort(state.request_id)

    async def sleep(self, level: int = 1) -> None:
        """As `LLM.sleep`."""
        await asyncio.to_thread(self._sleep, level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """As `LLM.wake_up`."""
        await asyncio.to_thread(self._wake_up, tags)

    async def is_sleeping(self) -> bool:
        """Whether `wake_up` has something to get back."""
        return self._open_engine().is_sleeping

    async def reset_prefix_cache(self) -> bool:
        """Forgets the cached blocks that no running request uses. True: it cannot fail."""
        self._open_engine().reset_prefix_cache()
        return True

    async def check_health(self) -> None:
        """Raises InternalError that says why the engine stopped, if it did."""
        if self.failure is not None:
            raise InternalError(self.failure)

    @property
    def is_running(self) -> bool:
        """Whether the engine takes requests."""
        return not self.errored

    @property
    def is_stopped(self) -> bool:
        """Whether it takes none any more."""
        return self.errored

    @property
    def dead_error(self) -> InternalError:
        """What `check_health` raises of an engine that has stopped."""
        return InternalError(self.failure or "the engine runs")

    async def get_model_config(self) -> "ModelConfig":
        """What is known of the model."""
        return self.model_config

    async def get_vllm_config(self) -> "VllmConfig":
        """The engine's own sizes: model_config, scheduler_config, cache_config."""
        return self.vllm_config

    async def start_profile(self) -> None:
        """As `LLM.start_profile`."""
        self._start_profile()

    async def stop_profile(self) -> None:
        """As `LLM.stop_profile`; the file is written on a thread."""
        await asyncio.to_thread(self._stop_profile)

    async def do_log_stats(self) -> None:
        """Logs the counters."""
        _log.info("%r", self.get_metrics())

    async def __aenter__(self) -> "AsyncLLM":
        self._open_engine()
        return self

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)

    def _request_names(self) -> Mapping[str, int]:
        return dict(self._names)

    def _begin(self) -> None:
        self._names: dict[str, int] = {}  # that users gave, of late
        self._waker = LoopWaker(self._runner.engine, self._runner.router)
        self._running: dict[str, RequestState] = {}  # by the name that their users know
        self._naming = threading.Lock()

    def _start(self, stream: AsyncStream, request_id: str | None, is_streamed: bool) -> None:
        """Queues the request and gives it its name."""
        if request_id is not None and not text("request_id", request_id):
            raise InvalidArgument("request_id is empty; leave it out for a new one")
        with self._naming:
            if request_id in self._running:
                raise InvalidArgument(
                    f"request_id {describe(request_id)} is running; use another, or None"
                )
            stream.start(is_streamed)
            name = request_id or str(stream.state.request_id)
            while name in self._running:  # somebody's own name is this number
                name += "'"
            stream.state.name = name
            self._running[name] = stream.state
            if request_id is not None:
                self._names[name] = stream.state.request_id
                if len(self._names) > _MAX_NUM_NAMES:
                    del self._names[next(iter(self._names))]

    def _end(self, stream: AsyncStream) -> None:
        state = stream.state
        if stream.close():
            _log.info(
                "request %s aborted after %d tokens: its reader left",
                state.name,
                state.num_generation_tokens,
            )
        if self._running.get(state.name) is state:
            del self._running[state.name]


async def _admitted(
    admit: Callable[[], list[_State]], size: int, has_grammar: bool = False
) -> list[_State]:
    if has_grammar and size <= MAX_SHORT_SIZE:
        # Waits for the compiler, at times for seconds, in which other texts are to get on.
        return await asyncio.to_thread(admit)
    takes_long = has_grammar or size > _MAX_SIZE_IN_LOOP
    return await on_text_thread(size, admit) if takes_long else admit()


def _only(call: str, states: Sequence[_State]) -> _State:
    if len(states) != 1:
        raise InvalidArgument(f"{call} takes one prompt, got {len(states)}; call it for each")
    return states[0]


def _has_grammar(params: object) -> bool:
    return isinstance(params, SamplingParams) and params.structured_outputs is not None


def _params_size(params: object) -> int:
    """Of what is tokenized and checked beside the prompts."""
    if not isinstance(params, SamplingParams):
        return 0
    lists = (params.bad_words, params.stop_token_ids, params.allowed_token_ids)
    return sum(_size(list(items)) for items in lists if items)


def _size(prompts: object) -> int:
    """Characters or token ids, of all prompts together."""
    if isinstance(prompts, Mapping):
        token_ids = prompts.get("prompt_token_ids")  # a text beside them is only handed through
        parts = prompts.values() if token_ids is None else (token_ids,)
        return max(map(_size, parts), default=0)
    if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
        return sum(map(_size, prompts))
    return len(prompts) if isinstance(prompts, Sized) else 0
