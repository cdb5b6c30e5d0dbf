"""Small tokenizers of the kinds in use, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = [
    "the quick brown fox jumps over the lazy dog — naïve café ☕ 日本語 éè",
    "hello hello world 😀 " * 5,
]


def byte_level(vocab_size: int = 400) -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it, with added tokens that are awkward on purpose."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("ab cd"), AddedToken("éx"), AddedToken("日本")])
    tokenizer.add_special_tokens(["<|é|>"])
    return tokenizer


def sentence_piece() -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral have it: Replace, ByteFallback, Fuse, Strip, and a BOS."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    parsed = json.loads(tokenizer.to_str())
    parsed["added_tokens"] = [t for t in parsed["added_tokens"] if t["content"] not in byte_tokens]
    return tokenizers.Tokenizer.from_str(json.dumps(parsed))


def metaspace() -> tokenizers.Tokenizer:
    """As T5 and newer conversions of SentencePiece models have it."""
    tokenizer = sentence_piece()
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def metaspace_that_prepends_nothing() -> tokenizers.Tokenizer:
    """As newer Llama conversions have it: nothing is dropped at the start either."""
    tokenizer = metaspace()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    return tokenizer


def gemma() -> tokenizers.Tokenizer:
    """As Gemma has it: no space is stripped at the start."""
    tokenizer = sentence_piece()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def unigram() -> tokenizers.Tokenizer:
    """As ALBERT and XLM-R have it."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=100, special_tokens=["<unk>", "<s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def word_piece(cleanup: bool = True) -> tokenizers.Tokenizer:
    """As BERT has it."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=cleanup)
    trainer = trainers.WordPieceTrainer(
        vocab_size=150, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS, "it isn't, is it? I've done! We're 'm 's . ?"], trainer)
    tokenizer.add_tokens(["n't", "'ve", "##n't", "do not", "a ' b", "## x"])
    return tokenizer


def word_piece_without_cleanup() -> tokenizers.Tokenizer:
    return word_piece(cleanup=False)


def words() -> tokenizers.Tokenizer:
    """Whole words and no decoder: the library puts spaces between them."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def save(tokenizer: tokenizers.Tokenizer, directory: Path, **changes: object) -> Path:
    """Writes tokenizer.json, with top-level fields replaced; returns the directory."""
    parsed = {**json.loads(tokenizer.to_str()), **changes}
    (directory / "tokenizer.json").write_text(json.dumps(parsed), encoding="utf-8")
    return directory
