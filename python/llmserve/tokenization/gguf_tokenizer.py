"""The tokenizer and the chat templates of a GGUF file.

What the file's names stand for, and what holds where it says nothing: llama.cpp, llama-vocab.cpp,
of llama-cpp-python 0.3.36.
"""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmserve import _core
from llmserve.common.arguments import describe
from llmserve.errors import CorruptFile, NotSupported
from llmserve.tokenization.file_bounds import MAX_TOKENS
from llmserve.tokenization.harmony_ends import harmony_end_ids
from llmserve.tokenization.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from llmserve.tokenization.sentencepiece_tokenizer import (
    PieceType,
    SentencePieceModel,
    piece_ends,
    sentencepiece_document,
)
from llmserve.tokenization.tokenizer_document import (
    SPACE,
    AddedToken,
    Document,
    Ends,
    Merges,
    byte_level_bpe,
    merges_of_ranks,
    word_piece,
)
from llmserve.tokenization.tokenizer_files import make_tokenizer

if TYPE_CHECKING:
    import tokenizers

_PREFIX = "tokenizer.ggml."
# Ids where the file has none: of BOS, EOS, UNK, SEP, PAD, MASK.
_SPECIAL_IDS: Mapping[str, Mapping[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
    "gpt2": {},
}
# What encode() adds where the file does not say: BOS, EOS, SEP.
_ADDS: Mapping[str, tuple[bool, bool, bool]] = {
    "llama": (True, False, False),
    "t5": (False, True, False),
    "bert": (True, False, True),
    "gpt2": (False, False, False),
}
_END_TEXTS = frozenset(
    ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
) | {"<EOT>", "_<EOT>", "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>", "<|eom_id|>"}  # noqa: RUF001
_ADD_SEP = ("jina-v1-en", "jina-v2-code", "roberta-bpe")


class GgufVocabulary:
    """The fields tokenizer.* of a file, checked one by one. All raise CorruptFile, NotSupported.

    file: `path`, where it is open already.
    """

    def __init__(self, path: Path, file: _core.GgufFile | None = None) -> None:
        self.path = path
        file = _core.GgufFile(str(path)) if file is None else file
        self._fields = file.metadata("tokenizer.")

    @property
    def exists(self) -> bool:
        """Whether the file has a vocabulary at all."""
        return self._fields.get(f"{_PREFIX}model", "none") not in ("none", "no_vocab")

    @property
    def model(self) -> str:
        """The kind: "llama" (SentencePiece BPE), "t5" (unigram), "bert", "gpt2" (BPE)."""
        model = self._text("model", "")
        if model not in _ADDS:
            raise NotSupported(
                f"{self.path}: metadata {_PREFIX}model: the tokenizer {model!r} is not supported "
                f"({', '.join(_ADDS)}); pass tokenizer=, a folder with tokenizer.json"
            )
        return model

    @property
    def pre_tokenizer(self) -> PreTokenizer:
        """How words are cut."""
        name = self._text("pre", "default")
        if name not in PRE_TOKENIZERS:
            raise NotSupported(
                f"{self.path}: metadata {_PREFIX}pre: the pre-tokenizer {name!r} is not known; "
                f"pass tokenizer=, a folder with the model's tokenizer.json"
            )
        return PRE_TOKENIZERS[name]

    @functools.cached_property
    def tokens(self) -> list[str]:
        """By id. Empty ones are named by their place, as llama.cpp does."""
        tokens = self._strings("tokens")
        if not tokens:
            raise CorruptFile(f"{self.path}: metadata {_PREFIX}tokens: expected tokens, got none")
        if len(tokens) > MAX_TOKENS:
            raise CorruptFile(
                f"{self.path}: metadata {_PREFIX}tokens: {len(tokens)} tokens, at most "
                f"{MAX_TOKENS} are read"
            )
        named = [token or f"[EMPTY_{idx}]" for idx, token in enumerate(tokens)]
        if len(set(named)) < len(named):
            twice = next(token for token, count in Counter(named).items() if count > 1)
            raise CorruptFile(
                f"{self.path}: metadata {_PREFIX}tokens: the token {twice!r} comes twice"
            )
        return named

    @functools.cached_property
    def types(self) -> list[int]:
        """The PieceType of each token."""
        count = len(self.tokens)
        kinds = self.numbers("token_type", count, int(PieceType.NORMAL))
        if set(map(type, kinds)) != {int}:
            raise CorruptFile(f"{self.path}: metadata {_PREFIX}token_type: expected integers")
        return [int(kind) for kind in kinds]

    @property
    def merges(self) -> Merges | None:
        """The pairs of BPE in their order; None: the file has none."""
        if f"{_PREFIX}merges" not in self._fields:
            return None
        texts = self._strings("merges")
        # 150,000 pairs are a third of the time that the tokenizer takes, and the library cuts
        # texts itself: at any space, and none that begins like its files do.
        if all(text.count(" ") == 1 and not text.startswith((" ", "#version")) for text in texts):
            return texts
        return [self._pair(text) for text in texts]

    def check_merges(self) -> None:
        """Raises CorruptFile that names the first pair which is not of this vocabulary."""
        known = set(self.tokens)
        for text in self._fields.get(f"{_PREFIX}merges", ()):
            left, right = self._pair(text)
            if not known.issuperset((left, right, left + right)):
                raise CorruptFile(
                    f"{self.path}: metadata {_PREFIX}merges: {left!r} and {right!r} are or make "
                    f"no token of the vocabulary"
                )

    def _pair(self, text: str) -> tuple[str, str]:
        cut = text.find(" ", 1)
        if cut < 0:
            raise CorruptFile(
                f"{self.path}: metadata {_PREFIX}merges: expected two tokens, got {text!r}"
            )
        return text[:cut], text[cut + 1 :]

    def numbers(self, name: str, count: int, default: float) -> list[float]:
        """One number a token."""
        values = self._fields.get(_PREFIX + name, [default] * count)
        are_numbers = isinstance(values, list) and not set(map(type, values)) - {int, float}
        if not isinstance(values, list) or len(values) < count or not are_numbers:
            raise CorruptFile(
                f"{self.path}: metadata {_PREFIX}{name}: expected {count} numbers, one a token"
            )
        return values[:count]

    def flag(self, name: str, default: bool) -> bool:
        """A bool."""
        value = self._fields.get(_PREFIX + name, default)
        if not isinstance(value, bool):
            raise CorruptFile(
                f"{self.path}: metadata {_PREFIX}{name}: expected a bool, got {describe(value)}"
            )
        return value

    @property
    def charsmap(self) -> bytes:
        """SentencePiece's character map, empty without one."""
        value = self._fields.get(f"{_PREFIX}precompiled_charsmap", b"")
        if not isinstance(value, bytes):
            raise CorruptFile(
                f"{self.path}: metadata {_PREFIX}precompiled_charsmap: expected bytes"
            )
        return value

    def special_id(self, name: str) -> int | None:
        """The id of "bos", "eos", "unknown" …; None: there is none."""
        key = f"{_PREFIX}{name}_token_id"
        usual = _SPECIAL_IDS.get(self._text("model", ""), {})
        value = self._fields.get(key, usual.get(name))
        if value is None or (isinstance(value, int) and value >= len(self.tokens)):
            return None  # as llama.cpp treats ids beyond the vocabulary
        if not isinstance(value, int) or value < 0:
            raise CorruptFile(f"{self.path}: metadata {key}: expected an id, got {value!r}")
        return value

    def ends(self) -> Ends:
        """What goes around a text."""
        bos, eos, sep = _ADDS[self.model]
        if self.model == "gpt2":
            name = self._text("pre", "default")
            bos, sep = self.pre_tokenizer.add_bos, name in _ADD_SEP
            bos = bos or name == "gemma4"
        before = self._id_if("add_bos_token", bos, "bos")
        after = self._id_if("add_sep_token", sep, "seperator")
        after += self._id_if("add_eos_token", eos, "eos")
        return piece_ends(self.tokens, before, after)

    def _id_if(self, flag: str, default: bool, name: str) -> list[int]:
        if not self.flag(flag, default):
            return []
        token_id = self.special_id(name)
        if token_id is None:
            if _PREFIX + flag not in self._fields:
                return []
            raise CorruptFile(
                f"{self.path}: metadata {_PREFIX}{flag} is true, and there is no "
                f"{_PREFIX}{name}_token_id within the vocabulary"
            )
        return [token_id]

    @property
    def chat_templates(self) -> dict[str, str]:
        """By name; the unnamed one is "default"."""
        templates = {}
        for key, value in self._fields.items():
            if isinstance(value, str) and key.startswith("tokenizer.chat_template"):
                name = key.removeprefix("tokenizer.chat_template").removeprefix(".")
                templates[name or "default"] = value
        return templates

    def special_tokens(self) -> dict[str, str]:
        """As chat templates call them: "bos_token" …"""
        names = {"bos": "bos", "eos": "eos", "unknown": "unk", "seperator": "sep"}
        names |= {"padding": "pad", "mask": "mask", "cls": "cls"}
        ids = {short: self.special_id(name) for name, short in names.items()}
        return {f"{short}_token": self.tokens[i] for short, i in ids.items() if i is not None}

    @property
    def end_ids(self) -> list[int]:
        """The tokens that end a sequence: those that the file names, and control tokens whose text
        is known to end a turn."""
        control = self.control_ids
        harmony = harmony_end_ids(control)
        ids = {self.special_id(name) for name in ("eos", "eot", "eom")}.union(harmony)
        for token, idx in control.items():
            if token in _END_TEXTS and not (harmony and token == "<|end|>"):
                ids.add(idx)
        return sorted(idx for idx in ids if idx is not None)

    @property
    def control_ids(self) -> dict[str, int]:
        """The ids of control tokens, by their text."""
        pairs = enumerate(zip(self.tokens, self.types, strict=True))
        return {token: idx for idx, (token, kind) in pairs if kind == PieceType.CONTROL}

    def _text(self, name: str, default: str) -> str:
        value = self._fields.get(_PREFIX + name, default)
        if not isinstance(value, str):
            raise CorruptFile(f"{self.path}: metadata {_PREFIX}{name}: expected a string")
        return value

    def _strings(self, name: str) -> list[str]:
        values = self._fields.get(_PREFIX + name)
        if not isinstance(values, list) or set(map(type, values)) - {str}:
            raise CorruptFile(f"{self.path}: metadata {_PREFIX}{name}: expected a list of strings")
        return values


def gguf_tokenizer(vocabulary: GgufVocabulary) -> "tokenizers.Tokenizer":
    """The file's tokenizer, which the library makes of a tokenizer.json document."""
    build = {"llama": _sentencepiece, "t5": _sentencepiece, "bert": _bert, "gpt2": _gpt2}
    document = build[vocabulary.model](vocabulary, vocabulary.tokens, vocabulary.types)
    try:
        return make_tokenizer(document, vocabulary.path)
    except CorruptFile:
        vocabulary.check_merges()  # the library has found it sooner, and says less
        raise


def _added(tokens: Sequence[str], types: Sequence[int]) -> list[AddedToken]:
    kinds = {PieceType.CONTROL: True, PieceType.UNKNOWN: True, PieceType.USER_DEFINED: False}
    return [
        AddedToken(idx, token, kinds[PieceType(kind)])
        for idx, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in kinds
    ]


def _gpt2(vocabulary: GgufVocabulary, tokens: list[str], types: list[int]) -> Document:
    vocab = {token: idx for idx, token in enumerate(tokens)}
    merges = vocabulary.merges
    if merges is None:  # Kimi's: the ids of the tokens are their ranks
        normal = [t for t, kind in zip(tokens, types, strict=True) if kind == PieceType.NORMAL]
        merges = merges_of_ranks(vocab, normal, vocabulary.path)
    return byte_level_bpe(
        vocab, merges, vocabulary.pre_tokenizer, _added(tokens, types), vocabulary.ends()
    )


def _sentencepiece(vocabulary: GgufVocabulary, tokens: list[str], types: list[int]) -> Document:
    is_unigram = vocabulary.model == "t5"
    unk_id = vocabulary.special_id("unknown")
    model = SentencePieceModel(
        is_unigram=is_unigram,
        pieces=tokens,
        scores=[float(s) for s in vocabulary.numbers("scores", len(tokens), 0.0)],
        types=types,
        byte_fallback=PieceType.BYTE in types,
        add_prefix=vocabulary.flag("add_space_prefix", True),
        squeeze=vocabulary.flag("remove_extra_whitespaces", False),
        charsmap=vocabulary.charsmap,
        unk_id=-1 if unk_id is None else unk_id,
    )
    return sentencepiece_document(model, vocabulary.ends(), vocabulary.path)


def _bert(vocabulary: GgufVocabulary, tokens: list[str], types: list[int]) -> Document:
    """Words begin with U+2581 there, and here what continues one begins with ##."""
    special = {token.token_id for token in _added(tokens, types)}
    special |= {i for i, token in enumerate(tokens) if token.startswith("[") and token[-1] == "]"}
    vocab = {}
    for idx, token in enumerate(tokens):
        if idx in special:
            vocab[token] = idx
        else:
            vocab[token[1:] if token.startswith(SPACE) else f"##{token}"] = idx
    unk_id = vocabulary.special_id("unknown")
    if unk_id is None:
        raise CorruptFile(f"{vocabulary.path}: metadata {_PREFIX}unknown_token_id: there is none")
    lowercase = vocabulary.flag("normalizer.lowercase", True)
    return word_piece(
        vocab,
        tokens[unk_id],
        _added(tokens, types),
        vocabulary.ends(),
        lowercase=lowercase,
        strip_accents=vocabulary.flag("normalizer.strip_accents", lowercase),
    )
