"""The forms in which callers give prompts, brought to one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeGuard, Union

from llmserve import _core
from llmserve.arguments import describe, integer, refuse_unknown, text
from llmserve.chat_template import ChatRequest
from llmserve.errors import InvalidArgument, LLMServeError
from llmserve.tokenizer import Tokenizer

if TYPE_CHECKING:  # NumPy's import takes longer than the rest of the package
    import numpy as np
    import numpy.typing as npt


class SupportsDLPack(Protocol):
    """An array of any library: a NumPy array, a torch tensor …"""

    def __dlpack__(self) -> Any: ...


TokenIds = Union[Sequence[int], "npt.NDArray[np.integer]", SupportsDLPack]


class TextPrompt(TypedDict, total=False):
    """A prompt as text. Requests share cached blocks only within one cache_salt."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids; `prompt` is then only handed through to the output."""

    prompt_token_ids: TokenIds
    prompt: str
    cache_salt: str


SinglePrompt = str | TokenIds | TextPrompt | TokensPrompt
Prompts = SinglePrompt | Sequence[SinglePrompt]

_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready for the engine."""

    text: str | None
    token_ids: list[int]  # [>= 1], each in [0, V)
    cache_salt: str = ""


def parse_prompts(
    prompts: object, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int
) -> list[Prompt]:
    """Every prompt tokenized and checked.

    Raises InvalidArgument that names the prompt by its index.
    """
    items = _split(prompts)
    drafts = [_draft(_label(items, idx), item) for idx, item in enumerate(items)]
    encoded = iter(_encode([d.text for d in drafts if d.token_ids is None], tokenizer))
    result = []
    for idx, draft in enumerate(drafts):
        token_ids = next(encoded) if draft.token_ids is None else draft.token_ids
        _check_token_ids(_label(items, idx), token_ids, vocab_size, max_model_len)
        result.append(Prompt(draft.text, token_ids, draft.cache_salt))
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


def _label(items: Sequence[object], idx: int) -> str:
    return f"prompts[{idx}]" if len(items) > 1 else "prompt"


def _split(prompts: object) -> Sequence[object]:
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


def _is_integer(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool) and not _is_array(value)


def _is_array(value: object) -> TypeGuard[SupportsDLPack]:
    return hasattr(value, "__dlpack__")


def _to_numpy(label: str, array: SupportsDLPack) -> "npt.NDArray[Any]":
    import numpy

    if isinstance(array, numpy.ndarray):
        return array
    try:
        return numpy.asarray(_core.Array(array))
    except LLMServeError as error:
        raise type(error)(f"{label}: {error}") from None


def _draft(label: str, item: object) -> _Draft:
    if isinstance(item, str):
        return _Draft(item, None, "")
    if isinstance(item, Mapping):
        return _draft_of_mapping(label, item)
    return _Draft(None, _token_ids(label, item), "")


def _draft_of_mapping(label: str, item: Mapping[object, object]) -> _Draft:
    refuse_unknown(label, [str(key) for key in item], _KEYS)
    salt = item.get("cache_salt")
    prompt, token_ids = item.get("prompt"), item.get("prompt_token_ids")
    if prompt is None and token_ids is None:
        raise InvalidArgument(f"{label} needs 'prompt' or 'prompt_token_ids', got {describe(item)}")
    return _Draft(
        None if prompt is None else text(f"{label}['prompt']", prompt),
        None if token_ids is None else _token_ids(f"{label}['prompt_token_ids']", token_ids),
        "" if salt is None else text(f"{label}['cache_salt']", salt),
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
    if all(type(token_id) is int for token_id in value):
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
            "the model has no tokenizer.json, so that prompts must be token ids; "
            "pass LLM(..., tokenizer=<folder with tokenizer.json>) for text"
        )
    return tokenizer.encode_batch(given)


def _check_token_ids(label: str, token_ids: list[int], vocab_size: int, max_model_len: int) -> None:
    if not token_ids:
        raise InvalidArgument(f"{label} is empty; a prompt has at least one token")
    if len(token_ids) >= max_model_len:
        raise InvalidArgument(
            f"{label} has {len(token_ids)} tokens, but max_model_len={max_model_len} has to "
            f"hold the prompt and at least one new token; shorten it or raise max_model_len"
        )
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise InvalidArgument(
            f"{label}[{token_ids.index(bad)}] is token id {bad}, outside the model's vocabulary "
            f"(0 to {vocab_size - 1})"
        )
