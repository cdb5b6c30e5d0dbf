"""The forms in which callers give prompts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, Union

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


class EmbedsPrompt(TypedDict, total=False):
    """A prompt as vectors [T, E] in the place of the tokens' own: a NumPy array, torch tensor or
    another with __dlpack__, of float32, bfloat16 or float16. Needs LLM(enable_prompt_embeds=True).
    It is copied, and its blocks are never shared through the prefix cache."""

    prompt_embeds: object
    prompt: str


SinglePrompt = str | TokenIds | TextPrompt | TokensPrompt | EmbedsPrompt
Prompts = SinglePrompt | Sequence[SinglePrompt]

PromptType = SingletonPrompt = SinglePrompt  # as vLLM calls them
