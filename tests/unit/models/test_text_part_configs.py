"""config.json of models that see images, as published: what of it is the text model's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from checkpoints import WRAPPED
from llmserve import _core_testing
from llmserve.errors import CorruptFile, NotSupported
from llmserve.plan import ModelShape

WRAPPERS = {
    "exaone4_5": "Exaone4_5_ForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}
# Of the published files: what a text_config leaves out is its class's default.
GEMMA3_4B: dict[str, Any] = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
GEMMA3_27B: dict[str, Any] = {
    **GEMMA3_4B,
    "head_dim": 128,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_hidden_layers": 62,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 168,
}
MISTRAL_SMALL_3_1: dict[str, Any] = {
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "max_position_embeddings": 131072,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000000.0,
    "sliding_window": None,
    "vocab_size": 131072,
}
LLAVA_1_5: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "rms_norm_eps": 1e-05,
    "torch_dtype": "float16",
    "vocab_size": 32064,
}
MINISTRAL_3: dict[str, Any] = {
    "model_type": "ministral3",
    "rope_parameters": {
        "factor": 16.0,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 16384,
        "rope_theta": 1000000.0,
        "rope_type": "yarn",
    },
}
PIXTRAL: dict[str, Any] = {
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 14336,
    "is_composition": True,
    "max_position_embeddings": 1024000,
    "model_type": "mistral",
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000000.0,
    "sliding_window": None,
    "vocab_size": 131072,
}
QWEN3_VL_4B: dict[str, Any] = {
    "attention_bias": False,
    "bos_token_id": 151643,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 262144,
    "model_type": "qwen3_vl_text",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "mrope_interleaved": True,
        "mrope_section": [24, 20, 20],
        "rope_type": "default",
    },
    "rope_theta": 5000000,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
QWEN2_5_VL_7B: dict[str, Any] = {
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vision_config": {"model_type": "qwen2_5_vl", "hidden_size": 1280, "tokens_per_second": 2},
    "vocab_size": 152064,
}


def wrap(model_type: str, text: dict[str, Any], **fields: Any) -> dict[str, Any]:
    names = [WRAPPERS[model_type]]
    return {"architectures": names, "model_type": model_type, "text_config": text, **fields}


PUBLISHED = {
    "gemma3-4b": wrap("gemma3", GEMMA3_4B, eos_token_id=[1, 106], torch_dtype="bfloat16"),
    "gemma3-27b": wrap("gemma3", GEMMA3_27B, eos_token_id=[1, 106], torch_dtype="bfloat16"),
    "mistral-small-3.1": wrap("mistral3", MISTRAL_SMALL_3_1, torch_dtype="bfloat16"),
    "llava-1.5": wrap("llava", LLAVA_1_5, tie_word_embeddings=False, torch_dtype="float16"),
    "llava-unsaid": wrap("llava", {"vocab_size": 32064}),
    "pixtral": wrap("llava", PIXTRAL, torch_dtype="float16"),
    "qwen3-vl-4b": wrap("qwen3_vl", QWEN3_VL_4B, tie_word_embeddings=True),
    "exaone-4.5": wrap("exaone4_5", {"model_type": "exaone4_5_text"}),
    "ministral-3": wrap("mistral3", MINISTRAL_3),
    "qwen2.5-vl-mha": wrap("qwen2_5_vl", {"num_key_value_heads": None}),
    "qwen2.5-vl-windows": wrap("qwen2_5_vl", {"num_hidden_layers": 84, "use_sliding_window": True}),
    "qwen2.5-vl-7b": {
        "architectures": [WRAPPERS["qwen2_5_vl"]],
        "model_type": "qwen2_5_vl",
        **QWEN2_5_VL_7B,
    },
    **{
        case: wrap("llava", {"model_type": case.partition(":")[2]})
        | {"architectures": None, "model_type": case.partition(":")[0]}
        for case in WRAPPED
        if case != "mistral3:ministral3"  # which needs its RoPE
    },
}


def parse(config: dict[str, Any]) -> dict[str, Any]:
    return _core_testing.parse_model_config(json.dumps(config), 0)


def reference(config: dict[str, Any]) -> Any:
    """The text config as transformers reads it."""
    import transformers

    fields = {key: value for key, value in config.items() if value is not None}
    model_type = fields.pop("model_type")
    return transformers.CONFIG_MAPPING[model_type].from_dict(fields).get_text_config()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_is_read_as_transformers_does(name: str) -> None:
    ours, theirs = parse(PUBLISHED[name]), reference(PUBLISHED[name])
    heads = theirs.num_attention_heads
    expected = {
        "vocab_size": theirs.vocab_size,
        "hidden_size": theirs.hidden_size,
        "intermediate_size": theirs.intermediate_size,
        "num_layers": theirs.num_hidden_layers,
        "num_heads": heads,
        "num_kv_heads": theirs.num_key_value_heads,
        "head_dim": getattr(theirs, "head_dim", None) or theirs.hidden_size // heads,
        "max_position_embeddings": theirs.max_position_embeddings,
        "norm_eps": pytest.approx(
            theirs.layer_norm_eps if hasattr(theirs, "layer_norm_eps") else theirs.rms_norm_eps
        ),
    }
    assert {key: ours[key] for key in expected} == expected
    types = getattr(theirs, "layer_types", None)
    window = getattr(theirs, "sliding_window", None) or 0
    if types:
        assert ours["windows"] == [window if t == "sliding_attention" else 0 for t in types]
    else:
        assert ours["windows"] == [window] * theirs.num_hidden_layers
    ropes = theirs.rope_parameters
    by_type = [ropes[key] for key in ("full_attention", "sliding_attention") if key in ropes]
    for rope, other in zip(ours["ropes"], by_type or [ropes], strict=True):
        assert rope["theta"] == other["rope_theta"]
        assert rope["type"] == other["rope_type"]
        assert rope["rotary_dim"] == ours["head_dim"] * other.get("partial_rotary_factor", 1.0)


def test_text_models_run_as_their_architecture() -> None:
    ran = {name: parse(config)["architecture"] for name, config in PUBLISHED.items()}
    assert ran["gemma3-4b"] == "Gemma3ForCausalLM"
    assert ran["mistral-small-3.1"] == ran["pixtral"] == "MistralForCausalLM"
    assert ran["llava-1.5"] == ran["llava-unsaid"] == "LlamaForCausalLM"
    assert ran["qwen2.5-vl-7b"] == "Qwen2ForCausalLM"
    assert ran["qwen3-vl-4b"] == "Qwen3ForCausalLM"
    assert ran["glm4v:glm4v_text"] == "Glm4ForCausalLM"
    assert parse(PUBLISHED["gemma3-4b"])["text_part_of"] == WRAPPERS["gemma3"]
    # What trained it may have called it otherwise: model_type says what it is.
    other = {**LLAVA_1_5, "architectures": ["VicunaForCausalLM"]}
    assert parse(wrap("llava", other)) == parse(PUBLISHED["llava-1.5"])


def test_what_the_wrapper_says_of_the_whole_comes_first() -> None:
    text = {**LLAVA_1_5, "eos_token_id": 3, "bos_token_id": 4}
    inner = parse(wrap("llava", text))
    assert (inner["stored_dtype"], inner["eos_token_ids"]) == ("float16", [3])
    outer = parse(wrap("llava", text, eos_token_id=[5, 6], torch_dtype="bfloat16"))
    assert (outer["stored_dtype"], outer["eos_token_ids"]) == ("bfloat16", [5, 6])
    assert outer["bos_token_ids"] == [4]


@pytest.mark.parametrize(
    ("wrapper", "text", "tied"),
    [
        (None, None, False),
        (True, None, True),
        (True, False, True),
        (None, True, True),
        (False, True, True),
        (False, False, False),
    ],
)
def test_a_config_by_itself_is_tied_where_either_says_so(
    wrapper: bool | None, text: bool | None, tied: bool
) -> None:
    config = wrap("llava", {**LLAVA_1_5, "tie_word_embeddings": text}, tie_word_embeddings=wrapper)
    assert parse(config)["tie_word_embeddings"] == tied
    assert parse(PUBLISHED["gemma3-4b"])["tie_word_embeddings"]
    assert not parse(PUBLISHED["mistral-small-3.1"])["tie_word_embeddings"]


def test_the_flat_config_means_what_the_nested_one_means() -> None:
    flat = PUBLISHED["qwen2.5-vl-7b"]
    text = {key: value for key, value in QWEN2_5_VL_7B.items() if key != "vision_config"}
    assert parse(flat) == parse(wrap("qwen2_5_vl", {**text, "model_type": "qwen2_5_vl_text"}))
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    scaled = parse({**flat, "rope_scaling": {**yarn, "mrope_section": [16, 24, 24]}})
    assert scaled["ropes"] == parse({**flat, "rope_scaling": yarn})["ropes"]
    assert scaled["ropes"][0]["type"] == "yarn"


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (
            wrap("gemma3", {**GEMMA3_4B, "model_type": "gemma3n_text"}),
            NotSupported,
            'config.json: text_config.model_type: architecture "gemma3n_text" is not supported; ',
        ),
        (
            wrap("gemma3", {**GEMMA3_4B, "hidden_size": "2560"}),
            CorruptFile,
            "config.json: text_config.hidden_size: expected an integer from 1 to",
        ),
        (
            wrap("gemma3", {**GEMMA3_4B, "use_bidirectional_attention": True}),
            NotSupported,
            "config.json: text_config.use_bidirectional_attention: true is not supported",
        ),
        (
            {**wrap("gemma3", {}), "text_config": None},
            CorruptFile,
            "config.json: text_config: expected an object, got null",
        ),
        (
            {**wrap("mistral3", {}), "text_config": [1]},
            CorruptFile,
            "config.json: text_config: expected an object, got an array",
        ),
        (
            wrap("llava", LLAVA_1_5, tie_word_embeddings=1),
            CorruptFile,
            "config.json: tie_word_embeddings: expected true or false, got 1",
        ),
        (
            {**wrap("llava", LLAVA_1_5), "architectures": ["MllamaForConditionalGeneration"]},
            NotSupported,
            'config.json: architectures[0]: architecture "MllamaForConditionalGeneration" is not',
        ),
    ],
)
def test_what_does_not_run_is_named(
    config: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        parse(config)
    assert str(raised.value).startswith(message)


def test_the_kv_calculator_knows_what_a_text_config_leaves_out(tmp_path: Any) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED["gemma3-4b"]))
    per_layer = 2 * 4 * 256 * 2
    assert ModelShape.from_config(path).kv_bytes(1) == 34 * per_layer
    path.write_text(json.dumps(wrap("gemma3", {**GEMMA3_27B, "model_type": "gemma3n_text"})))
    assert ModelShape.from_config(path).kv_bytes(1) == 62 * 2 * 16 * 128 * 2  # does not run
