"""Flags of SGLang's server and of llama-server that say how tokens are guessed, as fields of a
speculative_config. Those of SGLang say it together."""

from collections.abc import Callable, Mapping, Sequence

from llmserve.common.arguments import describe
from llmserve.errors import InvalidArgument, NotSupported

Convert = Callable[[str, str], object]
_MAX_GUESSES = 32  # more are never made

ALGORITHM = "--speculative-algorithm"
MODEL = "--speculative-draft-model-path"
NUM_STEPS = "--speculative-num-steps"
TOPK = "--speculative-eagle-topk"
NUM_DRAFT_TOKENS = "--speculative-num-draft-tokens"
_FLAGS = (ALGORITHM, MODEL, NUM_STEPS, TOPK, NUM_DRAFT_TOKENS)
_METHODS = {
    "EAGLE": "eagle",
    "EAGLE3": "eagle3",
    "NEXTN": "mtp",
    "STANDALONE": "draft_model",
    "NGRAM": "ngram",
}


# Ways of guessing by llama.cpp's names; "none" is none.
_DRAFTERS = {
    **dict.fromkeys(("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod"), "ngram"),
    **{"ngram-cache": "suffix", "draft-simple": "draft_model", "draft": "draft_model"},
    **{"draft-eagle3": "eagle3", "draft-mtp": "mtp"},
}


def _integer(flag: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidArgument(f"{flag} must be a number, got {describe(text)}") from None


def _name(field: str) -> Convert:
    return lambda _flag, text: {field: text}


def _count(*fields: str) -> Convert:
    return lambda flag, text: dict.fromkeys(fields, _integer(flag, text))


def _most(flag: str, text: str) -> object:
    return {"num_speculative_tokens": min(_integer(flag, text), _MAX_GUESSES)}


def _drafter(flag: str, text: str) -> object:
    name = text.lower()
    if name == "none":
        return None
    if name not in _DRAFTERS:
        raise NotSupported(
            f"serve: {flag} {text} is not supported: no draft of that kind is run; it may be "
            f"{', '.join(_DRAFTERS)}"
        )
    return {"method": _DRAFTERS[name]}


def _algorithm(flag: str, text: str) -> object:
    if text.upper() == "NONE":
        return None
    if text.upper() not in _METHODS:
        raise NotSupported(
            f"serve: {flag} {text} is not supported: no draft of that kind is run; it may be "
            f"{', '.join(_METHODS)}"
        )
    return {ALGORITHM: text.upper()}


def combined(fields: Mapping[str, object], models: Sequence[str] = ()) -> dict[str, object]:
    """A speculative_config in which the flags, by their names, are what they say together. models:
    those that are served. What is given in our names stands.

    A tree has `num-draft-tokens` with the token before the guesses, and goes `num-steps` deep; with
    one choice for each place it is a chain. EAGLE and NEXTN without a model of their own are the
    layers in the served model's file.

    >>> combined({ALGORITHM: "NEXTN", NUM_STEPS: 1, TOPK: 1, NUM_DRAFT_TOKENS: 2})
    {'method': 'mtp', 'num_speculative_tokens': 1}
    >>> combined({MODEL: "d", NUM_STEPS: 5, TOPK: 4, NUM_DRAFT_TOKENS: 16})
    ... # doctest: +NORMALIZE_WHITESPACE
    {'model': 'd', 'num_speculative_tokens': 5, 'speculative_eagle_topk': 4,
     'speculative_num_draft_tokens': 15}
    """
    given = {flag: fields[flag] for flag in _FLAGS if flag in fields}
    ours = {key: value for key, value in fields.items() if key not in _FLAGS}
    found: dict[str, object] = {}
    name, model = given.get(ALGORITHM), given.get(MODEL)
    method = _METHODS.get(str(name)) if name is not None else None
    is_served = model is None or model in models
    if method in ("eagle", "mtp") and is_served:
        method, model = "mtp", None
    if method == "mtp" and model is not None:
        raise NotSupported(
            f"serve: {MODEL} {model} is not supported with {ALGORITHM} {name}: its layers are read "
            "in the served model's own file; leave it out"
        )
    if method is not None:
        found["method"] = method
    if model is not None:
        found["model"] = model
    num_steps, num_drafted = given.get(NUM_STEPS), given.get(NUM_DRAFT_TOKENS)
    if isinstance(num_drafted, int) and num_drafted < 2:
        raise InvalidArgument(
            f"{NUM_DRAFT_TOKENS} counts the token before the guesses and must be at least 2, "
            f"got {num_drafted}"
        )
    num_guesses = num_drafted - 1 if isinstance(num_drafted, int) else None
    width = given.get(TOPK, 1)
    if num_steps is not None:
        found["num_speculative_tokens"] = num_steps
    elif width == 1 and num_guesses is not None:
        found["num_speculative_tokens"] = num_guesses
    if width != 1:
        found["speculative_eagle_topk"] = width
        if num_guesses is not None:
            found["speculative_num_draft_tokens"] = num_guesses
    return {**found, **ours}


# As rows of peer_flags: names, and what their text becomes.
GUESSING: tuple[tuple[str, Convert], ...] = (
    ("spec-type=", _drafter),
    (
        "model-draft=|-md|--spec-draft-model hf-repo-draft=|-hfd|-hfrd|--spec-draft-hf",
        _name("model"),
    ),
    (
        "draft=|--draft-n|--draft-max|--spec-draft-n-max num-speculative-tokens=",
        _count("num_speculative_tokens"),
    ),
    (
        "spec-ngram-simple-size-n= spec-ngram-map-k-size-n= spec-ngram-map-k4v-size-n= "
        "spec-ngram-mod-n-match=",
        _count("prompt_lookup_min", "prompt_lookup_max"),
    ),
    (
        "spec-ngram-simple-size-m= spec-ngram-map-k-size-m= spec-ngram-map-k4v-size-m= "
        "spec-ngram-mod-n-max=",
        _most,
    ),
    ("speculative-model=", _name("model")),
    ("speculative-algorithm=|--speculative-algo", _algorithm),
    ("speculative-draft-model-path=|--speculative-draft-model", _name(MODEL)),
    ("speculative-num-steps=", _count(NUM_STEPS)),
    ("speculative-eagle-topk=", _count(TOPK)),
    ("speculative-num-draft-tokens=", _count(NUM_DRAFT_TOKENS)),
    ("speculative-ngram-min-match-window-size=", _count("prompt_lookup_min")),
    ("speculative-ngram-max-match-window-size=", _count("prompt_lookup_max")),
)
