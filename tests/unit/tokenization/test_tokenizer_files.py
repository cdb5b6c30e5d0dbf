"""Tokenizers that are no tokenizer.json: the ids of the libraries that read them."""

from __future__ import annotations

import base64
import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from checkpoints import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from llmserve import LLM, SamplingParams
from llmserve.errors import CorruptFile, InvalidArgument, NotSupported
from llmserve.tokenization.eos_token import read_eos_token_id
from llmserve.tokenization.tokenizer import Tokenizer
from llmserve.tokenization.vocabulary import byte_level_text
from tokenizer_files import TEXTS, byte_level

CORPUS = [*TEXTS, "Once upon a time it was 12345, wasn't it?  Two  spaces\nand a line."] * 3
SAMPLES = ["", "hello", " hello  world ", "it isn't 12345!\n\n x", "naïve 日本語 😀", "a\tb" * 5]
TEXT = st.text(st.sampled_from("ab c\n'tsé日🙂12.,") | st.characters(codec="utf-8"), max_size=30)


def tokenizer_of(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_path(path)
    assert tokenizer is not None
    return tokenizer


def train(**options: Any) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=400,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def save(source: sentencepiece.SentencePieceProcessor, directory: Path, **config: Any) -> Path:
    (directory / "tokenizer.model").write_bytes(source.serialized_model_proto())
    if config:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


LLAMA = dict(
    model_type="bpe",
    byte_fallback=True,
    normalization_rule_name="identity",
    remove_extra_whitespaces=False,
)


@pytest.mark.parametrize(
    "options",
    [
        LLAMA,
        {**LLAMA, "add_dummy_prefix": False},
        {**LLAMA, "model_type": "unigram"},
        {"model_type": "unigram"},
        {"model_type": "bpe", "normalization_rule_name": "nmt_nfkc_cf"},
    ],
)
def test_sentencepiece_file_gives_the_ids_of_the_library(
    options: dict[str, Any], tmp_path: Path
) -> None:
    source = train(**options)
    ours = tokenizer_of(save(source, tmp_path))
    for text in SAMPLES:
        ids = source.encode(text)
        assert ours.encode(text) == [source.bos_id(), *ids], text
        if source.unk_id() not in ids:
            assert ours.decode(ids) == source.decode(ids), text

    @settings(max_examples=60, deadline=None)
    @given(text=TEXT.filter(lambda text: "<" not in text and "\0" not in text))
    def check(text: str) -> None:
        assert ours.encode(text, add_special_tokens=False) == source.encode(text)

    check()


def test_user_defined_symbols_are_cut_out_first(tmp_path: Path) -> None:
    source = train(**{**LLAMA, "add_dummy_prefix": False}, user_defined_symbols=["\n\n", "<mark>"])
    ours = tokenizer_of(save(source, tmp_path))
    for text in ["a\n\nb", "<mark>hello<mark>", "x <mark>\n\n\n"]:
        assert ours.encode(text, add_special_tokens=False) == source.encode(text), text


def test_config_beside_the_file_says_what_is_added(tmp_path: Path) -> None:
    source = train(**LLAMA)
    extra = {str(source.vocab_size()): {"content": "<|im_end|>", "special": True}}
    config = {"add_bos_token": False, "add_eos_token": True, "added_tokens_decoder": extra}
    ours = tokenizer_of(save(source, tmp_path, **config))
    assert ours.encode("hello<|im_end|>") == [
        *source.encode("hello"),
        source.vocab_size(),
        source.eos_id(),
    ]
    assert ours.decode(ours.encode("hello<|im_end|>")) == "hello"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "one without pieces"),
        (b"\xff" * 20, "broken at byte"),
        (b"\x0a\x7f", "broken at byte"),
        (b"\x0a\x03\x0a\x01\xff", "piece 0 is not UTF-8"),
        (b"\x08\x01", "pieces: expected bytes, got a number"),
    ],
)
def test_bad_sentencepiece_file_is_refused(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(CorruptFile, match=message):
        Tokenizer.from_path(tmp_path)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_mutated_sentencepiece_file_is_read_or_refused_by_type(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    contents = bytearray(_proto())
    for _ in range(data.draw(st.integers(1, 3))):
        contents[data.draw(st.integers(0, len(contents) - 1))] = data.draw(st.integers(0, 255))
    directory = tmp_path_factory.getbasetemp()
    (directory / "tokenizer.model").write_bytes(
        contents[: data.draw(st.just(len(contents)) | st.integers(0, len(contents)))]
    )
    try:
        Tokenizer.from_path(directory / "tokenizer.model")
    except (CorruptFile, NotSupported) as error:
        assert "tokenizer.model" in str(error)  # noqa: PT017


_PROTOS: list[bytes] = []


def _proto() -> bytes:
    if not _PROTOS:
        _PROTOS.append(train(**LLAMA).serialized_model_proto())
    return _PROTOS[0]


def ranks() -> dict[bytes, int]:
    """A vocabulary of byte pairs, as tiktoken has it: by the order of its merges."""
    merges = json.loads(byte_level(500).to_str())["model"]["merges"]
    byte_of = {byte_level_text(bytes([b])): b for b in range(256)}
    tokens = [bytes([b]) for b in range(256)]
    tokens += [bytes(byte_of[c] for c in "".join(merge)) for merge in merges]
    return {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}


def tiktoken_lines(vocab: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(t) + b" %d\n" % rank for t, rank in vocab.items())


PATTERNS = {
    "cl100k_base.tiktoken": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
    ),
    "r50k_base.tiktoken": (
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    ),
    "tokenizer.model": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_tiktoken_file_gives_the_ids_of_the_library(name: str, tmp_path: Path) -> None:
    vocab = ranks()
    source = tiktoken.Encoding(
        "test", pat_str=PATTERNS[name], mergeable_ranks=vocab, special_tokens={}
    )
    (tmp_path / name).write_bytes(tiktoken_lines(vocab))
    ours = tokenizer_of(tmp_path)
    for text in SAMPLES:
        assert ours.encode(text) == source.encode(text), text
        assert ours.decode(ours.encode(text)) == text

    @settings(max_examples=60, deadline=None)
    @given(text=TEXT)
    def check(text: str) -> None:
        assert ours.encode(text) == source.encode(text)

    check()


def test_llama3_file_begins_with_bos_and_knows_its_special_tokens(tmp_path: Path) -> None:
    vocab = ranks()
    bos = len(vocab)
    (tmp_path / "tokenizer.model").write_bytes(tiktoken_lines(vocab))
    added = {str(bos): {"content": "<|begin_of_text|>", "special": True}}
    config = {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|begin_of_text|>",
        "added_tokens_decoder": added,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = tokenizer_of(tmp_path)
    assert ours.encode("hello")[0] == ours.eos_token_id == read_eos_token_id(tmp_path) == bos
    assert ours.special_token_ids == [bos]


@pytest.mark.parametrize(
    ("name", "data", "error", "message"),
    [
        ("new.tiktoken", tiktoken_lines(ranks()), NotSupported, "follows from its name"),
        ("qwen.tiktoken", b"YQ== 0\nYQ== 1\n", CorruptFile, "line 2: the token b'a' comes twice"),
        ("qwen.tiktoken", b"YQ== 0\nYg== 0\n", CorruptFile, "two tokens have one rank"),
        ("qwen.tiktoken", b"YQ== 0\n", CorruptFile, "the byte 0 has no token"),
        ("qwen.tiktoken", b"YQ== 0\nb x\n", CorruptFile, "line 2: expected a token in base64"),
    ],
)
def test_bad_tiktoken_file_is_refused(
    name: str, data: bytes, error: type[Exception], message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(error, match=message):
        Tokenizer.from_path(tmp_path)


TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NUM_SPECIAL = 24


def tekken(**changes: Any) -> dict[str, Any]:
    """As Mistral writes it; the vocabulary is longer than what the model has."""
    ordered = sorted(ranks(), key=lambda token: (len(token) > 1, token if len(token) == 1 else b""))
    vocab = [
        {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for i, token in enumerate(ordered)
    ]
    config = {
        "pattern": TEKKEN,
        "num_vocab_tokens": len(vocab),
        "default_vocab_size": len(vocab) - 20 + NUM_SPECIAL,
        "default_num_special_tokens": NUM_SPECIAL,
        "version": "v3",
    }
    return copy.deepcopy({"config": config, "vocab": vocab, **changes})


SPECIAL = [
    {"rank": i, "token_str": text, "is_control": True}
    for i, text in enumerate(["<unk>", "<s>", "</s>", "[INST]", "[/INST]"])
]


@pytest.mark.parametrize("listed", [None, SPECIAL])
def test_tekken_file_gives_the_ids_of_tiktoken_after_the_special_tokens(
    listed: Any, tmp_path: Path
) -> None:
    parsed = tekken(special_tokens=listed)
    (tmp_path / "tekken.json").write_text(json.dumps(parsed))
    (tmp_path / "tokenizer.model.v3").write_bytes(b"not looked at")
    ours = tokenizer_of(tmp_path)
    count = parsed["config"]["default_vocab_size"] - NUM_SPECIAL
    mergeable = {base64.b64decode(t["token_bytes"]): t["rank"] for t in parsed["vocab"][:count]}
    source = tiktoken.Encoding("test", pat_str=TEKKEN, mergeable_ranks=mergeable, special_tokens={})

    def expected(text: str) -> list[int]:
        return [NUM_SPECIAL + token for token in source.encode(text)]

    for text in SAMPLES:
        assert ours.encode(text) == [1, *expected(text)], text
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("[INST]hello[/INST]</s>", add_special_tokens=False) == [
        *(3, *expected("hello"), 4, 2)
    ]
    assert ours.encode(f"<SPECIAL_{NUM_SPECIAL - 1}>") == [1, NUM_SPECIAL - 1]
    ours.check_fits(count + NUM_SPECIAL)

    @settings(max_examples=60, deadline=None)
    @given(text=TEXT.filter(lambda text: "[" not in text and "<" not in text))
    def check(text: str) -> None:
        assert ours.encode(text, add_special_tokens=False) == expected(text)

    check()


def broken(part: str, change: dict[str, Any]) -> dict[str, Any]:
    parsed = tekken(special_tokens=SPECIAL)
    target = parsed[part] if part == "config" else parsed[part][3]
    target.update(change)
    return parsed


@pytest.mark.parametrize(
    ("parsed", "message"),
    [
        (broken("config", {"pattern": 3}), "config.pattern: expected a string, got 3"),
        (broken("config", {"default_vocab_size": "x"}), "default_vocab_size: expected a count"),
        (broken("config", {"default_vocab_size": 9}), "got -15 others"),
        (broken("config", {"default_vocab_size": 10**9}), "got 999999976 others"),
        (broken("config", {"default_num_special_tokens": 2}), "expected a list of up to 2"),
        (broken("config", {"default_num_special_tokens": 10**9}), "expected up to 65536"),
        (broken("special_tokens", {"token_str": "<s>"}), r"special_tokens\[3\]: expected rank 3"),
        (broken("vocab", {"token_bytes": "!"}), r"vocab\[3\]: expected rank 3 and bytes"),
        (broken("vocab", {"rank": 4}), r"vocab\[3\]: expected rank 3"),
        (broken("config", {"pattern": "("}), "tekken.json"),
    ],
)
def test_bad_tekken_file_is_refused(parsed: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(parsed))
    with pytest.raises(CorruptFile, match=message):
        Tokenizer.from_path(tmp_path)


def test_tokenizer_argument_takes_a_file_or_a_folder(tmp_path: Path) -> None:
    source = checkpoint("llama")
    params = SamplingParams(temperature=0, max_tokens=4)
    texts = []
    for argument in (None, source, source / "tokenizer.json"):
        with LLM(source, tokenizer=argument, num_gpu_blocks_override=32, num_threads=1) as llm:
            texts.append(llm.generate("Once upon", params, use_tqdm=False)[0].outputs[0].text)
    assert texts[0] == texts[1] == texts[2]
    with pytest.raises(InvalidArgument, match="has no tokenizer"):
        LLM(source, tokenizer=tmp_path)


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_vocab_and_merges_give_the_ids_of_transformers(kind: str, tmp_path: Path) -> None:
    import transformers

    model = json.loads(byte_level().to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    end = len(model["vocab"])
    added = {str(end): {"content": "<|im_end|>", "special": True}}
    config = {"tokenizer_class": kind, "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = getattr(transformers, kind)(
        vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]]
    )
    for ours in (tokenizer_of(tmp_path), tokenizer_of(tmp_path / "vocab.json")):
        for text in [*SAMPLES, "e\u0301te\u0301 1234 DON'T don't"]:
            assert ours.encode(text) == theirs(text)["input_ids"], text
        assert ours.encode("a<|im_end|>")[-1] == end


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("merges.txt", "a b c\n", "merges.txt: line 1: expected two tokens, got 'a b c'"),
        ("merges.txt", None, "has vocab.json and no merges.txt"),
        ("vocab.json", '{"a": 0, "b": 0}', "two tokens have one id"),
        ("vocab.json", '{"a": "x"}', "'a': expected an id, got 'x'"),
        ("tokenizer_config.json", '{"tokenizer_class": "XTokenizer"}', "XTokenizer is not known"),
    ],
)
def test_a_damaged_vocabulary_says_where(
    name: str, text: str | None, message: str, tmp_path: Path
) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (tmp_path / "merges.txt").write_text("a b\n")
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(text)
    with pytest.raises((CorruptFile, NotSupported), match=message):
        Tokenizer.from_path(tmp_path / "vocab.json")
