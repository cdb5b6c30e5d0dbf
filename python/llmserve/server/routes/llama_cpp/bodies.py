"""What clients of llama.cpp's server send. A value of None is one that was not given."""

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from llmserve.server.routes.bodies import Count, MaxTokens, Strings, TokenIds
from llmserve.server.routes.llama_fields import FIELDS

if TYPE_CHECKING:
    NeutralBody = msgspec.Struct
else:
    NeutralBody = msgspec.defstruct(
        "NeutralBody",
        [(name, known.kind | None, None) for name, known in FIELDS.items()],
        kw_only=True,
    )


class LlamaCompletionBody(NeutralBody, forbid_unknown_fields=True, kw_only=True):
    """POST /completion."""

    # A text, token ids, or a list of either
    prompt: str | list[str | int | TokenIds]
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
    # [[token id, bias], ...], or as OpenAI has it; false bans the token
    logit_bias: dict[str, float] | list[tuple[int, float | bool]] | None = None
    # Log-probabilities of so many of the most likely tokens, and of the sampled one
    n_probs: Count | None = None
    # In GBNF or Lark, or a JSON schema
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    return_tokens: bool | None = None
    # False: the prefix cache is not read
    cache_prompt: bool | None = None
    # Milliseconds that the request may take
    t_max_predict_ms: Annotated[int, Meta(ge=0)] | None = None
