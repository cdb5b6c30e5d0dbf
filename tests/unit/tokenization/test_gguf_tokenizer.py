"""The tokenizers of GGUF files: the ids and texts of the tokenizer that the file was made from."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import tokenizers
from gguf_files import add_bpe
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llmserve.errors import CorruptFile, NotSupported
from llmserve.tokenization.pre_tokenizers import PRE_TOKENIZERS
from llmserve.tokenization.tokenizer import Tokenizer
from tokenizer_files import TEXTS, byte_level, word_piece
from tokenizers import Regex, pre_tokenizers, processors

CORPUS = [
    *TEXTS,
    "Once upon a time there was a fox. It isn't 12345 or 3.14, we'll see: naïve café.",
    "  two  spaces,\n\nnew lines\tand tabs 中文字符 русский текст العربية हिन्दी",
]
SAMPLES = [
    "",
    " ",
    "hello",
    " hello  world ",
    "It isn't 1234567 o'clock, WE'LL see!",
    "a\n\n b\r\n\tc   d",
    "naïve café 日本語 😀 مرحبا ⅷ ½ ①",
    "<|end|>hello<s> there</s>",
    "x" * 50 + " " * 9 + "y",
    "(foo)[bar]{baz}; if (a != b) return -1; // ¿qué?",
]
TEXT = st.text(
    st.sampled_from("ab c\n\t'sré日🙂1234.,!?-_<>▁ ZQ") | st.characters(codec="utf-8"), max_size=30
)
_FUZZ = dict(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
Writer = Callable[[gguf.GGUFWriter], None]


def load(path: Path, add: Writer) -> Tokenizer:
    """The tokenizer of a file with nothing but metadata."""
    writer = gguf.GGUFWriter(path, "llama")
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = Tokenizer.from_path(path)
    assert tokenizer is not None
    return tokenizer


def check_alike(
    ours: Tokenizer, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str] | None
) -> None:
    for text in SAMPLES:
        ids = encode(text)
        assert ours.encode(text) == ids, text
        if decode is not None:
            assert ours.decode(ids) == decode(ids), text


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


@pytest.mark.parametrize(
    ("pre", "pre_tokenizer"),
    [
        ("gpt-2", pre_tokenizers.ByteLevel(add_prefix_space=False)),
        ("qwen2", split_by(QWEN2)),
        ("dbrx", split_by(LLAMA3)),
        (
            "smollm",
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            ),
        ),
    ],
)
def test_bpe_gives_the_ids_of_the_tokenizer_json(
    pre: str, pre_tokenizer: pre_tokenizers.PreTokenizer, tmp_path: Path
) -> None:
    source = byte_level(500)
    source.pre_tokenizer = pre_tokenizer
    ours = load(tmp_path / "v.gguf", lambda writer: add_bpe(writer, source, pre))
    check_alike(ours, lambda text: source.encode(text).ids, source.decode)

    @settings(**_FUZZ)
    @given(text=TEXT)
    def check(text: str) -> None:
        assert ours.encode(text) == source.encode(text).ids

    check()


@pytest.mark.parametrize(
    ("name", "encoding"), [("gpt-4o", "o200k_base"), ("dbrx", "cl100k_base"), ("gpt-2", "gpt2")]
)
def test_patterns_cut_words_as_tiktoken_does(name: str, encoding: str) -> None:
    import regex

    pattern = {
        "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        "cl100k_base": (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++"
            r"[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
        ),
        "o200k_base": "|".join(
            [
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
                r"\p{N}{1,3}",
                r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
                r"\s*[\r\n]+",
                r"\s+(?!\S)",
                r"\s+",
            ]
        ),
    }[encoding]
    for text in SAMPLES:
        words = [word for word, _ in cut(name, text)]
        if encoding != "cl100k_base":  # which cuts runs of new lines elsewhere
            assert words == regex.findall(pattern, text), text


def cut(name: str, text: str) -> list[tuple[str, tuple[int, int]]]:
    steps = [pre_tokenizers.Split(Regex(p), "isolated") for p in PRE_TOKENIZERS[name].patterns]
    return pre_tokenizers.Sequence(steps).pre_tokenize_str(text)


def test_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match=r"tokenizer.ggml.pre: the pre-tokenizer 'new-one'"):
        load(tmp_path / "v.gguf", lambda writer: add_bpe(writer, byte_level(), "new-one"))


def test_llama3_begins_with_bos_and_takes_whole_words_first(tmp_path: Path) -> None:
    source = byte_level(500)

    def add(writer: gguf.GGUFWriter) -> None:
        add_bpe(writer, source, "llama-bpe")
        writer.add_bos_token_id(0)

    ours = load(tmp_path / "v.gguf", add)
    source.pre_tokenizer = split_by(LLAMA3)
    source.model.ignore_merges = True
    source.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 0)]
    )
    check_alike(ours, lambda text: source.encode(text).ids, source.decode)
    assert (
        ours.encode("hello", add_special_tokens=False)
        == source.encode("hello", add_special_tokens=False).ids
    )


@pytest.mark.parametrize("odd", ["  a", "#version a", " # b"])
def test_merges_that_the_library_would_cut_otherwise_are_cut_here(odd: str, tmp_path: Path) -> None:
    """A file's text is cut at its first space that does not begin it."""
    left, right = odd[: odd.find(" ", 1)], odd[odd.find(" ", 1) + 1 :]
    tokens = list(dict.fromkeys([*byte_level(0).get_vocab(), left, right, left + right, "ab"]))

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_merges([odd, "a b"])

    ours = load(tmp_path / "v.gguf", add)
    merges = json.loads(ours._tokenizer.to_str())["model"]["merges"]
    assert merges == [[left, right], ["a", "b"]]
    assert ours.encode("ab") == [tokens.index("ab")]


# SentencePiece


def train(**options: Any) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3),
        model_writer=model,
        vocab_size=options.pop("vocab_size", 420),
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def add_sentencepiece(
    writer: gguf.GGUFWriter, source: sentencepiece.SentencePieceProcessor, model: str
) -> None:
    count = source.vocab_size()
    types = []
    for i in range(count):
        kind = gguf.TokenType.NORMAL
        if source.IsUnknown(i):
            kind = gguf.TokenType.UNKNOWN
        elif source.IsControl(i):
            kind = gguf.TokenType.CONTROL
        elif source.IsUnused(i):
            kind = gguf.TokenType.UNUSED
        elif source.IsByte(i):
            kind = gguf.TokenType.BYTE
        types.append(kind)
    writer.add_tokenizer_model(model)
    writer.add_token_list([source.IdToPiece(i).encode() for i in range(count)])
    writer.add_token_scores([source.GetScore(i) for i in range(count)])
    writer.add_token_types(types)
    writer.add_bos_token_id(source.bos_id())
    writer.add_eos_token_id(source.eos_id())
    writer.add_unk_token_id(source.unk_id())


# Text without the names of control tokens, which sentencepiece does not look for.
PLAIN = [text for text in SAMPLES if "<s>" not in text]


@pytest.mark.parametrize("add_dummy_prefix", [True, False])
@pytest.mark.parametrize("byte_fallback", [True, False])
@pytest.mark.parametrize(("kind", "model"), [("bpe", "llama"), ("unigram", "t5")])
def test_sentencepiece_gives_the_ids_of_the_library(
    kind: str, model: str, byte_fallback: bool, add_dummy_prefix: bool, tmp_path: Path
) -> None:
    source = train(
        model_type=kind,
        byte_fallback=byte_fallback,
        add_dummy_prefix=add_dummy_prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
    )

    def add(writer: gguf.GGUFWriter) -> None:
        add_sentencepiece(writer, source, model)
        writer.add_add_space_prefix(add_dummy_prefix)
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(False)

    ours = load(tmp_path / "v.gguf", add)
    for text in PLAIN:
        ids = source.encode(text)
        assert ours.encode(text) == [source.bos_id(), *ids], text
        if source.unk_id() not in ids:
            assert ours.decode(ids) == source.decode(ids), text

    @settings(**_FUZZ)
    @given(text=TEXT.filter(lambda text: "<" not in text and "\0" not in text))
    def check(text: str) -> None:
        assert ours.encode(text, add_special_tokens=False) == source.encode(text)

    check()


def test_character_map_and_squeezed_spaces_are_those_of_the_library(tmp_path: Path) -> None:
    source = train(model_type="unigram")
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(source.serialized_model_proto())

    def add(writer: gguf.GGUFWriter) -> None:
        add_sentencepiece(writer, source, "t5")
        writer.add_precompiled_charsmap(proto.normalizer_spec.precompiled_charsmap)
        writer.add_remove_extra_whitespaces(True)

    ours = load(tmp_path / "v.gguf", add)
    for text in [*PLAIN, "\uff26\uff35\u3000\uff57 \ufb01 ①", "  many   spaces  "]:
        assert ours.encode(text) == [*source.encode(text), source.eos_id()], text


# WordPiece


def test_word_piece_gives_the_ids_of_the_tokenizer_json(tmp_path: Path) -> None:
    source = word_piece()
    source.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    vocab = {t: i for t, i in source.get_vocab(with_added_tokens=False).items()}
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = ("[UNK]", "[CLS]", "[SEP]")

    def spelled(token: str) -> str:
        if token in special:
            return token
        return token[2:] if token.startswith("##") else f"▁{token}"

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("bert")
        writer.add_token_list([spelled(token) for token in tokens])
        kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
        writer.add_token_types([kinds[token in special] for token in tokens])
        writer.add_unk_token_id(vocab["[UNK]"])
        writer.add_bos_token_id(vocab["[CLS]"])
        writer.add_sep_token_id(vocab["[SEP]"])

    plain = tokenizers.Tokenizer.from_str(source.to_str())
    ours = load(tmp_path / "v.gguf", add)
    for text in PLAIN:
        if any(token in text for token in ("n't", "'ve", "do not", "<|")):
            continue  # words that the source has as added tokens
        expected = [vocab["[CLS]"], *plain.encode(text).ids, vocab["[SEP]"]]
        assert ours.encode(text) == expected, text


# What else the file says, and what it may not


def test_chat_templates_and_their_tokens_come_from_the_file(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        add_bpe(writer, byte_level(), "gpt-2")
        writer.add_bos_token_id(0)
        writer.add_chat_template(
            [
                {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
                {"name": "tool_use", "template": "tools"},
            ]
        )

    ours = load(tmp_path / "v.gguf", add)
    assert ours.chat_template_names == ["default", "tool_use"]
    messages = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(messages, tokenize=False) == "<|end|>hi"


def test_template_that_reaches_for_the_system_is_stopped(tmp_path: Path) -> None:
    sentinel = tmp_path / "executed"

    def add(writer: gguf.GGUFWriter) -> None:
        add_bpe(writer, byte_level(), "gpt-2")
        writer.add_chat_template(
            "{{ cycler.__init__.__globals__.os.popen('touch " + str(sentinel) + "').read() }}"
        )

    ours = load(tmp_path / "v.gguf", add)
    with pytest.raises(ValueError, match="chat template"):
        ours.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert not sentinel.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_token_list(["a", "b", "a"]), "tokens: the token 'a' comes twice"),
        (lambda w: w.add_token_list(["a"]), "are or make no token of the vocabulary"),
        (lambda w: w.add_token_merges(["ab"]), "merges: expected two tokens, got 'ab'"),
        (lambda w: w.add_token_types([1]), "token_type: expected .* numbers, one a token"),
        (lambda w: w.add_bool("tokenizer.ggml.add_bos_token", True), "add_bos_token is true, and"),
        (lambda w: w.add_string("tokenizer.ggml.bos_token_id", "x"), "expected an id, got 'x'"),
    ],
)
def test_bad_vocabulary_is_refused_by_key(change: Writer, message: str, tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        add_bpe(writer, byte_level(), "gpt-2")
        data = writer.kv_data[0]
        spare = gguf.GGUFWriter(tmp_path / "spare", "llama")
        change(spare)
        data.update({k: v for k, v in spare.kv_data[0].items() if k != "general.architecture"})

    with pytest.raises(CorruptFile, match=message):
        load(tmp_path / "v.gguf", add)


def test_tokenizer_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match=r"tokenizer.ggml.model: the tokenizer 'rwkv'"):
        load(tmp_path / "v.gguf", lambda writer: writer.add_tokenizer_model("rwkv"))
