"""The offline entry point: a model, and prompts in batches."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from llmserve.beam_search import BeamSearchOutput
from llmserve.beam_search_params import BeamSearchParams
from llmserve.chat.chat_messages import Conversation
from llmserve.chat.chat_template import chat_request
from llmserve.chat.tool_schema import Tool
from llmserve.common.arguments import describe, text
from llmserve.common.vllm_arguments import check_method_arguments
from llmserve.errors import InvalidArgument
from llmserve.llm_base import LLMBase
from llmserve.outputs import RequestOutput, RequestOutputs
from llmserve.pooling_outputs import EmbeddingRequestOutput, PoolingRequestOutput
from llmserve.pooling_params import (
    PoolingConfig,
    PoolingParams,
    check_task,
    task_not_supported,
)
from llmserve.prompts import Prompts, SinglePrompt
from llmserve.requests.enqueued import EnqueuedRequests
from llmserve.requests.progress import Progress, UseTqdm, check_use_tqdm
from llmserve.requests.prompt_parser import chat_prompts
from llmserve.requests.state import RequestState
from llmserve.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from llmserve.llm_engine import LLMEngine

_MAX_ID_DIGITS = 18  # of what fits in the engine's 64 bits


class LLM(LLMBase):
    """A model, loaded, with an engine of its own that runs prompts in continuous batches.

    model: a Hugging Face checkpoint directory (config.json, *.safetensors, tokenizer.json), a
    .safetensors file in one, a .gguf file with all that there is to a model, or the id of a model
    on the Hugging Face Hub (`pip install 'llmserve[hub]'`), of which revision is a branch, tag or
    commit and download_dir the cache. The other arguments are options of the engine, which
    help(LLM.__init__) and docs/engine-options.md describe: in which type it computes and what it
    rounds (dtype, quantization, device), how much memory its KV cache takes, what bounds a step
    and who runs first. What ends a text is told by generation_config.json, or else config.json, and
    by the tokenizer's eos_token.

    Several LLMs may live in one process; every method may be called from any thread. Ctrl-C ends a
    call and leaves the LLM usable. Raises InvalidArgument, NotSupported, CorruptFile or
    ResourceExhausted; arguments of features that are not there yet are refused by name.

    >>> from llmserve import LLM, SamplingParams, demo_model_path
    >>> with LLM(demo_model_path()) as llm:
    ...     outputs = llm.generate("Once upon a time", SamplingParams(max_tokens=8), use_tqdm=False)
    >>> outputs[0].outputs[0].finish_reason
    'length'
    """

    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        prompt_token_ids: Prompts | None = None,
    ) -> list[RequestOutput]:
        """Continues every prompt and returns the outputs in the prompts' order.

        prompts: a text, a list of token ids or integer array [T], a dict with "prompt" or
        "prompt_token_ids" (and "cache_salt"), or a list of them. sampling_params: one for all or
        one a prompt; None takes get_default_sampling_params(). priority: one a prompt, lower runs
        earlier under scheduling_policy="priority"; under others it must be 0.

        prompt_token_ids is an older name of vLLM's for prompts that are token ids.

        Requests that may generate more are given to the engine first, those that may generate the
        same in the prompts' order: else the last to begin could run on in a nearly empty batch.

        No prompts have no outputs. use_tqdm: True, False, or what makes a bar, called as tqdm is.
        A bad prompt or parameter is refused (InvalidArgument, NotSupported) before anything runs.
        What goes wrong for one request later on concerns that request alone: its output has
        finish_reason "error" and says why in `error`, and the others are complete.
        """
        self._open_engine()
        _check("generate", use_tqdm, lora_request, tokenization_kwargs)
        if prompt_token_ids is not None:
            if prompts is not None:
                raise InvalidArgument("generate has prompts and prompt_token_ids; give one of them")
            prompts = prompt_token_ids
        if _is_none(prompts):
            return RequestOutputs()
        states = self._admission.admit(prompts, sampling_params, priority)
        self._run(sorted(states, key=lambda state: -state.core_params.max_tokens), use_tqdm)
        return RequestOutputs(state.output() for state in states)

    def embed(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """One vector a prompt, in their order: the final-normed hidden state of the last token, or
        the mean or the first one where the checkpoint's sentence-transformers files say so, brought
        to an L2 norm of 1. `outputs.embedding` has it as numbers, `outputs.data` in place.
        truncate_prompt_tokens: that of all pooling_params.

        >>> from llmserve import LLM, demo_model_path
        >>> with LLM(demo_model_path()) as llm:
        ...     (output,) = llm.embed("Once upon a time", use_tqdm=False)
        >>> round(sum(x * x for x in output.outputs.embedding), 3)
        1.0
        """
        self._open_engine()
        _check("embed", use_tqdm, lora_request, tokenization_kwargs)
        if _is_none(prompts):
            return []
        params = _truncated(pooling_params, truncate_prompt_tokens)
        states = self._admission.admit_pooling(prompts, params, "embed", self.pooling_config())
        self._run(states, use_tqdm)
        return [state.embedding_output() for state in states]

    def encode(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
    ) -> list[PoolingRequestOutput]:
        """What the model makes of each prompt, in float32: the last hidden states [T, E] by
        default, or what pooling_task (or PoolingParams.task) says. An answer of more than 1 GiB is
        refused with the arithmetic (ResourceExhausted).

        >>> from llmserve import LLM, demo_model_path
        >>> with LLM(demo_model_path()) as llm:
        ...     (output,) = llm.encode([5, 6, 7], use_tqdm=False)
        >>> output.outputs.data.shape[0]
        3
        """
        self._open_engine()
        _check("encode", use_tqdm, lora_request, tokenization_kwargs)
        if _is_none(prompts):
            return []
        task = pooling_task
        if task is None and isinstance(pooling_params, PoolingParams):
            task = pooling_params.task
        task = check_task("pooling_task", "token_embed" if task is None else task)
        config = PoolingConfig()
        if task == "embed":
            config = self.pooling_config()
        params = _truncated(pooling_params, truncate_prompt_tokens)
        states = self._admission.admit_pooling(prompts, params, task, config)
        self._run(states, use_tqdm)
        return [state.pooling_output() for state in states]

    def classify(self, *_arguments: object, **_keywords: object) -> NoReturn:
        """Not there yet: raises NotSupported."""
        raise task_not_supported("classify")

    def score(self, *_arguments: object, **_keywords: object) -> NoReturn:
        """Not there yet: raises NotSupported."""
        raise task_not_supported("score")

    def reward(self, *_arguments: object, **_keywords: object) -> NoReturn:
        """Not there yet: raises NotSupported."""
        raise task_not_supported("reward")

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The most likely continuations of each prompt that a search of beam_width finds, best
        first.

        At every token each of beam_width continuations proposes its 2 * beam_width most likely next
        tokens. Those that end the text are set aside, and the best beam_width of the others go on;
        at the end, or after max_tokens, all are ranked. As vLLM does it, but in the engine: beams
        share their cache blocks, and no Python runs between tokens.

        >>> from llmserve import LLM, BeamSearchParams, demo_model_path
        >>> with LLM(demo_model_path()) as llm:
        ...     (output,) = llm.beam_search("Once upon", BeamSearchParams(3, max_tokens=4))
        >>> len(output.sequences)
        3
        """
        self._open_engine()
        _check("beam_search", use_tqdm, lora_request, None)
        check_method_arguments("beam_search", concurrency_limit=concurrency_limit)
        if _is_none(prompts):
            return []
        states = self._admission.admit_beam_search(prompts, params)
        self._run(states, use_tqdm)
        return [state.beam_output() for state in states]

    def _run(self, states: Sequence[RequestState], use_tqdm: UseTqdm) -> None:
        """Runs requests to their end."""
        progress = Progress(len(states), use_tqdm)
        try:
            for state in self._runner.run(states, is_streamed=False):
                if state.is_finished:
                    progress.finish(state)
        finally:
            progress.close()

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: None = None,
        chat_template: str | os.PathLike[str] | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        mm_processor_kwargs: Mapping[str, object] | None = None,
    ) -> list[RequestOutput]:
        """Answers a conversation, or a list of them, as `generate` continues prompts.

        messages: dicts with "role" and "content", the content a text or a list of text parts. The
        model's chat template makes the prompt of them; chat_template is another one to use, its
        path, or the name of one of the model's. continue_final_message=True (with
        add_generation_prompt=False) goes on with the last message. tools: JSON schemas, or
        functions with type hints and a docstring. chat_template_kwargs: variables of the template,
        such as enable_thinking.

        Raises InvalidArgument that names the message, or says why the template refuses or fails.
        Templates run sandboxed, with limits of time and size.

        >>> from llmserve import LLM, SamplingParams, demo_model_path
        >>> messages = [{"role": "user", "content": "Tell me a story."}]
        >>> with LLM(demo_model_path()) as llm:
        ...     (output,) = llm.chat(messages, SamplingParams(max_tokens=4), use_tqdm=False)
        >>> output.prompt
        '<|im_start|>user\\nTell me a story.<|im_end|>\\n<|im_start|>assistant\\n'
        """
        _check("chat", use_tqdm, lora_request, tokenization_kwargs)
        check_method_arguments(
            "chat",
            chat_template_content_format=chat_template_content_format,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        if _is_none(messages):
            return RequestOutputs()
        request = chat_request(
            add_generation_prompt, continue_final_message, tools, chat_template_kwargs
        )
        prompts = chat_prompts(messages, chat_template, request, self.get_tokenizer())
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self,
        prompt: SinglePrompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> Iterator[RequestOutput]:
        """Continues one prompt and yields an output whenever there is something new.

        Each output holds everything so far, or what SamplingParams.output_kind says. Text is whole
        characters and never taken back. Leaving the loop early aborts the request.

        >>> from llmserve import LLM, RequestOutputKind, SamplingParams, demo_model_path
        >>> params = SamplingParams(max_tokens=4, output_kind=RequestOutputKind.DELTA)
        >>> with LLM(demo_model_path()) as llm:
        ...     sum(len(output.outputs[0].token_ids) for output in llm.stream("Hello", params))
        4
        """
        self._open_engine()
        states = self._admission.admit(prompt, sampling_params, priority)
        if len(states) != 1:
            raise InvalidArgument(f"stream takes one prompt, got {len(states)}; use generate")
        return self._stream(states[0])

    def _stream(self, state: RequestState) -> Iterator[RequestOutput]:
        kind = state.params.output_kind
        is_streamed = kind is not RequestOutputKind.FINAL_ONLY
        for _ in self._runner.run([state], is_streamed):
            if state.is_finished or is_streamed:
                yield state.output(kind)

    def enqueue(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
    ) -> list[str]:
        """Queues every prompt without waiting, and returns their request ids in the prompts' order.

        The arguments are those of `generate`. All prompts are queued or none: QueueFull says that
        max_num_queued_reqs has no room for them. `wait_for_completion` gives the outputs.

        >>> from llmserve import LLM, SamplingParams, demo_model_path
        >>> with LLM(demo_model_path()) as llm:
        ...     ids = llm.enqueue(["Once upon a time", "The fox"], SamplingParams(max_tokens=4))
        ...     outputs = llm.wait_for_completion(use_tqdm=False)
        >>> [output.request_id for output in outputs] == ids
        True
        """
        self._open_engine()
        _check("enqueue", False, lora_request, tokenization_kwargs)
        if _is_none(prompts):
            return []
        states = self._admission.admit(prompts, sampling_params, priority)
        return self._enqueued.add(states)

    def wait_for_completion(self, *, use_tqdm: UseTqdm = True) -> list[RequestOutput]:
        """Waits for all requests that were enqueued and not waited for yet, and returns their
        outputs in the order in which they were enqueued. Ctrl-C ends the wait and nothing else:
        another call waits for the same requests."""
        self._open_engine()
        check_use_tqdm(use_tqdm)
        return self._enqueued.wait(Progress(len(self._enqueued), use_tqdm))

    def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests, enqueued or of other threads: their outputs have finish_reason "abort" and
        what they had so far. Ids of requests that have finished, or never were, are ignored."""
        engine = self._open_engine()
        if not isinstance(request_id, Iterable):
            raise InvalidArgument(f"request_id must be a string, got {describe(request_id)}")
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if text("request_id", name).isdecimal() and len(name) <= _MAX_ID_DIGITS:
                engine.abort(int(name))

    def sleep(self, level: int = 1) -> None:
        """Gives memory back while the model is not needed: at level 1 that of the KV cache, at
        level 2 that of the weights as well. The prefix cache is forgotten. Raises InvalidArgument
        while requests run or wait; until `wake_up`, new ones are refused with it.

        >>> from llmserve import LLM, SamplingParams, demo_model_path
        >>> with LLM(demo_model_path()) as llm:
        ...     llm.sleep(level=2)
        ...     was_asleep = llm.is_sleeping()
        ...     llm.wake_up()
        ...     outputs = llm.generate("The", SamplingParams(max_tokens=4), use_tqdm=False)
        >>> was_asleep, len(outputs[0].outputs[0].token_ids)
        (True, 4)
        """
        self._sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Takes the memory again, or only that of these tags, "weights" and "kv_cache"; awake once
        both are there. Weights are read from the checkpoint anew: the same files give the same
        tokens, bit for bit. Raises ResourceExhausted, CorruptFile, or InvalidArgument where the
        checkpoint has other shapes now; it sleeps on then."""
        self._wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether `wake_up` has something to get back."""
        return self._open_engine().is_sleeping

    def reset_prefix_cache(self) -> bool:
        """Forgets the cached blocks that no running request uses. True: it cannot fail."""
        self._open_engine().reset_prefix_cache()
        return True

    def __enter__(self) -> "LLM":
        self._open_engine()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def llm_engine(self) -> "LLMEngine":
        """This LLM as scripts for vLLM drive it: add_request, step, has_unfinished_requests."""
        from llmserve.llm_engine import LLMEngine  # seldom needed

        return LLMEngine(self)

    def start_profile(self) -> None:
        """From here on what the engine does goes into the file of `stop_profile`. Raises
        InvalidArgument without LLM(profiler_config={"torch_profiler_dir": a folder})."""
        self._start_profile()

    def stop_profile(self) -> None:
        """Writes the steps and requests since `start_profile` for https://ui.perfetto.dev."""
        self._stop_profile()

    def _begin(self) -> None:
        self._enqueued = EnqueuedRequests(self._runner)


def _check(method: str, use_tqdm: object, lora_request: object, kwargs: object) -> None:
    check_use_tqdm(use_tqdm)
    check_method_arguments(method, lora_request=lora_request, tokenization_kwargs=kwargs)


def _truncated(params: object, truncate_prompt_tokens: int | None) -> object:
    """Pooling parameters, all of which keep so many tokens of a prompt; None: what each says."""
    if truncate_prompt_tokens is None:
        return params
    if isinstance(params, Sequence):
        return [_truncated(one, truncate_prompt_tokens) for one in params]
    if params is not None and not isinstance(params, PoolingParams):
        return params  # which is refused
    return replace(params or PoolingParams(), truncate_prompt_tokens=truncate_prompt_tokens)


def _is_none(prompts: object) -> bool:
    """Whether it is a list of no prompts."""
    return isinstance(prompts, list | tuple) and not prompts
