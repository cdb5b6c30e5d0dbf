"""The tokenizer of tiny checkpoints, trained on the spot."""

from __future__ import annotations

import functools
from typing import Any

VOCAB_SIZE = 320

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
