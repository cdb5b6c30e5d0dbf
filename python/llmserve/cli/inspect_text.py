"""What `llmserve inspect` says about the text side of a checkpoint."""

import dataclasses
from pathlib import Path

from llmserve.errors import LLMServeError
from llmserve.generation_config import GenerationConfig, read_generation_config
from llmserve.model_files import MAX_TOKENIZER_BYTES, parse_json_object, read_bytes
from llmserve.sampling_params import SamplingParams
from llmserve.tokenizer import Tokenizer


def text_report(directory: Path) -> dict[str, object]:
    """Tokenizer, chat templates, the makers' sampling parameters and what ends a text. A tokenizer
    that cannot be used is reported with the reason: prompts of token ids run without it."""
    try:
        tokenizer = Tokenizer.from_directory(directory)
        described = None if tokenizer is None else _describe(tokenizer, directory)
    except LLMServeError as error:
        tokenizer, described = None, f"unusable: {error}"
    generation = read_generation_config(directory)
    return {
        "tokenizer": described,
        "chat_templates": [] if tokenizer is None else tokenizer.chat_template_names,
        "sampling_defaults": _changed(generation.default_params),
        "eos_tokens": _eos_tokens(generation, tokenizer),
    }


def _describe(tokenizer: Tokenizer, directory: Path) -> str:
    """'BPE, decoder ByteLevel, 512 tokens, 3 of them special'."""
    path = directory / "tokenizer.json"
    parsed = parse_json_object(read_bytes(directory, path.name, MAX_TOKENIZER_BYTES) or b"", path)
    return (
        f"{_kind(parsed.get('model'))}, decoder {_kind(parsed.get('decoder'))}, "
        f"{tokenizer.num_tokens} tokens, {len(tokenizer.special_token_ids)} of them special"
    )


def _kind(element: object) -> str:
    kind = element.get("type") if isinstance(element, dict) else None
    if isinstance(element, dict) and kind == "Sequence":
        return " + ".join(map(_kind, element.get("decoders") or ()))
    return kind if isinstance(kind, str) else "none"


def _changed(params: SamplingParams) -> dict[str, object]:
    own = SamplingParams()
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    return {n: getattr(params, n) for n in names if getattr(params, n) != getattr(own, n)}


def _eos_tokens(generation: GenerationConfig, tokenizer: Tokenizer | None) -> list[object]:
    """As text where there is a tokenizer, else the ids."""
    ids = generation.eos_token_ids
    return list(ids) if tokenizer is None else [tokenizer.token_text(i) for i in ids]
