"""tekken.json, Mistral's own tokenizer file, as a tokenizer.json document.

tiktoken's ranks and pattern with special tokens in front: their ids are the first, and a token's is
its rank after them. After mistral-common 1.13, tokens/tokenizers/tekken.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmserve.checkpoint.model_files import JsonObject
from llmserve.errors import CorruptFile
from llmserve.tokenization.pre_tokenizers import PreTokenizer
from llmserve.tokenization.tiktoken_tokenizer import decoded_token
from llmserve.tokenization.tokenizer_document import (
    AddedToken,
    Document,
    Ends,
    byte_level_bpe,
    merges_of_ranks,
)
from llmserve.tokenization.vocabulary import byte_level_text

_BOS = "<s>"
# Of files up to version 7, which do not list them, by id.
_UNLISTED = """
    <unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS]
    [/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX]
    [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]
"""
_MAX_SPECIAL = 1 << 16  # published: 1000


def is_tekken(parsed: Mapping[str, Any]) -> bool:
    """Whether a JSON file is a tekken.json and no tokenizer.json."""
    return isinstance(parsed.get("config"), dict) and isinstance(parsed.get("vocab"), list)


def tekken_document(parsed: Mapping[str, Any], path: Path) -> Document:
    """The tokenizer.json of a parsed file. Raises CorruptFile."""
    config: JsonObject = parsed["config"]
    size = _count(config, "default_vocab_size", path)
    num_special = _count(config, "default_num_special_tokens", path)
    if num_special > _MAX_SPECIAL:
        raise CorruptFile(
            f"{path}: config.default_num_special_tokens: expected up to {_MAX_SPECIAL}, got "
            f"{num_special}"
        )
    pattern = config.get("pattern")
    if not isinstance(pattern, str):
        raise CorruptFile(f"{path}: config.pattern: expected a string, got {pattern!r:.80}")
    added = _special_tokens(parsed.get("special_tokens"), num_special, path)
    ranks = _ranks(parsed["vocab"], size - num_special, path)
    special = {token.content: token.token_id for token in added}
    vocab = {byte_level_text(token): rank + num_special for token, rank in ranks.items()}
    merges = merges_of_ranks(vocab, vocab.keys() - special.keys(), path)
    bos = [(token.content, token.token_id) for token in added if token.content == _BOS]
    words = PreTokenizer((pattern,), ignore_merges=True)  # whole words are looked up first
    # Special tokens are in the vocabulary, too: the library would give them other ids.
    return byte_level_bpe({**vocab, **special}, merges, words, added, Ends(tuple(bos)))


def _count(config: JsonObject, field: str, path: Path) -> int:
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CorruptFile(f"{path}: config.{field}: expected a count, got {value!r:.80}")
    return value


def _special_tokens(listed: Any, count: int, path: Path) -> list[AddedToken]:
    """`count` of them; those that no one named have names of their own."""
    if listed is None:
        listed = [{"rank": rank, "token_str": text} for rank, text in enumerate(_UNLISTED.split())]
    if not isinstance(listed, list) or len(listed) > count:
        raise CorruptFile(f"{path}: special_tokens: expected a list of up to {count}")
    texts: list[str] = []
    known: set[str] = set()
    for place, token in enumerate(listed):
        text = token.get("token_str") if isinstance(token, dict) else None
        if not isinstance(text, str) or token.get("rank") != place or text in known:
            raise CorruptFile(
                f"{path}: special_tokens[{place}]: expected rank {place} and a text of its own"
            )
        texts.append(text)
        known.add(text)
    texts += [f"<SPECIAL_{i}>" for i in range(len(texts), count)]
    return [AddedToken(i, text, is_special=True) for i, text in enumerate(texts)]


def _ranks(vocab: list[Any], count: int, path: Path) -> dict[bytes, int]:
    """The first `count` tokens; the first 256 of them are the bytes."""
    if not 256 <= count <= len(vocab):
        raise CorruptFile(
            f"{path}: config.default_vocab_size: expected special tokens and 256 to {len(vocab)} "
            f"others, got {count} others"
        )
    ranks: dict[bytes, int] = {}
    for rank, entry in enumerate(vocab[:count]):
        text = entry.get("token_bytes") if isinstance(entry, dict) else None
        token = decoded_token(text.encode(errors="replace")) if isinstance(text, str) else None
        is_byte = rank >= 256 or token == bytes([rank])
        if not token or not is_byte or entry.get("rank") != rank:
            raise CorruptFile(f"{path}: vocab[{rank}]: expected rank {rank} and bytes in base64")
        if ranks.setdefault(token, rank) != rank:
            raise CorruptFile(f"{path}: vocab[{rank}]: the token {token!r} comes twice")
    return ranks
