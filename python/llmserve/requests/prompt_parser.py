"""Every form of a prompt brought to one: token ids or embeddings, which the engine then checks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from llmserve import _core
from llmserve.chat.chat_template import ChatRequest
from llmserve.common.arguments import describe, integer, refuse_unknown, text, unicode_text
from llmserve.errors import InvalidArgument, LLMServeError, NotSupported, PromptTooLong
from llmserve.prompts import SinglePrompt, SupportsDLPack, TokensPrompt
from llmserve.tokenization.length_bound import LengthBound
from llmserve.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:  # NumPy's import takes longer than the rest of the package
    import numpy.typing as npt


# The longest token of any vocabulary in use has more: a text of fewer may well fit, and what
# min_num_tokens says of it is not worth its time.
_MIN_CHARACTERS_A_TOKEN = 16

# Keys of vLLM's prompts.
_NOT_HERE = {
    **dict.fromkeys(
        ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"), "models take text alone"
    ),
    **dict.fromkeys(("encoder_prompt", "decoder_prompt"), "models with an encoder are not there"),
    "token_type_ids": "models for pairs of texts are not there",
}
_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds", "cache_salt")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready for the engine."""

    text: str | None
    token_ids: list[int]  # [T]; empty where there are embeds
    cache_salt: str = ""
    embeds: _core.PromptEmbeds | None = None  # [T, E]


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What has to be known of prompts before they are tokens."""

    max_model_len: int
    takes_embeds: bool = False
    num_new_tokens: int = 1  # that max_model_len has to hold besides the prompt
    length_bound: LengthBound | None = None  # of texts; None: without a tokenizer


def parse_prompts(
    items: Sequence[object],
    tokenizer: Tokenizer | None,
    limits: PromptLimits,
    truncations: Sequence[int | None] | None = None,
) -> list[Prompt]:
    """Every prompt tokenized. truncations: how many of its last tokens each keeps;
    None: all, -1: what fits.

    Raises InvalidArgument that names the prompt by its index.
    """
    kept = truncations or [None] * len(items)
    drafts = [_draft(prompt_label(idx, len(items)), item) for idx, item in enumerate(items)]
    for idx, (draft, num_kept) in enumerate(zip(drafts, kept, strict=True)):
        if draft.token_ids is None and num_kept is None:
            check_text(prompt_label(idx, len(items)), draft.text or "", limits)
    encoded = iter(_encode([d.text for d in drafts if d.token_ids is None], tokenizer))
    result = []
    for idx, (draft, num_kept) in enumerate(zip(drafts, kept, strict=True)):
        label = prompt_label(idx, len(items))
        token_ids = next(encoded) if draft.token_ids is None else draft.token_ids
        if num_kept is not None:
            token_ids = _last(label, draft, token_ids, num_kept, limits)
        embeds = None
        if draft.embeds is not None:
            embeds = _take_embeds(label, draft.embeds, limits)
        result.append(Prompt(draft.text, token_ids, draft.cache_salt, embeds))
    return result


def chat_prompts(
    messages: object, chat_template: object, request: ChatRequest, tokenizer: Tokenizer
) -> list[SinglePrompt]:
    """A prompt a conversation, with its text to be handed through. Raises InvalidArgument."""
    texts, _ = tokenizer.render_chat(messages, chat_template, request)
    return [
        TokensPrompt(prompt=text, prompt_token_ids=token_ids)
        for text, token_ids in zip(texts, tokenizer.encode_chat(texts), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Draft:
    text: str | None
    token_ids: list[int] | None  # None: to be made from the text
    cache_salt: str
    embeds: object | None = None


def prompt_label(idx: int, num_prompts: int) -> str:
    """What messages call one of a call's prompts; as the engine's do."""
    return f"prompts[{idx}]" if num_prompts > 1 else "prompt"


def split_prompts(prompts: object) -> Sequence[object]:
    """One entry a prompt: a flat list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if _is_array(prompts):
        array = _to_numpy("prompts", prompts)
        return list(array) if array.ndim == 2 else [array]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise InvalidArgument(
            "prompts must be a string, a list of token ids, a dict with 'prompt' or "
            f"'prompt_token_ids', or a list of them, got {describe(prompts)}"
        )
    if not prompts:
        raise InvalidArgument("prompts is empty; give at least one prompt of at least one token")
    return [prompts] if _is_integer(prompts[0]) else prompts


def _last(
    label: str, draft: _Draft, token_ids: list[int], num_kept: int, limits: PromptLimits
) -> list[int]:
    if draft.embeds is not None:
        raise InvalidArgument(
            f"{label}: truncate_prompt_tokens is for token ids, and prompt_embeds have none"
        )
    if num_kept == -1:
        num_kept = limits.max_model_len - limits.num_new_tokens
    return token_ids[-num_kept:]


def _is_integer(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool) and not _is_array(value)


def _is_array(value: object) -> TypeGuard[SupportsDLPack]:
    return hasattr(value, "__dlpack__")


def _to_numpy(label: str, array: SupportsDLPack) -> "npt.NDArray[Any]":
    import numpy

    if isinstance(array, numpy.ndarray):
        return array
    try:
        return numpy.asarray(_core.Array(_detached(array)))
    except LLMServeError as error:
        raise type(error)(f"{label}: {error}") from None


def _detached(array: Any) -> Any:
    """A tensor of torch's without what it keeps for gradients, which forbids to export it."""
    return array.detach() if getattr(array, "requires_grad", False) else array


def _draft(label: str, item: object) -> _Draft:
    if isinstance(item, str):
        return _Draft(item, None, "")
    if isinstance(item, Mapping):
        return _draft_of_mapping(label, item)
    return _Draft(None, _token_ids(label, item), "")


def _draft_of_mapping(label: str, item: Mapping[object, object]) -> _Draft:
    for key, reason in _NOT_HERE.items():
        if item.get(key):
            raise NotSupported(f"{label}[{key!r}] is not supported: {reason}; leave it out")
    refuse_unknown(label, [str(key) for key in item if key not in _NOT_HERE], _KEYS)
    salt = item.get("cache_salt")
    prompt, token_ids = item.get("prompt"), item.get("prompt_token_ids")
    embeds = _detached(item.get("prompt_embeds"))
    if prompt is None and token_ids is None and embeds is None:
        raise InvalidArgument(f"{label} needs 'prompt' or 'prompt_token_ids', got {describe(item)}")
    if embeds is not None:
        if token_ids is not None:
            raise InvalidArgument(f"{label} has 'prompt_token_ids' and 'prompt_embeds'; give one")
        shown = None if prompt is None else text(f"{label}['prompt']", prompt)
        return _Draft(shown, [], "", embeds)
    return _Draft(
        None if prompt is None else text(f"{label}['prompt']", prompt),
        None if token_ids is None else _token_ids(f"{label}['prompt_token_ids']", token_ids),
        "" if salt is None else unicode_text(f"{label}['cache_salt']", salt),
    )


def _token_ids(label: str, value: object) -> list[int]:
    if _is_array(value):
        array = _to_numpy(label, value)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise InvalidArgument(
                f"{label} must be an integer array of one dimension, "
                f"got {array.dtype} of shape {array.shape}"
            )
        ids: list[int] = array.tolist()
        return ids
    if not _is_sequence(value):
        raise InvalidArgument(f"{label} must be a string or token ids, got {describe(value)}")
    if set(map(type, value)) <= {int}:
        return list(value)
    return [
        integer(f"{label}[{idx}]", token_id, -(2**63), 2**63 - 1)
        for idx, token_id in enumerate(value)
    ]


def _is_sequence(value: object) -> TypeGuard[Sequence[int]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _encode(texts: list[str | None], tokenizer: Tokenizer | None) -> list[list[int]]:
    given = [text for text in texts if text is not None]
    if not given:
        return []
    if tokenizer is None:
        raise InvalidArgument(
            "the model has no tokenizer, so that prompts must be token ids; for text pass "
            "LLM(..., tokenizer=<folder with tokenizer.json>), without skip_tokenizer_init"
        )
    return tokenizer.encode_batch(given)


def _take_embeds(label: str, array: object, limits: PromptLimits) -> _core.PromptEmbeds:
    if not limits.takes_embeds:
        raise InvalidArgument(
            f"{label}['prompt_embeds'] is taken by LLM(..., enable_prompt_embeds=True) alone"
        )
    return _core.PromptEmbeds(f"{label}['prompt_embeds']", array)


def check_text(label: str, text: str, limits: PromptLimits) -> None:
    """Before the text is tokenized: raises PromptTooLong if it cannot fit however that ends."""
    bound = limits.length_bound
    if bound is None or len(text) <= _MIN_CHARACTERS_A_TOKEN * limits.max_model_len:
        return
    num_tokens = bound.min_num_tokens(text)
    if num_tokens + limits.num_new_tokens > limits.max_model_len:
        new_token = " and at least one new token" if limits.num_new_tokens else ""
        raise PromptTooLong(
            f"{label} has at least {num_tokens} tokens, but max_model_len={limits.max_model_len} "
            f"has to hold the prompt{new_token}; shorten it or raise max_model_len"
        )
