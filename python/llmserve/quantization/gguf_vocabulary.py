"""A folder's tokenizer as the fields tokenizer.* of a GGUF file. Names: gguf-py 0.19."""

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmserve.errors import NotSupported
from llmserve.quantization.gguf_file import Value
from llmserve.tokenization.pre_tokenizers import PRE_TOKENIZERS
from llmserve.tokenization.sentencepiece_tokenizer import PieceType
from llmserve.tokenization.tokenizer import Tokenizer
from llmserve.tokenization.tokenizer_document import SPACE, merges_of_ranks
from llmserve.tokenization.tokenizer_files import find_tokenizer, read_tokenizer

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def vocabulary_fields(model: Path, config: Mapping[str, Any]) -> dict[str, Value]:
    """Tokens, how texts are cut, special ids and the chat template. Raises NotSupported for a
    tokenizer that the format has no place for."""
    path = find_tokenizer(model)
    tokenizer = Tokenizer.from_path(model)
    if tokenizer is None or path is None:
        raise NotSupported(f"{model}: gguf takes a tokenizer, and there is none")
    document = json.loads(read_tokenizer(path).to_str())
    size = int(config["vocab_size"])
    if document["model"].get("type") != "BPE":
        raise NotSupported(
            f"{path}: gguf is written of byte pairs, and this tokenizer is of "
            f"{document['model'].get('type')}"
        )
    fields = _byte_level(document, size) or _sentencepiece(document, size, path)
    if fields is None:
        raise NotSupported(
            f"{path}: gguf is written of byte-level BPE whose way to cut words has a name there, "
            f"and of SentencePiece; this one is neither"
        )
    fields |= _ends(model, tokenizer, config)
    template = ""
    if "default" in tokenizer.chat_template_names:
        template = tokenizer.chat_template_source or ""
    if template:
        fields["tokenizer.chat_template"] = template
    return fields


def _byte_level(document: Mapping[str, Any], size: int) -> dict[str, Value] | None:
    pre = _pre_tokenizer(document)
    if pre is None:
        return None
    tokens, types = _tokens(document, size)
    merges = [" ".join(pair) for pair in _merges(document)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }


def _pre_tokenizer(document: Mapping[str, Any]) -> str | None:
    """GGUF's name for how the document cuts words."""
    steps = _steps(document, "pre_tokenizer", "pretokenizers")
    patterns = tuple(
        step["pattern"].get("Regex", "") for step in steps if step.get("type") == "Split"
    )
    if not any(step.get("type") == "ByteLevel" for step in steps):
        return None
    ignores = bool(document["model"].get("ignore_merges"))
    for name, known in PRE_TOKENIZERS.items():
        if known.patterns == patterns and known.ignore_merges == ignores and known.is_byte_level:
            return name
    return None


def _sentencepiece(document: Mapping[str, Any], size: int, path: Path) -> dict[str, Value] | None:
    """Pieces with scores: of two neighbours those become one whose piece has the highest."""
    has_prefix = _has_prefix(document)
    if has_prefix is None or not document["model"].get("byte_fallback"):
        return None
    tokens, types = _tokens(document, size)
    unknown = document["model"].get("unk_token")
    vocab = document["model"]["vocab"]
    for token, token_id in vocab.items():
        if _BYTE.fullmatch(token):
            types[token_id] = PieceType.BYTE
    if unknown in vocab:
        types[vocab[unknown]] = PieceType.UNKNOWN
    tokens = [
        token.replace(" ", SPACE) if kind == PieceType.USER_DEFINED else token
        for token, kind in zip(tokens, types, strict=True)
    ]
    ranks = _piece_ranks(document, tokens, types, path)
    fields: dict[str, Value] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [
            -float(ranks.get(token, len(ranks))) if kind == PieceType.NORMAL else 0.0
            for token, kind in zip(tokens, types, strict=True)
        ],
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.add_space_prefix": has_prefix,
    }
    if unknown in vocab:
        fields["tokenizer.ggml.unknown_token_id"] = int(vocab[unknown])
    return fields


def _has_prefix(document: Mapping[str, Any]) -> bool | None:
    """Whether a space goes before a text; None for a document that does more than SentencePiece."""
    has_prefix = False
    for step in _steps(document, "normalizer", "normalizers"):
        if step.get("type") == "Prepend" and step.get("prepend") == SPACE:
            has_prefix = True
        elif step.get("type") != "Replace" or step.get("content") != SPACE:
            return None
    for step in _steps(document, "pre_tokenizer", "pretokenizers"):
        if step.get("type") == "Metaspace":
            has_prefix = step.get("prepend_scheme", "always") != "never"
            # Words that are cut apart make no piece together.
            if step.get("split", True) and any(
                SPACE in token.lstrip(SPACE) or token.startswith(2 * SPACE)
                for token in document["model"]["vocab"]
            ):
                return None
        elif step.get("type") != "Split" or step.get("pattern") != {"String": " "}:
            return None
    return has_prefix


def _piece_ranks(
    document: Mapping[str, Any], tokens: list[str], types: list[int], path: Path
) -> dict[str, int]:
    """The order in which pieces are made. Raises NotSupported where the document's pairs are not
    all that make its pieces: then scores would make others."""
    merges = _merges(document)
    ranks: dict[str, int] = {}
    for left, right in merges:
        ranks.setdefault(left + right, len(ranks))
    kinds = (PieceType.NORMAL, PieceType.USER_DEFINED)
    usable = [token for token, kind in zip(tokens, types, strict=True) if kind in kinds]
    order = dict.fromkeys(tokens, float(len(ranks))) | ranks
    # Tokens that the user defined are cut out of the text before.
    whole = {t for t, kind in zip(tokens, types, strict=True) if kind == PieceType.NORMAL}
    expected = {pair for pair in merges_of_ranks(order, usable, path) if "".join(pair) in whole}
    made = [left + right for left, right in merges]
    is_in_order = all(ranks[a] <= ranks[b] for a, b in itertools.pairwise(made))
    if not is_in_order or expected != {pair for pair in merges if "".join(pair) in whole}:
        raise NotSupported(
            f"{path}: gguf has scores of SentencePiece's pieces, and this vocabulary's pairs are "
            f"no order of its pieces: other tokens would come of them"
        )
    return ranks


def _tokens(document: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """By id, with the PieceType of each."""
    tokens = {int(i): token for token, i in document["model"]["vocab"].items()}
    kinds: dict[int, int] = dict.fromkeys(tokens, PieceType.NORMAL)
    for added in document["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = PieceType.CONTROL if added["special"] else PieceType.USER_DEFINED
    texts = [tokens.get(i, f"[PAD{i}]") for i in range(size)]
    return texts, [int(kinds.get(i, PieceType.UNUSED)) for i in range(size)]


def _merges(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = []
    for pair in document["model"]["merges"]:
        left, right = pair.split(" ") if isinstance(pair, str) else pair
        pairs.append((left, right))
    return pairs


def _steps(document: Mapping[str, Any], field: str, members: str) -> list[Mapping[str, Any]]:
    top = document.get(field)
    return [] if not top else list(top.get(members, [top]))


def _ends(model: Path, tokenizer: Tokenizer, config: Mapping[str, Any]) -> dict[str, Value]:
    ends = config.get("eos_token_id")
    end = ends[0] if isinstance(ends, list) else ends
    generation = model / "generation_config.json"
    if generation.exists():
        said = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id")
        end = said[-1] if isinstance(said, list) and said else end
    alone, full = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    out: dict[str, Value] = {
        "tokenizer.ggml.add_bos_token": full != alone and full[:1] != alone[:1],
        "tokenizer.ggml.add_eos_token": full != alone and full[-1:] != alone[-1:],
    }
    for name, token_id in (("bos", config.get("bos_token_id")), ("eos", end)):
        if isinstance(token_id, int):
            out[f"tokenizer.ggml.{name}_token_id"] = token_id
    return out
