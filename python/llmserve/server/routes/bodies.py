"""What clients send: the fields of each route, with vLLM's beside OpenAI's. A value of None is one
that was not given."""

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from llmserve.sampling_params import SAMPLING_FIELDS
from llmserve.server.routes.llama_fields import FIELDS as LLAMA_FIELDS
from llmserve.server.routes.vllm_fields import FIELDS

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
# Of new tokens; -1: as many as the context has room for, as llama.cpp's clients say it
MaxTokens = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenIds = list[TokenId]
Strings = Annotated[list[Annotated[str, Meta(max_length=4096)]], Meta(max_length=64)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How a stream is written."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    # Refused where it is true: nothing pads the chunks
    include_obfuscation: bool | None = None


class RepetitionDetection(msgspec.Struct, forbid_unknown_fields=True):
    """Ends an output that repeats itself."""

    max_pattern_size: Count = 0
    min_pattern_size: Count = 0
    min_count: Count = 0


if TYPE_CHECKING:
    SamplingBody = msgspec.Struct
    VllmBody = msgspec.Struct
else:
    # Sampling parameters that are passed on as they are, OpenAI's and vLLM's.
    SamplingBody = msgspec.defstruct(
        "SamplingBody",
        [
            (name, known.body | None, None)
            for name, known in SAMPLING_FIELDS.items()
            if known.body is not None
        ],
        kw_only=True,
    )
    neutral = {**LLAMA_FIELDS, **FIELDS}
    VllmBody = msgspec.defstruct(
        "VllmBody",
        [(name, known.kind | None, None) for name, known in neutral.items()],
        bases=(SamplingBody,),
        kw_only=True,
    )


class GenerationBody(VllmBody, forbid_unknown_fields=True, kw_only=True):
    """Fields that completions and chat completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # OpenAI's sampling parameters of which routes or limits know more
    max_tokens: MaxTokens | None = None
    n: int | None = None
    stop: str | Strings | None = None
    logit_bias: dict[str, float] | None = None
    # vLLM's
    stop_token_ids: TokenIds | None = None
    min_tokens: Count | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Strings | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    logprob_token_ids: TokenIds | None = None
    repetition_detection: RepetitionDetection | None = None
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None
    priority: int | None = None
    # The n most likely continuations, instead of n that are drawn
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # llmserve's own: tokens of an answer that broke off, after which it goes on with its seed. The
    # stream has what follows
    resume_token_ids: TokenIds | None = None
    # llmserve's own: of POST /hand_over/tickets, here or elsewhere
    hand_over_ticket: Annotated[str, Meta(max_length=4096)] | None = None
    # What the answer's id ends with; X-Request-Id says it, too
    request_id: Annotated[str, Meta(pattern="^[!-~]{1,128}$")] | None = None
    # How the output is constrained: see constraints.py
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    # The same by the names that vLLM had for it
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # llama.cpp's names: for max_tokens, repetition_penalty, structured_outputs and
    # skip_reading_prefix_cache
    n_predict: MaxTokens | None = None
    repeat_penalty: float | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    cache_prompt: bool | None = None
    # llmserve's own: seconds that the request may take, up to request_timeout
    timeout: float | None = None
    # The tier whose pace a stream has: see the setting `pace`
    service_tier: str | None = None
    # Accepted, and of no effect here
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions."""

    # A text, token ids, or a list of either
    prompt: str | list[str | int | TokenIds]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    best_of: int | None = None
    # Refused unless left out
    suffix: str | None = None
    prompt_embeds: str | list[str] | None = None


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    return_prompt_text: bool | None = None
    add_special_tokens: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    # Refused unless left out: a template of the request's own would be code of the client's
    chat_template: str | None = None
    documents: list[dict[str, Any]] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None


class HandOverBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /hand_over/begun: a ticket of this server."""

    hand_over_ticket: Annotated[str, Meta(max_length=4096)]
    model: str | None = None


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /tokenize: a prompt, or the messages of a conversation."""

    model: str | None = None
    prompt: str | None = None
    # llama.cpp's names for prompt, add_special_tokens, and tokens with their texts
    content: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    # What a prompt is made of in a chat, too
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    # Refused unless left out, as in ChatBody
    chat_template: str | None = None
    documents: list[dict[str, Any]] | None = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /detokenize."""

    tokens: TokenIds
    model: str | None = None


class EmbeddingBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/embeddings."""

    # A text, token ids, or a list of either
    input: str | list[str | int | TokenIds] | None = None
    # vLLM's: a conversation, as the chat template writes it, in the place of input
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    user: str | None = None
    timeout: float | None = None
