"""What clients of llama.cpp's server send. A value of None is one that was not given."""

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from llmserve.server.routes.bodies import Count, MaxTokens, Strings, TokenId
from llmserve.server.routes.llama_fields import FIELDS

if TYPE_CHECKING:
    NeutralBody = msgspec.Struct
else:
    NeutralBody = msgspec.defstruct(
        "NeutralBody",
        [(name, known.kind | None, None) for name, known in FIELDS.items()],
        kw_only=True,
    )


class PromptObject(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt as an object, which may come with images in llama.cpp."""

    prompt_string: str
    multimodal_data: Any = None  # refused unless left out: models take text alone


class LlamaCompletionBody(NeutralBody, forbid_unknown_fields=True, kw_only=True):
    """POST /completion."""

    # A text, token ids with texts among them, or a list of either
    prompt: str | PromptObject | list[str | int | list[TokenId | str] | PromptObject]
    model: str | None = None
    # New tokens; -1, or none: as many as the context holds
    n_predict: MaxTokens | None = None
    n: int | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_n_sigma: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    stop: Strings | None = None
    # [[token id or text, bias], ...], or {id or text: bias}; false bans, and a text is its tokens
    logit_bias: dict[str, float | bool] | list[tuple[int | str, float | bool]] | None = None
    # Log-probabilities of so many of the most likely tokens, and of the sampled one
    n_probs: Count | None = None
    # In GBNF or Lark, or a JSON schema
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    return_tokens: bool | None = None
    # What of the answer is wanted: names of its fields, inner ones with their path (a/b)
    response_fields: list[str] | None = None
    # False: the prefix cache is not read
    cache_prompt: bool | None = None
    # Milliseconds that the request may take
    t_max_predict_ms: Annotated[int, Meta(ge=0)] | None = None
