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

VOCAB_SIZE = 320
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

# What every family gets unless a test overrides it: GQA, two layers, a head_dim that is no power
# of two.
_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
}

_TRAINING_TEXT = [
    "Once upon a time there was a little fox who lived in the forest by the river.",
    "The fox asked the old owl a question, and the owl answered it with another question.",
    "What is 12 + 30? It is 42. The quick brown fox jumps over the lazy dog.",
    '{"name": "fox", "age": 3, "likes": ["river", "forest"]}',
]
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


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

    fields = {**_COMMON, **_FAMILY[family], **overrides}
    config = transformers.AutoConfig.for_model(family, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled(name, noise))
    model = model.eval().to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    options = {"max_shard_size": max_shard_size} if max_shard_size else {}
    model.save_pretrained(directory, **options)
    tokenizer().save_pretrained(directory)
    return model


def _scaled(name: str, noise: Any) -> Any:
    """Weights that keep activations near 1, norms near 1 but not at it, logits well apart."""
    if "norm" in name:
        return 1 + 0.2 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    if "embed_tokens" in name:
        return noise
    gain = 3.0 if "lm_head" in name else 1.0
    return gain * noise / noise.shape[1] ** 0.5


@functools.cache
def tokenizer() -> Any:
    """A byte-level BPE of VOCAB_SIZE tokens with <s>, </s>, <pad>, <unk> and a chat template."""
    import tokenizers
    import transformers

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<s>", "</s>", "<unk>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_TRAINING_TEXT, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast


@functools.cache
def reference_model(directory: Path) -> Any:
    """The checkpoint as transformers runs it: f32 arithmetic, eager attention."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


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
