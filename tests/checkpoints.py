"""Tiny random-weight checkpoints and a tiny tokenizer, made on the spot and cached for the session.

Written by transformers' own save_pretrained, so that a test against them is a test against the
format that users have. Nothing is downloaded.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from families import COMMON, FAMILY, TEXT_FAMILY
from tiny_tokenizer import VOCAB_SIZE as VOCAB_SIZE  # for tests, which know this module alone
from tiny_tokenizer import tokenizer

FAMILIES = tuple(FAMILY)
# Of these a rounded activation now and then chooses another expert with as large a weight, and what
# comes of it is another token's: their rows are compared by the median.
ROUTERS_THAT_FLIP = (
    *("deepseek_v2", "deepseek_v3", "dots1", "exaone_moe", "flex_olmo", "glm4_moe"),
    *("glm4_moe_lite", "gpt_oss", "hy_v3", "minimax_m2", "mistral4", "phimoe", "solar_open"),
)
# What a family's config may say and is refused: family, field, its value, what is supported.
REFUSED: tuple[tuple[str, str, Any, Any], ...] = (
    ("gpt2", "scale_attn_by_inverse_layer_idx", True, False),
    ("gpt_bigcode", "add_cross_attention", True, False),
    ("hy_v3", "mlp_bias", True, False),
    ("minicpm3", "attention_bias", True, False),
    ("olmo", "clip_qkv", 8.5, None),
    ("opt", "do_layer_norm_before", False, True),
    ("opt", "_remove_final_layer_norm", True, False),
    ("opt", "layer_norm_elementwise_affine", False, True),
    ("youtu", "attention_bias", True, False),
)
# "wrapper:text model", by their model_type.
WRAPPED = (
    "aya_vision:cohere2",
    "cohere2_vision:cohere2",
    "exaone4_5:exaone4",
    "gemma3:gemma3_text",
    "glm4v:glm4v_text",
    "idefics3:llama",
    "internvl:qwen3",
    "kimi_k25:deepseek_v3",
    "llava:llama",
    "llava_next:granite",
    "llava_onevision:qwen2",
    "mistral3:ministral3",
    "mistral3:mistral",
    "mistral3:mistral4",
    "qwen2_5_vl:qwen2_5_vl_text",
    "qwen2_vl:qwen2_vl_text",
    "qwen3_vl:qwen3_vl_text",
    "qwen3_vl_moe:qwen3_vl_moe_text",
    "smolvlm:llama",
)
# In the spellings of all vision towers; what one does not know is ignored.
_VISION: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "intermediate_size", "out_hidden_size"), 8),
    **dict.fromkeys(("num_attention_heads", "num_heads"), 2),
    **dict.fromkeys(("num_hidden_layers", "depth"), 1),
    **{"image_size": 8, "patch_size": 4},
}
# Where a family has another name for a field of COMMON, and transformers does not translate it.
_SPELLINGS = {
    "falcon": {"intermediate_size": "ffn_hidden_size"},
    "gpt2": {"intermediate_size": "n_inner"},
    "gptj": {"intermediate_size": "n_inner"},
    "opt": {"intermediate_size": "ffn_dim"},
    "gpt_bigcode": {"intermediate_size": "n_inner"},
}


@functools.cache
def _session_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="llmserve-checkpoints-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def checkpoint(family: str, *, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Path:
    """Directory of a tiny checkpoint with a tokenizer; the same arguments give the same directory.

    `overrides` are fields of the family's transformers config. Read-only: copy it to damage it.
    """
    key = json.dumps([family, seed, dtype, overrides], sort_keys=True)
    return _cached_checkpoint(key)


@functools.cache
def _cached_checkpoint(key: str) -> Path:
    family, seed, dtype, overrides = json.loads(key)
    directory = Path(tempfile.mkdtemp(prefix=f"{family}-", dir=_session_directory()))
    make_checkpoint(directory, family, seed=seed, dtype=dtype, **overrides)
    return directory


@functools.cache
def architecture(family: str) -> str:
    """What config.json calls it."""
    config = json.loads((checkpoint(family) / "config.json").read_text())
    return str(config["architectures"][0])


def make_checkpoint(
    directory: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str | None = None,
    **overrides: Any,
) -> Any:
    """Writes a checkpoint and returns the transformers model that it was saved from."""
    import torch
    import transformers

    wrapper, _, text = family.rpartition(":")
    fields = {**COMMON, **(FAMILY | TEXT_FAMILY)[text], **overrides}
    for key, spelling in _SPELLINGS.get(family, {}).items():
        fields[spelling] = fields.pop(key)
    # A pattern, over as many layers as there are.
    for key in ("layer_types", "no_rope_layers", "attention_layers"):
        if key in fields:
            num_layers = fields["num_hidden_layers"]
            fields[key] = (fields[key] * num_layers)[:num_layers]
    if wrapper:
        fields = {
            "text_config": {"model_type": text, **fields},
            "vision_config": _VISION,
            "tie_word_embeddings": fields["tie_word_embeddings"],
        }
    config = transformers.AutoConfig.for_model(wrapper or text, **fields)
    model = _auto_class(config).from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled(model, name, noise))
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
    model = model.eval().to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    options = {"max_shard_size": max_shard_size} if max_shard_size else {}
    model.save_pretrained(directory, **options)
    if wrapper == "kimi_k25":
        _call_layers_what_they_are(directory / "model.safetensors")
    tokenizer().save_pretrained(directory)
    return model


def _call_layers_what_they_are(path: Path) -> None:
    """transformers 5 writes the text's layers by the name that the tower's have in its files."""
    from safetensors.torch import load_file, save_file

    wrong, right = "language_model.model.blocks.", "language_model.model.layers."
    tensors = {name.replace(wrong, right): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


# Of what a router of experts is called.
_ROUTERS = ("mlp.gate.weight", ".router.weight", ".gate.wg.weight")
# Families whose experts are stored [experts, in, out].
_EXPERTS_OF_COLUMNS = ("gpt_oss", "llama4_text")


def _scaled(model: Any, name: str, noise: Any) -> Any:
    """Weights that keep activations near 1, norms near 1 but not at it, logits well apart."""
    family = model.config.model_type
    if name.endswith("bias"):
        return 0.3 * noise
    if name.endswith("sinks"):
        return 2 * noise
    if noise.ndim == 1 or "norm" in name:
        is_minus_one = family.startswith(("gemma", "nemotron"))
        return (0 if is_minus_one else 1) + 0.2 * noise
    tables = ("embed_tokens", "embed_in", "embed_positions", "word_embeddings", "wte", "wpe")
    if any(part in name for part in tables):
        # Gemma multiplies by the square root of the width.
        return noise / (noise.shape[1] ** 0.5 if family.startswith("gemma") else 1)
    gain = 3.0 if name.startswith(("lm_head", "embed_out")) else 1.0
    if name.endswith(_ROUTERS):
        gain = 8.0  # or rounding to bfloat16 would choose other experts
    if noise.ndim == 3 and family not in _EXPERTS_OF_COLUMNS:
        return noise / noise.shape[2] ** 0.5
    return gain * noise / noise.shape[0 if family == "gpt2" else 1] ** 0.5


@functools.cache
def reference_model(directory: Path) -> Any:
    """The checkpoint as transformers runs it: f32 arithmetic, eager attention."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    model = _auto_class(config).from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    text = config.get_text_config()
    if text is not config:
        # Wrappers leave out by what the text model's own class scales logits.
        scale = getattr(text, "logit_scale", 1 / getattr(text, "logits_scaling", 1))
        model.lm_head.register_forward_hook(lambda _module, _inputs, logits: scale * logits)
    return model.eval()


def _auto_class(config: Any) -> Any:
    import transformers

    if config.model_type == "mistral4":  # whose class no table of transformers names
        model_class = transformers.models.mistral4.modeling_mistral4.Mistral4ForCausalLM
        transformers.AutoModelForCausalLM.register(type(config), model_class, exist_ok=True)
    is_wrapper = hasattr(config, "text_config")
    return (
        transformers.AutoModelForImageTextToText
        if is_wrapper
        else transformers.AutoModelForCausalLM
    )


def copy_checkpoint(source: Path, destination: Path) -> Path:
    """A copy of a cached checkpoint that a test may damage."""
    shutil.copytree(source, destination, dirs_exist_ok=True)
    return destination


def edit_config(directory: Path, *, remove: tuple[str, ...] = (), **fields: Any) -> None:
    """Changes config.json in place."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key in remove:
        config.pop(key, None)
    path.write_text(json.dumps({**config, **fields}))
