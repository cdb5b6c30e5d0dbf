"""Fields of llama.cpp's bodies that have nothing to do here."""

from collections.abc import Mapping
from typing import Any

from llmserve.server.routes.neutral_fields import NeutralField

_SAMPLING = "this way of sampling is not here"
_ADAPTERS = "adapters are not applied"

# Its default, which clients send.
_ALL_SAMPLERS = [
    *("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"),
]

FIELDS: Mapping[str, NeutralField] = {
    "mirostat": NeutralField(int, (0,), _SAMPLING),
    "typical_p": NeutralField(float, (1.0,), _SAMPLING),
    "dynatemp_range": NeutralField(float, (0.0,), _SAMPLING),
    "xtc_probability": NeutralField(float, (0.0,), _SAMPLING),
    "dry_multiplier": NeutralField(float, (0.0,), _SAMPLING),
    "samplers": NeutralField(
        list[str] | str, ([], _ALL_SAMPLERS), "the order of filters is one for all"
    ),
    "lora": NeutralField(list[dict[str, Any]], ([],), _ADAPTERS),
    "n_indent": NeutralField(int, (0,), "lines need no indent"),
    "response_fields": NeutralField(list[str], ([],), "answers of this route are whole"),
    "post_sampling_probs": NeutralField(bool, (False,), "probabilities are those before sampling"),
    # How llama.cpp runs a model, and settings of what is off
    **dict.fromkeys(("id_slot", "n_keep", "n_discard", "n_cache_reuse"), NeutralField(int)),
    **dict.fromkeys(("repeat_last_n", "dry_allowed_length"), NeutralField(int)),
    **dict.fromkeys(("dry_penalty_last_n", "min_keep"), NeutralField(int)),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta", "dynatemp_exponent"), NeutralField(float)),
    **dict.fromkeys(("xtc_threshold", "dry_base"), NeutralField(float)),
    "dry_sequence_breakers": NeutralField(list[str]),
    **dict.fromkeys(("timings_per_token", "return_progress"), NeutralField(bool)),
}
