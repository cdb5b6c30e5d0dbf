"""config.json in the spellings of transformers 4 and 5, and what is refused in it."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import checkpoints
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmserve import _core, _core_testing
from llmserve.errors import CorruptFile, InvalidArgument, NotSupported

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": [2, 5],
}
# The inverse frequencies are powers in f32, whose last bit differs between libraries.
FREQUENCY_RELATIVE_TOLERANCE = 2e-7


def parse(config: dict[str, Any], max_model_len: int = 0, **fields: Any) -> dict[str, Any]:
    return _core_testing.parse_model_config(json.dumps({**config, **fields}), max_model_len)


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in BASE.items() if key not in keys}


def family(name: str, model_type: str, **fields: Any) -> dict[str, Any]:
    return {**BASE, "architectures": [name], "model_type": model_type, **fields}


def test_reads_every_field() -> None:
    config = parse(BASE, attention_bias=True, mlp_bias=True, head_dim=16, dtype="bfloat16")
    assert config["architecture"] == "LlamaForCausalLM"
    assert config["stored_dtype"] == "bfloat16"
    assert (config["vocab_size"], config["hidden_size"], config["intermediate_size"]) == (
        320,
        48,
        80,
    )
    assert (config["num_layers"], config["num_heads"], config["num_kv_heads"]) == (3, 4, 2)
    assert (config["head_dim"], config["ropes"][0]["rotary_dim"]) == (16, 16)
    assert all(config[key] for key in ("attention_bias", "output_bias", "mlp_bias"))
    assert (config["norm"], config["norm_eps"]) == ("rms", pytest.approx(1e-5))
    assert config["windows"] == [0, 0, 0]
    assert config["bos_token_ids"] == [1]
    assert config["eos_token_ids"] == [2, 5]
    assert config["max_position_embeddings"] == config["max_model_len"] == 256


ROPE_SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 3},
    "yarn": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 30,
        "beta_slow": 2,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0, 1.1, 1.3, 1.5, 1.9, 2.5],
        "long_factor": [1.0, 2.0, 3.5, 5.0, 9.0, 20.0],
    },
}


@pytest.mark.parametrize("rope_type", ROPE_SCALINGS)
@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_both_spellings_of_rope_and_dtype_give_the_same_config(
    rope_type: str, type_key: str
) -> None:
    scaling = {type_key: rope_type, **ROPE_SCALINGS[rope_type]}
    old = parse(BASE, rope_theta=50000.0, rope_scaling=scaling, torch_dtype="bfloat16")
    new = parse(
        BASE,
        rope_parameters={**ROPE_SCALINGS[rope_type], "rope_type": rope_type, "rope_theta": 50000.0},
        dtype="bfloat16",
    )
    assert old == new
    assert old["ropes"][0]["type"] == rope_type


def test_null_and_absent_scaling_are_the_default_rope() -> None:
    plain = parse(BASE, rope_theta=50000.0)
    assert plain["ropes"][0]["type"] == "default"
    assert plain["ropes"][0]["theta"] == 50000.0
    assert plain == parse(BASE, rope_theta=50000.0, rope_scaling=None)
    assert plain == parse(BASE, rope_parameters={"rope_type": "default", "rope_theta": 5e4})
    assert parse(BASE)["ropes"][0]["theta"] == 10000.0


EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function", "activation")

FAMILIES = {
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 100},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    "qwen3": {"head_dim": 12},
    "granite": {},
    "olmo2": {},
    "smollm3": {},
    "cohere": {},
}


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("rope_type", ["default", *ROPE_SCALINGS])
def test_frequencies_equal_those_of_transformers(model_type: str, rope_type: str) -> None:
    import transformers

    parameters = {
        "rope_theta": 30000.0,
        "rope_type": rope_type,
        **ROPE_SCALINGS.get(rope_type, {}),
    }
    fields = {key: value for key, value in BASE.items() if key != "architectures"}
    fields |= FAMILIES[model_type] | {"rope_parameters": parameters}
    fields.pop("model_type")
    fields["pad_token_id"] = 0
    theirs = transformers.AutoConfig.for_model(model_type, **copy.deepcopy(fields))
    model = transformers.AutoModelForCausalLM.from_config(theirs)
    rotary = getattr(model, model.base_model_prefix).rotary_emb
    theirs.architectures = [type(model).__name__]
    # Both choose by length once: ours by max_model_len, theirs starts with the short factors.
    max_model_len = 64 if rope_type == "longrope" else 0
    ((inv_freq, attention_factor),) = _core_testing.rope_frequencies(
        theirs.to_json_string(), max_model_len
    )
    np.testing.assert_allclose(
        inv_freq, rotary.inv_freq.numpy(), rtol=FREQUENCY_RELATIVE_TOLERANCE, atol=0
    )
    assert attention_factor == pytest.approx(rotary.attention_scaling, rel=1e-7)


def test_windows_follow_the_family() -> None:
    mistral = family("MistralForCausalLM", "mistral")
    assert parse(mistral)["windows"] == [4096] * 3
    assert parse(mistral, sliding_window=None)["windows"] == [0] * 3
    assert parse(mistral, sliding_window=7)["windows"] == [7] * 3
    qwen = family("Qwen2ForCausalLM", "qwen2", sliding_window=7, max_window_layers=1)
    assert parse(qwen)["windows"] == [0] * 3
    assert parse(qwen, use_sliding_window=True)["windows"] == [0, 7, 7]
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert parse(qwen, use_sliding_window=True, layer_types=types)["windows"] == [7, 0, 7]
    assert parse(BASE, sliding_window=7)["windows"] == [0] * 3


def test_full_layers_of_exaone4_are_rotated_where_no_layer_has_a_window() -> None:
    exaone4 = family("Exaone4ForCausalLM", "exaone4", sliding_window=7)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    mixed = parse(exaone4, layer_types=types, sliding_window_pattern="LLLG")
    assert (mixed["windows"], mixed["rope_of_layer"]) == ([7, 0, 7], [0, -1, 0])
    assert parse(exaone4, sliding_window_pattern=2) == mixed
    full = parse(exaone4, layer_types=["full_attention"] * 3)
    assert (full["windows"], full["rope_of_layer"]) == ([0] * 3, [-1] * 3)
    plain = parse(exaone4, sliding_window=None, sliding_window_pattern=None)
    assert (plain["windows"], plain["rope_of_layer"]) == ([0] * 3, [0] * 3)


GPT_NEO = {
    **{key: value for key, value in BASE.items() if not key.startswith("num_")},
    "architectures": ["GPTNeoForCausalLM"],
    "model_type": "gpt_neo",
    "num_layers": 4,
    "num_heads": 4,
    "window_size": 7,
}


def test_windows_of_gpt_neo_follow_either_spelling_of_its_layers() -> None:
    types = [[["global", "local"], 1], [["local"], 2]]
    layers = ["global", "local", "local", "local"]
    assert parse(GPT_NEO, attention_types=types)["windows"] == [0, 7, 7, 7]
    assert parse(GPT_NEO, attention_types=types) == parse(GPT_NEO, attention_layers=layers)
    both = parse(GPT_NEO, attention_types=types, attention_layers=layers[::-1])
    assert both["windows"] == [7, 7, 7, 0]
    alternating = parse(GPT_NEO, num_layers=24, window_size=None)
    assert alternating["windows"] == [0, 256] * 12


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "attention_types: expected an array"),
        ({"attention_types": [["global", 4]]}, "expected an array"),
        ({"attention_types": [[["global"]]]}, "expected a list of kinds of layers and a number"),
        ({"attention_types": [[["global"], 5]]}, "expected an integer from 0 to 4, got 5"),
        ({"attention_types": [[["global"], 3]]}, "expected num_layers 4 layers, got 3"),
        ({"attention_types": [[["global"], 3]] * 2}, "expected num_layers 4 layers, got more"),
        ({"attention_layers": ["local"] * 5}, "attention_layers: expected num_layers 4 layers"),
        ({"attention_layers": ["global", "near"] * 2}, 'expected global or local, got "near"'),
        ({"attention_layers": ["local"] * 4, "window_size": 0}, "window_size: expected an integer"),
    ],
)
def test_layers_of_gpt_neo_that_are_damaged_are_named(fields: Any, message: str) -> None:
    with pytest.raises(CorruptFile, match=re.escape(message)):
        parse(GPT_NEO, **fields)


@pytest.mark.parametrize("model_type", checkpoints.FAMILIES)
def test_family_defaults_are_those_of_transformers(model_type: str) -> None:
    import transformers

    # Alibi apart, what a bare config of the family means; sizes that the others must fit. As many
    # heads as no family has by default: absent KV heads must not be as many by chance.
    heads = {"helium": 40, "gptj": 32}.get(model_type, 64)
    sizes = {"hidden_size": 4096, "num_attention_heads": heads, "num_hidden_layers": 24}
    theirs = transformers.AutoConfig.for_model(model_type, **sizes)
    written = {"model_type": model_type, "vocab_size": 320, **sizes}
    if getattr(theirs, "intermediate_size", None) and model_type != "gpt_neox":
        written["intermediate_size"] = theirs.intermediate_size
    if model_type in ("ministral3", "mistral4"):  # whose queries grow by what stands there
        written["rope_parameters"] = theirs.rope_parameters
    if model_type in ("deepseek_v2", "dots1"):  # which have no numbers of their own
        written |= {"n_routed_experts": 8, "num_experts_per_tok": 2}
    ours = parse(written)
    kv_heads = getattr(theirs, "num_key_value_heads", None) or heads
    if hasattr(theirs, "kv_lora_rank"):  # the field does not count
        kv_heads = heads
    assert ours["num_kv_heads"] == (1 if model_type in ("falcon", "gpt_bigcode") else kv_heads)
    assert ours["head_dim"] == (getattr(theirs, "head_dim", None) or 4096 // heads)
    widths = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "moe_intermediate_size")
    width = next((getattr(theirs, key) for key in widths if getattr(theirs, key, None)), 4 * 4096)
    assert ours["intermediate_size"] == width
    assert ours["max_position_embeddings"] == theirs.max_position_embeddings
    eps = next((getattr(theirs, key) for key in EPSILONS if hasattr(theirs, key)), 1e-5)
    assert ours["norm_eps"] == pytest.approx(eps)
    assert ours["tie_word_embeddings"] == theirs.tie_word_embeddings
    activation = next(getattr(theirs, key) for key in ACTIVATIONS if hasattr(theirs, key))
    tanh = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
    clamped = {"gpt_oss": "swiglu_oai"}  # whatever the field says
    assert ours["activation"] == clamped.get(model_type, tanh.get(activation, activation))
    types = getattr(theirs, "layer_types", None)
    if types:
        sliding = [theirs.sliding_window if t == "sliding_attention" else 0 for t in types]
        assert ours["windows"] == sliding
    ropes = getattr(theirs, "rope_parameters", None) or {}
    if model_type == "gptj":
        part = theirs.rotary_dim / ours["head_dim"]
        ropes = {"rope_theta": 10000.0, "partial_rotary_factor": part}
    if ropes:
        by_type = [ropes[k] for k in ("full_attention", "sliding_attention") if k in ropes]
        for rope, expected in zip(ours["ropes"], by_type or [ropes], strict=True):
            assert rope["theta"] == expected["rope_theta"]
            partial = expected.get("partial_rotary_factor", 1.0)
            assert rope["rotary_dim"] == int(ours["head_dim"] * partial)
    else:
        assert ours["ropes"] == []


def test_model_type_stands_in_for_absent_architectures() -> None:
    assert parse(without("architectures"))["architecture"] == "LlamaForCausalLM"
    assert parse(BASE, architectures=None)["architecture"] == "LlamaForCausalLM"


def test_old_spellings_of_the_families_mean_the_same() -> None:
    gemma3 = family("Gemma3ForCausalLM", "gemma3_text", head_dim=16, sliding_window=8)
    linear = {"rope_type": "linear", "factor": 8.0}
    old = parse(gemma3, rope_theta=5e5, rope_scaling=linear, rope_local_base_freq=2e4)
    new = parse(
        gemma3,
        rope_parameters={
            "full_attention": {"rope_theta": 5e5, **linear},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    )
    assert old == new
    assert [rope["type"] for rope in new["ropes"]] == ["linear", "default"]
    assert new["rope_of_layer"] == [1, 1, 1]
    neox = family("GPTNeoXForCausalLM", "gpt_neox")
    old = parse(neox, rotary_pct=0.5, rotary_emb_base=5e3)
    assert old == parse(neox, rope_parameters={"rope_theta": 5e3, "partial_rotary_factor": 0.5})
    assert old["ropes"][0]["rotary_dim"] == 6
    phi3 = family("Phi3ForCausalLM", "phi3", original_max_position_embeddings=64)
    factors = {key: ROPE_SCALINGS["longrope"][key] for key in ("short_factor", "long_factor")}
    old = parse(phi3, rope_scaling={"type": "su", **factors})
    assert old == parse(phi3, rope_parameters={"rope_type": "longrope", **factors})
    assert old["ropes"][0]["factor"] == 4.0
    gemma = family("GemmaForCausalLM", "gemma")
    assert parse(gemma, hidden_act="gelu") == parse(gemma, hidden_activation="gelu_pytorch_tanh")


def test_longrope_needs_a_factor_for_each_pair() -> None:
    scaling = {**ROPE_SCALINGS["longrope"], "rope_type": "longrope", "long_factor": [1.0]}
    with pytest.raises(CorruptFile, match=r"long_factor: expected 6 factors, .*, got 1"):
        parse(BASE, rope_scaling=scaling)


def test_special_ids_of_minus_one_mean_none() -> None:
    config = parse(BASE, bos_token_id=-1, eos_token_id=None)
    assert config["bos_token_ids"] == config["eos_token_ids"] == []


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": parameters}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

CORRUPT: list[tuple[dict[str, Any], str]] = [
    ({"vocab_size": 0}, "vocab_size: expected an integer from 1 to 2147483647, got 0"),
    ({"vocab_size": "320"}, 'vocab_size: expected an integer from 1 to 2147483647, got "320"'),
    ({"hidden_size": -48}, "hidden_size: expected an integer from 1 to 1048576, got -48"),
    ({"hidden_size": 48.5}, "hidden_size: expected an integer from 1 to 1048576, got 48.5"),
    ({"hidden_size": None}, "hidden_size: expected an integer from 1 to 1048576, got null"),
    ({"hidden_size": 50}, "hidden_size: expected a multiple of num_attention_heads 4 (or an"),
    ({"intermediate_size": True}, "intermediate_size: expected an integer from 1 to 1048576, got"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected an integer from 1 to 4096, got"),
    ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of num_attention_heads"),
    ({"head_dim": 7}, "head_dim: rotary embeddings need an even head_dim, got 7"),
    ({"head_dim": 0}, "head_dim: expected an integer from 1 to 1048576, got 0"),
    ({"head_dim": 1 << 20}, "head_dim: expected num_attention_heads x head_dim up to 1048576"),
    ({"rms_norm_eps": 0}, "rms_norm_eps: expected a number from 1e-12 to 1, got 0"),
    ({"hidden_act": 1}, "hidden_act: expected a string, got 1"),
    ({"tie_word_embeddings": "no"}, 'tie_word_embeddings: expected true or false, got "no"'),
    ({"max_position_embeddings": 0}, "max_position_embeddings: expected an integer from 1 to"),
    ({"eos_token_id": [2, "x"]}, "eos_token_id[1]: expected an integer from -1 to 2147483647, got"),
    ({"eos_token_id": 1 << 40}, "eos_token_id: expected an integer from -1 to 2147483647, got"),
    ({"architectures": "LlamaForCausalLM"}, "architectures: expected an array, got"),
    ({"rope_theta": 1}, "rope_theta: expected a number from 1.0001 to 1e+15, got 1"),
    ({"rope_scaling": [1]}, "rope_scaling: expected an object, got an array"),
    (rope(rope_type="linear"), "rope_parameters.factor: expected a number from 1 to 1e+06, got no"),
    (rope(rope_type="linear", factor=0.5), "rope_parameters.factor: expected a number from 1 to"),
    (rope(rope_type=3), "rope_parameters.rope_type: expected a string, got 3"),
    (rope(**YARN, beta_fast=1, beta_slow=2), "rope_parameters.beta_fast: expected at least beta_s"),
    (rope(rope_type="llama3", factor=8.0), "rope_parameters.low_freq_factor: expected a number"),
    (
        rope(**{**LLAMA3, "high_freq_factor": 1.0}),
        "rope_parameters.high_freq_factor: expected more than low_freq_factor 1, got 1",
    ),
    (rope(**{**YARN, "original_max_position_embeddings": 0}), "original_max_position_embeddings"),
    (
        {"architectures": ["Exaone4ForCausalLM"], "sliding_window_pattern": "LLLG"},
        'sliding_window_pattern: expected an integer from 1 to 2147483647, got "LLLG"',
    ),
    (
        {"architectures": ["Exaone4ForCausalLM"], "sliding_window_pattern": None},
        "sliding_window_pattern: expected an integer from 1 to 2147483647, got null",
    ),
]


@pytest.mark.parametrize(("fields", "message"), CORRUPT)
def test_bad_field_is_named_with_its_range(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptFile) as error:
        parse(BASE, **fields)
    assert str(error.value).startswith(f"config.json: {message}") or message in str(error.value)


@pytest.mark.parametrize(
    "key",
    ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"],
)
def test_absent_field_is_named(key: str) -> None:
    with pytest.raises(CorruptFile, match=f"config.json: {key}: expected .*, got nothing"):
        parse(without(key))


def test_layer_types_must_fit() -> None:
    qwen = family("Qwen2ForCausalLM", "qwen2")
    with pytest.raises(CorruptFile, match="layer_types: expected num_hidden_layers 3 entries, got"):
        parse(qwen, layer_types=["full_attention"])
    with pytest.raises(CorruptFile, match=r"layer_types\[0\]: sliding_attention needs a sliding"):
        parse(qwen, layer_types=["sliding_attention"] * 3)
    with pytest.raises(CorruptFile, match=r"layer_types\[1\]: expected full_attention or sliding"):
        parse(qwen, layer_types=["full_attention", "linear_attention", "full_attention"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            'config.json: architectures[0]: architecture "MambaForCausalLM" is not supported; '
            "docs/support-matrix.md has all "
            f"{len(_core.supported_architectures()) + len(_core.supported_wrappers())} that are",
        ),
        (
            {"architectures": ["Qwen3NextForCausalLM"]},
            'config.json: architectures[0]: architecture "Qwen3NextForCausalLM" is not supported; '
            "near it are Qwen3",
        ),
        (
            {"hidden_act": "mish"},
            'config.json: hidden_act: activation "mish" is not supported (silu, gelu, '
            "gelu_pytorch_tanh, relu, relu2)",
        ),
        (
            rope(rope_type="ntk", factor=2.0),
            'config.json: rope_parameters.rope_type: RoPE type "ntk" is not supported '
            "(default, linear, dynamic, yarn, llama3, longrope)",
        ),
        (
            rope(rope_type="default", partial_rotary_factor=0.5),
            "config.json: rope_parameters.partial_rotary_factor: partial rotary embeddings (0.5) "
            "are not supported by LlamaForCausalLM",
        ),
        (
            rope(full_attention={"rope_type": "default"}),
            "config.json: rope_parameters: RoPE parameters that differ by layer type",
        ),
        (
            {"model_type": "falcon", "architectures": None, "alibi": True},
            "config.json: alibi: ALiBi positions (Falcon-RW) are not supported, only rotary ones",
        ),
        (
            {"model_type": "gemma2", "architectures": None, "use_bidirectional_attention": True},
            "config.json: use_bidirectional_attention: true is not supported, only false",
        ),
        (
            {"model_type": "gemma3_text", "architectures": None, "attn_logit_softcapping": 50.0},
            "config.json: attn_logit_softcapping: a cap on attention scores is not supported by",
        ),
        (
            {"model_type": "opt", "architectures": None, "word_embed_proj_dim": 32},
            "config.json: word_embed_proj_dim: embeddings of another width (32) than hidden_size",
        ),
        (
            {"model_type": "phi3", "architectures": None, "rope_scaling": YARN},
            'config.json: rope_scaling.rope_type: RoPE type "yarn" is not supported by Phi-3',
        ),
        (
            {"model_type": "ministral3", "architectures": None, "rope_scaling": {"type": "linear"}},
            'config.json: rope_scaling.type: RoPE type "linear" is not supported by Ministral 3',
        ),
    ],
)
def test_what_is_not_supported_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(NotSupported) as error:
        parse(BASE, **fields)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(("model_type", "field", "value", "supported"), checkpoints.REFUSED)
def test_what_a_family_does_not_support_is_named(
    model_type: str, field: str, value: Any, supported: Any
) -> None:
    with pytest.raises(NotSupported) as error:
        parse(BASE, model_type=model_type, architectures=None, **{field: value})
    only = json.dumps(supported)
    assert str(error.value).startswith(
        f"config.json: {field}: {json.dumps(value)} is not supported, only {only}"
    )


@pytest.mark.parametrize(
    ("fields", "longest", "of"),
    [
        ({}, 256, "max_position_embeddings"),
        (rope(rope_type="linear", factor=2.0), 512, "what its linear RoPE reaches"),
        (rope(rope_type="dynamic", factor=2.5), 640, "what its dynamic RoPE reaches"),
        (rope(**{**YARN, "factor": 8.0}), 512, "what its yarn RoPE reaches"),
        (rope(**YARN), 256, "what its yarn RoPE reaches"),
        (rope(**LLAMA3), 256, "what its llama3 RoPE reaches"),
        (
            rope(rope_type="dynamic", alpha=50.0, factor=2.0)
            | {"architectures": ["HunYuanDenseV1ForCausalLM"]},
            256,
            "max_position_embeddings",
        ),
    ],
)
def test_max_model_len_reaches_as_far_as_the_rope(
    fields: dict[str, Any], longest: int, of: str
) -> None:
    assert parse(BASE, **fields)["max_model_len"] == 256
    assert parse(BASE, longest, **fields)["max_model_len"] == longest
    with pytest.raises(InvalidArgument) as error:
        parse(BASE, longest + 1, **fields)
    assert str(error.value) == (
        f"max_model_len: expected 1 to {longest} ({of} of config.json), got {longest + 1}"
    )


def test_negative_max_model_len_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"max_model_len: expected 1 to 256 .*, got -1"):
        parse(BASE, -1)


_JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([-1, 0, 1, 2, 3, 2**31, 2**63 - 1, -(2**63)])
    | st.sampled_from([-1.5, 0.0, 1e-300, 1e308])
    | st.sampled_from(["", "silu", "yarn", "dynamic", "LlamaForCausalLM", "\u00e9"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["rope_type", "factor", "rope_theta", "beta_fast", "truncate"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=5,
)
_KEYS = [*BASE, "head_dim", "rope_scaling", "rope_parameters", "sliding_window", "layer_types"]


@settings(max_examples=500, deadline=None)
@given(
    st.sampled_from([name for name, _ in _core.supported_architectures()]),
    st.dictionaries(st.sampled_from(_KEYS), _JUNK, max_size=3),
)
def test_any_config_is_read_or_refused_by_type(architecture: str, fields: dict[str, Any]) -> None:
    text = json.dumps({**BASE, "architectures": [architecture], **fields})
    try:
        ropes = _core_testing.rope_frequencies(text)
    except (CorruptFile, NotSupported, InvalidArgument):
        return
    for inv_freq, attention_factor in ropes:
        assert np.isfinite(inv_freq).all()
        assert np.isfinite(attention_factor)


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "float16", "auto", "float32"])
def test_dtypes_that_exporters_write_are_taken(dtype: str) -> None:
    assert parse(BASE, dtype=dtype)["stored_dtype"] == dtype.removeprefix("torch.")


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", ["", "float33", "x" * 1000, "__import__('os')"])
def test_unknown_dtype_is_refused(dtype: str, field: str) -> None:
    with pytest.raises(CorruptFile, match="dtype: expected a floating-point type"):
        parse({key: value for key, value in BASE.items() if key != "dtype"}, **{field: dtype})


@pytest.mark.parametrize("field", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_experts_of_a_dense_model_are_refused(field: str) -> None:
    for harmless in (None, 0, 1):
        parse(BASE, **{field: harmless})
    for experts in (2, 128, [8, 8]):
        with pytest.raises(NotSupported, match=f"{field}: got .* experts"):
            parse(BASE, **{field: experts})
