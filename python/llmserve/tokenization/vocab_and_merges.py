"""Byte-level BPE in two files, vocab.json and merges.txt, as tokenizer.json documents.

GPT-2's layout, and Qwen2's. The files have neither the pattern that cuts words, which follows from
the tokenizer_class of tokenizer_config.json, nor the special tokens, which the configs beside have.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from llmserve.checkpoint.model_files import (
    MAX_TOKENIZER_BYTES,
    JsonObject,
    parse_json_object,
    read_bytes,
    read_json_object,
)
from llmserve.checkpoint.special_tokens import read_special_tokens
from llmserve.common.arguments import INT32_MAX
from llmserve.errors import CorruptFile, NotSupported
from llmserve.tokenization.file_bounds import MAX_TOKENS
from llmserve.tokenization.pre_tokenizers import PRE_TOKENIZERS
from llmserve.tokenization.tokenizer_document import AddedToken, Document, Ends, byte_level_bpe

# tokenizer_class without "Fast", the pre-tokenizer of the same pattern.
_CLASSES = {
    "": "gpt-2",
    "GPT2Tokenizer": "gpt-2",
    "CodeGenTokenizer": "gpt-2",
    "GPTNeoXTokenizer": "gpt-2",
    "PreTrainedTokenizer": "gpt-2",
    "TokenizersBackend": "gpt-2",
    "Qwen2Tokenizer": "qwen2",
}
_GPT2_END = "<|endoftext|>"  # special where no config says so


def vocabulary_document(
    data: bytes, path: Path, added: Iterable[AddedToken], config: JsonObject
) -> Document:
    """The tokenizer.json of vocab.json's bytes, with merges.txt beside it. `added` and `config` are
    tokenizer_config.json's. Raises CorruptFile, NotSupported."""
    vocab = _vocab(data, path)
    tokens = {token.token_id: token for token in _special(vocab, path.parent)}
    tokens |= {token.token_id: token for token in _added(path.parent)}
    tokens |= {token.token_id: token for token in added}
    name = _pre_tokenizer(config, path)
    ends = _ends(config, tokens.values())
    merges = _merges(path.with_name("merges.txt"))
    result = byte_level_bpe(vocab, merges, PRE_TOKENIZERS[name], tokens.values(), ends)
    if name == "qwen2":
        result["normalizer"] = {"type": "NFC"}
    if config.get("add_prefix_space") is True:
        result["pre_tokenizer"]["pretokenizers"][-1]["add_prefix_space"] = True
    return result


def _vocab(data: bytes, path: Path) -> dict[str, int]:
    vocab: dict[str, int] = {}
    for token, token_id in parse_json_object(data, path).items():
        if type(token_id) is not int or not 0 <= token_id <= INT32_MAX:
            raise CorruptFile(f"{path}: {token!r:.80}: expected an id, got {token_id!r:.80}")
        vocab[token] = token_id
    if len(set(vocab.values())) < len(vocab):
        raise CorruptFile(f"{path}: two tokens have one id")
    return vocab


def _merges(path: Path) -> list[tuple[str, str]]:
    data = read_bytes(path.parent, path.name, MAX_TOKENIZER_BYTES)
    if data is None:
        raise CorruptFile(f"{path.parent} has vocab.json and no merges.txt, which belongs to it")
    if data.count(b"\n") > MAX_TOKENS:
        raise CorruptFile(f"{path}: more than {MAX_TOKENS} lines")
    try:
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise CorruptFile(f"{path}: not UTF-8 at byte {error.start}") from error
    merges = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.rstrip("\r").partition(" ")
        if not left or not right or " " in right:
            raise CorruptFile(f"{path}: line {number}: expected two tokens, got {line!r:.80}")
        merges.append((left, right))
    return merges


def _pre_tokenizer(config: JsonObject, path: Path) -> str:
    name = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if name not in _CLASSES:
        raise NotSupported(
            f"{path}: the pattern that cuts words follows from the tokenizer_class of "
            f"tokenizer_config.json, and {name:.80} is not known "
            f"({', '.join(filter(None, _CLASSES))}); convert it to a tokenizer.json"
        )
    return _CLASSES[name]


def _special(vocab: dict[str, int], folder: Path) -> Iterator[AddedToken]:
    """Those that the configs have names for, or GPT-2's one."""
    for content in {_GPT2_END, *read_special_tokens(folder).values()}:
        if content in vocab:
            yield AddedToken(vocab[content], content, is_special=True)


def _added(folder: Path) -> Iterator[AddedToken]:
    """added_tokens.json, which older checkpoints have."""
    for content, token_id in (read_json_object(folder, "added_tokens.json") or {}).items():
        if type(token_id) is not int or not 0 <= token_id <= INT32_MAX:
            raise CorruptFile(f"{folder / 'added_tokens.json'}: {content!r:.80}: expected an id")
        yield AddedToken(token_id, content, is_special=True)


def _ends(config: JsonObject, tokens: Iterable[AddedToken]) -> Ends:
    """A begin-of-sequence token where the config asks for it, as OPT's does."""
    bos = config.get("bos_token")
    content = bos.get("content") if isinstance(bos, dict) else bos
    ids = {token.content: token.token_id for token in tokens}
    if config.get("add_bos_token") is not True or content not in ids:
        return Ends()
    return Ends(before=((str(content), ids[str(content)]),))
