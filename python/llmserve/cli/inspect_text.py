"""What `llmserve inspect` says about the text side of a checkpoint."""

import dataclasses
from pathlib import Path

from llmserve.errors import LLMServeError
from llmserve.requests.generation_config import GenerationConfig, read_generation_config
from llmserve.sampling_params import SamplingParams
from llmserve.tokenization.tokenizer import Tokenizer


def text_report(source: Path) -> dict[str, object]:
    """Tokenizer, chat templates, the makers' sampling parameters and what ends a text. A tokenizer
    that cannot be used is reported with the reason: prompts of token ids run without it."""
    try:
        tokenizer = Tokenizer.from_path(source)
        described = None if tokenizer is None else _describe(tokenizer)
    except LLMServeError as error:
        tokenizer, described = None, f"unusable: {error}"
    generation = read_generation_config(source)
    return {
        "tokenizer": described,
        "chat_templates": [] if tokenizer is None else tokenizer.chat_template_names,
        "sampling_defaults": _changed(generation.default_params),
        "eos_tokens": _eos_tokens(generation, tokenizer),
    }


def _describe(tokenizer: Tokenizer) -> str:
    """'BPE, decoder ByteLevel, 512 tokens, 3 of them special'."""
    return (
        f"{tokenizer.kind}, {tokenizer.num_tokens} tokens, "
        f"{len(tokenizer.special_token_ids)} of them special"
    )


def _changed(params: SamplingParams) -> dict[str, object]:
    own = SamplingParams()
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    return {n: getattr(params, n) for n in names if getattr(params, n) != getattr(own, n)}


def _eos_tokens(generation: GenerationConfig, tokenizer: Tokenizer | None) -> list[object]:
    """As text where there is a tokenizer, else the ids."""
    ids = generation.eos_token_ids
    if tokenizer is None:
        return list(ids)
    own = tokenizer.eos_token_id
    ends = ids if own is None or own in ids else (*ids, own)
    return [tokenizer.token_text(i) for i in ends]
