"""The tokenizer of a folder, whatever file it is in, as the tokenizers library has it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llmserve.checkpoint.model_files import (
    MAX_TOKENIZER_BYTES,
    JsonObject,
    parse_json_object,
    read_bytes,
    read_json_object,
)
from llmserve.checkpoint.repository import tokenizer_files
from llmserve.errors import CorruptFile, InvalidArgument
from llmserve.tokenization.file_bounds import MAX_VALUES, check_json
from llmserve.tokenization.library_calls import is_library_error
from llmserve.tokenization.sentencepiece_tokenizer import (
    PieceType,
    SentencePieceModel,
    parse_sentencepiece,
    piece_ends,
    sentencepiece_document,
)
from llmserve.tokenization.tekken_tokenizer import is_tekken, tekken_document
from llmserve.tokenization.tiktoken_tokenizer import is_tiktoken, tiktoken_document
from llmserve.tokenization.tokenizer_document import AddedToken, Document, Ends
from llmserve.tokenization.vocab_and_merges import vocabulary_document

if TYPE_CHECKING:
    import tokenizers


def find_tokenizer(directory: Path) -> Path | None:
    """The tokenizer's file in a folder."""
    names = sorted(path.name for path in directory.glob("*") if path.exists())
    return next((directory / name for name in tokenizer_files(names)), None)


def read_tokenizer(path: Path) -> "tokenizers.Tokenizer":
    """The library's tokenizer of a file. The special tokens of formats other than tokenizer.json
    come from tokenizer_config.json beside it. Raises CorruptFile, NotSupported, and InvalidArgument
    for a file that is no tokenizer's."""
    data = read_bytes(path.parent, path.name, MAX_TOKENIZER_BYTES)
    if data is None:
        raise InvalidArgument(f"tokenizer: there is nothing at {str(path)!r}")
    if path.suffix == ".json" and path.name != "vocab.json":
        return _from_json(data, path)
    config = read_json_object(path.parent, "tokenizer_config.json") or {}
    added = list(configured_tokens(config, path.parent / "tokenizer_config.json"))
    if path.name == "vocab.json":
        document = vocabulary_document(data, path, added, config)
    elif is_tiktoken(data):
        document = tiktoken_document(data, path, added, _tiktoken_ends(config, added))
    else:
        document = _sentencepiece(parse_sentencepiece(data, path), config, added, path)
    return make_tokenizer(document, path)


def make_tokenizer(document: Document, path: Path) -> "tokenizers.Tokenizer":
    """The library's tokenizer of a tokenizer.json that was made of `path`. Raises CorruptFile."""
    return _from_json(json.dumps(document).encode(), path)


def _from_json(data: bytes, path: Path) -> "tokenizers.Tokenizer":
    import tokenizers  # here, so that importing llmserve stays quick

    check_json(data, path)
    try:
        return tokenizers.Tokenizer.from_buffer(data)
    except BaseException as error:  # the library raises nothing narrower
        if not is_library_error(error):
            raise
        # What else it is, or where it breaks, is looked for now: parsing takes long.
        parsed = parse_json_object(data, path, MAX_VALUES)
        if is_tekken(parsed):
            return make_tokenizer(tekken_document(parsed, path), path)
        raise CorruptFile(f"{path}: not a tokenizer: {error}") from error


def _sentencepiece(
    model: SentencePieceModel, config: JsonObject, added: list[AddedToken], path: Path
) -> Document:
    beyond = [token for token in added if token.token_id >= len(model.pieces)]
    for token in added:
        if token.token_id < len(model.pieces):
            model.pieces[token.token_id] = token.content
            kind = PieceType.CONTROL if token.is_special else PieceType.USER_DEFINED
            model.types[token.token_id] = kind
    prefix = config.get("add_prefix_space")
    if isinstance(prefix, bool):
        model.add_prefix = prefix
    before = [model.bos_id] if config.get("add_bos_token", True) and model.bos_id >= 0 else []
    after = [model.eos_id] if config.get("add_eos_token", False) and model.eos_id >= 0 else []
    for token_id in (*before, *after):
        if token_id >= len(model.pieces):
            raise CorruptFile(f"{path}: the id {token_id} is beyond the {len(model.pieces)} pieces")
    ends = piece_ends(model.pieces, before, after)
    return sentencepiece_document(model, ends, path, beyond)


def _tiktoken_ends(config: JsonObject, added: list[AddedToken]) -> Ends:
    """A begin-of-sequence token only where the config asks for it, or for Llama 3's."""
    ids = {token.content: token.token_id for token in added}
    bos = config.get("bos_token")
    content = bos.get("content") if isinstance(bos, dict) else bos
    wants = config.get("add_bos_token", content == "<|begin_of_text|>")
    if not wants or not isinstance(content, str) or content not in ids:
        return Ends()
    return Ends(before=((content, ids[content]),))


def configured_tokens(config: JsonObject, path: Path) -> Iterator[AddedToken]:
    """The added tokens of `path`, a tokenizer_config.json. Raises CorruptFile."""
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise CorruptFile(f"{path}: added_tokens_decoder must be an object")
    for token_id, token in decoder.items():
        content = token.get("content") if isinstance(token, dict) else None
        is_id = len(token_id) < 10 and token_id.isascii() and token_id.isdecimal()
        if not isinstance(content, str) or not is_id:
            raise CorruptFile(f"{path}: added_tokens_decoder: expected ids and their tokens")
        yield AddedToken(int(token_id), content, bool(token.get("special")))
