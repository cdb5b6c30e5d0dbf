"""LLM(speculative_config={...}): vLLM's keys and defaults, and what each becomes in the core."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve import _core
from llmserve.common.arguments import (
    boolean,
    describe,
    integer,
    is_default,
    number,
    refuse_unknown,
    text,
)
from llmserve.errors import InvalidArgument, NotSupported

_NAME = "speculative_config"
_METHODS = dict(_core.supported_drafters())
# Methods of vLLM's that are another one's, or that nothing here carries out.
_SAME_METHOD = {
    "[ngram]": "ngram",
    "ngram_gpu": "ngram",
    **dict.fromkeys(("deepseek_mtp", "ernie_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp"), "mtp"),
}
_NO_DRAFT = "no draft of that kind is run"
_NO_LAYERS = "the layers of that model that draft are not run"
_NOT_HERE = {
    **dict.fromkeys(("dflash", "dspark", "mlp_speculator", "pard", "peagle"), _NO_DRAFT),
    **dict.fromkeys(("custom_class", "extract_hidden_states", "hydra", "lookahead"), _NO_DRAFT),
    **dict.fromkeys(("mimo_mtp", "exaone_moe_mtp", "qwen3_next_mtp"), _NO_LAYERS),
    **dict.fromkeys(("qwen3_5_mtp", "longcat_flash_mtp", "step3p5_mtp"), _NO_LAYERS),
}
_DEFAULT_TOKENS = {
    "suffix": 24,
    **dict.fromkeys(("draft_model", "eagle3", "eagle", "medusa"), 4),
    "mtp": 2,
}
_OTHERS_DEFAULT_TOKENS = 5

Convert = Callable[[str, object], object]


def _integer(minimum: int) -> Convert:
    return lambda name, value: integer(name, value, minimum)


def _ranges(name: str, value: object) -> list[list[int]]:
    """[[least, most, tokens], ...]"""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InvalidArgument(f"{name} must be a list of [least, most, tokens], got {value!r}")
    for row in value:
        if not isinstance(row, Sequence) or isinstance(row, str) or len(row) != 3:
            raise InvalidArgument(f"{name} must be a list of [least, most, tokens], got {row!r}")
    return [[integer(name, entry, 0) for entry in row] for row in value]


def _token_tree(name: str, value: object) -> list[list[int]]:
    """[(0,), (1,), (0, 0), ...], or that as a string, as vLLM had it."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise InvalidArgument(
                f"{name} must be a list of paths such as '[(0,), (1,), (0, 0)]', "
                f"got {describe(value)}"
            ) from None
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise InvalidArgument(f"{name} must be a list of paths, got {describe(value)}")
    for path in value:
        if not isinstance(path, Sequence) or isinstance(path, str):
            raise InvalidArgument(f"{name}: a path is a tuple of choices, got {describe(path)}")
    return [[integer(name, choice, 0) for choice in path] for path in value]


def _draft_sampling(name: str, value: object) -> str:
    names = {"target": "target", "gumbel": "target", "probabilistic": "target", "greedy": "greedy"}
    if value not in names:
        raise InvalidArgument(f"{name} must be one of {', '.join(names)}, got {describe(value)}")
    return names[text(name, value)]


def _acceptance(name: str, value: object) -> str:
    names = {"exact": "exact", "standard": "exact", "rejection": "rejection"}
    if value not in names:
        raise NotSupported(
            f"{name}={describe(value)} is not supported: it changes the distribution that tokens "
            f"are of; it is one of exact (standard is taken for it) and rejection"
        )
    return names[text(name, value)]


# The keys that the core takes under the same name, or under another.
_CORE: Mapping[str, tuple[str, Convert]] = {
    "num_speculative_tokens": ("", _integer(1)),
    "prompt_lookup_min": ("", _integer(1)),
    "prompt_lookup_max": ("", _integer(1)),
    "suffix_decoding_max_tree_depth": ("", _integer(1)),
    "suffix_decoding_max_cached_requests": ("", _integer(0)),
    "suffix_decoding_max_spec_factor": ("", number),
    "suffix_decoding_min_token_prob": ("", number),
    "num_speculative_tokens_per_batch_size": ("", _ranges),
    "disable_by_batch_size": ("", _integer(1)),
    "adaptive": ("", boolean),
    "draft_sample_method": ("", _draft_sampling),
    "rejection_sample_method": ("", _acceptance),
    "speculative_token_tree": ("", _token_tree),
    "speculative_eagle_topk": ("", _integer(1)),
    "speculative_num_draft_tokens": ("", _integer(1)),
    "use_heterogeneous_vocab": ("", boolean),
    "dtype": ("", text),
    "quantization": ("", text),
}
# Keys whose value changes nothing here, and what else they may be.
_ONLY: Mapping[str, tuple[object, ...]] = {
    "draft_tensor_parallel_size": (1,),
    "parallel_drafting": (False,),
    "code_revision": (),
    "max_model_len": (),
    "enforce_eager": (True, False),
    "disable_padded_drafter_batch": (True, False),
    "disable_logprobs": (True, False),
    "attention_backend": (),
    "moe_backend": (),
    "tensor_parallel_size": (1,),
}
_OWN = ("method", "model", "revision")


def speculation_config(name: str, value: object) -> _core.SpeculationConfig:
    """The core's config of a mapping as vLLM takes it; None and {} are no speculation. The
    model is named as it is given. Raises InvalidArgument that names the key, and NotSupported."""
    if value is None or value == {}:
        return _core.SpeculationConfig()
    if not isinstance(value, Mapping):
        raise InvalidArgument(
            f'{name} must be a dict such as {{"method": "ngram"}}, got {describe(value)}'
        )
    given = {text(f"{name}: a key", key): entry for key, entry in value.items()}
    refuse_unknown(name, given, (*_OWN, *_CORE, *_ONLY))
    given = {key: entry for key, entry in given.items() if entry is not None}
    method = _method(given)
    settings: dict[str, Any] = {
        "method": method,
        "num_speculative_tokens": _DEFAULT_TOKENS.get(method, _OTHERS_DEFAULT_TOKENS),
    }
    for key, (core_name, convert) in _CORE.items():
        if key in given:
            settings[core_name or key] = convert(f"{name}: {key}", given[key])
    _check_defaults(name, given)
    tree = settings.get("speculative_token_tree")
    if tree and "num_speculative_tokens" not in given:
        settings["num_speculative_tokens"] = max(map(len, tree))
    # As vLLM has them: one that is given alone is the other, too.
    for one, other in (("min", "max"), ("max", "min")):
        if f"prompt_lookup_{one}" in given and f"prompt_lookup_{other}" not in given:
            settings[f"prompt_lookup_{other}"] = settings[f"prompt_lookup_{one}"]
    if _METHODS[method]:
        settings["model"] = _model_name(name, method, given)
    elif given.get("model") not in (None, "ngram", "[ngram]", method):
        raise InvalidArgument(
            f"{name}: method {method!r} has no model, got {describe(given['model'])}"
        )
    if settings.get("use_heterogeneous_vocab") and not _METHODS[method]:
        raise InvalidArgument(
            f"{name}: use_heterogeneous_vocab is of a draft model, and method {method!r} has none"
        )
    config = _core.SpeculationConfig(**settings)
    config.validate()
    return config


def _method(given: Mapping[str, object]) -> str:
    """The method, which a model by itself says, too."""
    method = given.get("method")
    if method is None:
        model = given.get("model")
        if model is None:
            raise InvalidArgument(f"{_NAME}: method is missing; it is one of {', '.join(_METHODS)}")
        method = "ngram" if model in ("ngram", "[ngram]") else "draft_model"
    method = text(f"{_NAME}: method", method)
    method = _SAME_METHOD.get(method, method)
    if method in _METHODS:
        return method
    if method in _NOT_HERE:
        raise NotSupported(
            f"{_NAME} method={method!r} is not supported: {_NOT_HERE[method]}; "
            f"it is one of {', '.join(_METHODS)}"
        )
    try:
        refuse_unknown("", (method,), _METHODS)
    except InvalidArgument as error:
        hint = str(error).split("; ", 1)[1]
    raise NotSupported(f"{_NAME} method={describe(method)} is not supported; {hint}")


def _check_defaults(name: str, given: Mapping[str, object]) -> None:
    for key, values in _ONLY.items():
        if key not in given or any(is_default(given[key], value) for value in values):
            continue
        left = f"; leave it at {values[0]!r}" if values else "; leave it out"
        raise NotSupported(f"{name} {key}={describe(given[key])} is not supported{left}")


def _model_name(name: str, method: str, given: Mapping[str, object]) -> str:
    model = given.get("model")
    if not isinstance(model, str | os.PathLike) or not str(model):
        what = "a checkpoint's" if method == "draft_model" else "the head's"
        raise InvalidArgument(
            f"{name}: method {method!r} needs model, {what} folder or Hub id, got {describe(model)}"
        )
    return str(model)


def is_exact(value: Mapping[str, object] | None) -> bool:
    """Whether tokens are those of no speculation, of a mapping that speculation_config takes."""
    return (value or {}).get("rejection_sample_method") != "rejection"


def with_model_found(value: object, download_dir: object) -> object:
    """The mapping with its model's folder in the place of a Hub id, as `find_checkpoint` finds it,
    and with the method that the folder is for. `demo` is the demo model's draft.
    What is wrong with it is told by `speculation_config`."""
    if not isinstance(value, Mapping) or not value:
        return value
    config = speculation_config(_NAME, value)
    if not config.model:
        return value
    # No table of options needs them.
    from llmserve.checkpoint.draft_folders import read_draft_folder
    from llmserve.checkpoint.model_files import demo_draft_path, find_checkpoint

    model = demo_draft_path() if config.model == "demo" else config.model
    path = find_checkpoint(model, value.get("revision"), download_dir, is_draft=True)
    folder = read_draft_folder(Path(path))
    if value.get("method") is not None and folder.method != config.method:
        raise InvalidArgument(
            f"{_NAME}: method {config.method!r}, and {path} is for method {folder.method!r}; "
            "leave method out"
        )
    found = {**value, "model": str(path), "revision": None, "method": folder.method}
    if folder.num_tokens and found.get("num_speculative_tokens") is None:
        found["num_speculative_tokens"] = folder.num_tokens
    return found
