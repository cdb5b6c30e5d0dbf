"""tiktoken vocabularies: lines of a token's bytes in base64 and its rank, as tokenizer.json
documents.

The file has neither the pattern that cuts words nor the special tokens. The pattern follows from
the file's name, as published; the special tokens are in tokenizer_config.json beside it.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping
from pathlib import Path

from llmserve.errors import CorruptFile, NotSupported
from llmserve.tokenization.file_bounds import MAX_TOKENS
from llmserve.tokenization.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from llmserve.tokenization.tokenizer_document import (
    AddedToken,
    Document,
    Ends,
    byte_level_bpe,
    merges_of_ranks,
)
from llmserve.tokenization.vocabulary import byte_level_text

# The published file, the pre-tokenizer of the same pattern.
_PATTERNS: Mapping[str, str] = {
    "tokenizer.model": "llama3",  # Meta's of Llama 3
    "qwen.tiktoken": "qwen2",
    "tiktoken.model": "kimi-k2",
    "o200k_base.tiktoken": "gpt-4o",
    "r50k_base.tiktoken": "gpt-2",
    "p50k_base.tiktoken": "gpt-2",
}
# tiktoken's own, whose last alternatives differ from Llama 3's.
_CL100K = PreTokenizer(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++\z|\s*[\r\n]|\s+(?!\S)|\s",
    ),
    ignore_merges=True,
)


def is_tiktoken(data: bytes) -> bool:
    """Whether a file begins with a token in base64 and a number."""
    first = data[:1024].split(b"\n", 1)[0].split(b" ")
    return len(first) == 2 and first[1].strip().isdigit() and decoded_token(first[0]) is not None


def tiktoken_document(data: bytes, path: Path, added: Iterable[AddedToken], ends: Ends) -> Document:
    """The tokenizer.json of a file's bytes. Raises CorruptFile, NotSupported."""
    vocab = {byte_level_text(token): rank for token, rank in _ranks(data, path).items()}
    # Whole words are looked up first, and pairs are merged by the rank of what they make.
    pattern = _pattern(path)
    words = PreTokenizer(pattern.patterns, ignore_merges=True)
    return byte_level_bpe(vocab, merges_of_ranks(vocab, vocab, path), words, added, ends)


def _pattern(path: Path) -> PreTokenizer:
    if path.name == "cl100k_base.tiktoken":
        return _CL100K
    if path.name not in _PATTERNS:
        raise NotSupported(
            f"{path}: the pattern of a tiktoken file follows from its name, and this one is not "
            f"known ({', '.join([*_PATTERNS, 'cl100k_base.tiktoken'])}); convert it to a "
            f"tokenizer.json"
        )
    return PRE_TOKENIZERS[_PATTERNS[path.name]]


def _ranks(data: bytes, path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    if data.count(b"\n") + data.count(b"\r") > MAX_TOKENS:
        raise CorruptFile(f"{path}: more than {MAX_TOKENS} lines")
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        token, _, rank = line.partition(b" ")
        decoded = decoded_token(token)
        if not decoded or not rank.isdigit() or len(rank) > 9:
            raise CorruptFile(f"{path}: line {number}: expected a token in base64 and its rank")
        if ranks.setdefault(decoded, int(rank)) != int(rank):
            raise CorruptFile(f"{path}: line {number}: the token {decoded!r:.80} comes twice")
    if len(set(ranks.values())) != len(ranks):
        raise CorruptFile(f"{path}: two tokens have one rank")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise CorruptFile(f"{path}: the byte {missing[0]} has no token")
    return ranks


def decoded_token(token: bytes) -> bytes | None:
    """The bytes that stand in base64; None where they do not."""
    try:
        return base64.b64decode(token, validate=True)
    except binascii.Error:
        return None
