"""Text to ids and back: the table that the engine decodes with says what the library says."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizer_files
import tokenizers
import transformers
from llmserve import CorruptFile, InvalidArgument, NotSupported, Tokenizer, demo_model_path
from llmserve import _core_testing as testing
from llmserve._core import ByteFallbackStep, ByteLevelStep, ReplaceStep, StripStep, Vocabulary
from llmserve.tokenization.eos_token import read_eos_token_id
from llmserve.tokenization.vocabulary import byte_level_text, decoder_steps

KINDS = [
    tokenizer_files.byte_level,
    tokenizer_files.sentence_piece,
    tokenizer_files.gemma,
    tokenizer_files.metaspace,
    tokenizer_files.metaspace_that_prepends_nothing,
    tokenizer_files.unigram,
    tokenizer_files.word_piece,
    tokenizer_files.word_piece_without_cleanup,
    tokenizer_files.words,
]
WITH_FALLBACK = (tokenizer_files.sentence_piece, tokenizer_files.gemma)


def load(directory: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer is not None
    return tokenizer


def streamed_text(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    """What the engine makes of ids one by one (csrc/text); what is given out is whole characters
    and stays."""
    special = set(tokenizer.special_token_ids) if skip else set()
    pieces = [tokenizer.token_bytes(i) for i in ids if i not in special]
    checker = testing.StopChecker(pieces)
    deltas = [checker.append(idx, True)[0] for idx in range(len(pieces))]
    return "".join(delta.decode("utf-8") for delta in [*deltas, checker.flush()[0]])


def is_valid_byte_run(tokenizer: tokenizers.Tokenizer, ids: list[int]) -> bool:
    """Where bytes of a fallback are not UTF-8 the library replaces each of their run; the engine,
    which streams, replaces what is broken only: docs/support-matrix.md."""
    names = [tokenizer.id_to_token(i) for i in ids]
    run = bytearray()
    for name in [*names, ""]:
        if name.startswith("<0x"):
            run.append(int(name[3:5], 16))
            continue
        try:
            bytes(run).decode("utf-8")
        except UnicodeDecodeError:
            return False
        run.clear()
    return True


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("skip", [False, True])
def test_a_continuation_has_the_text_that_the_library_decodes(
    make: Callable[[], tokenizers.Tokenizer], skip: bool, tmp_path: Path
) -> None:
    library = make()
    tokenizer = load(tokenizer_files.save(library, tmp_path))
    prompt = tokenizer.encode("the fox")
    prompt_text = library.decode(prompt, skip_special_tokens=skip)
    rng = random.Random(5)
    num_compared = 0
    for _ in range(1500):
        ids = [rng.randrange(tokenizer.num_tokens) for _ in range(rng.randrange(1, 8))]
        if make in WITH_FALLBACK and not is_valid_byte_run(library, ids):
            continue
        whole = library.decode(prompt + ids, skip_special_tokens=skip)
        assert whole.startswith(prompt_text)
        assert streamed_text(tokenizer, ids, skip) == whole[len(prompt_text) :], ids
        num_compared += 1
    assert num_compared > 200


def test_bytes_of_a_fallback_make_a_character_together(tmp_path: Path) -> None:
    tokenizer = load(tokenizer_files.save(tokenizer_files.sentence_piece(), tmp_path))
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in "€".encode()]
    assert streamed_text(tokenizer, [i for i in ids if i is not None], False) == "€"


def test_broken_bytes_of_a_fallback_cost_the_good_ones_nothing(tmp_path: Path) -> None:
    tokenizer = load(tokenizer_files.save(tokenizer_files.sentence_piece(), tmp_path))
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in b"\xc3\xa9\xe2\x82A\xff"]
    assert streamed_text(tokenizer, [i for i in ids if i is not None], False) == "é\ufffdA\ufffd"


def test_encode_adds_what_the_model_wants_unless_told_otherwise(tmp_path: Path) -> None:
    tokenizer = load(tokenizer_files.save(tokenizer_files.sentence_piece(), tmp_path))
    bos = tokenizer.token_id("<s>")
    assert tokenizer.encode("hello")[0] == bos
    assert bos not in tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode_batch(["hello", "world"]) == [
        tokenizer.encode("hello"),
        tokenizer.encode("world"),
    ]


def test_what_is_special_is_told_of_one_id_and_of_all(tmp_path: Path) -> None:
    tokenizer = load(tokenizer_files.save(tokenizer_files.sentence_piece(), tmp_path))
    special = [i for i in range(tokenizer.num_tokens) if tokenizer.is_special(i)]
    assert special == tokenizer.special_token_ids
    assert tokenizer.token_id("<s>") in special
    assert len(special) < tokenizer.num_tokens
    assert not any(tokenizer.is_special(i) for i in (-1, tokenizer.num_tokens, 2**40))


@pytest.mark.parametrize("place", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("end", ["<|end|>", {"content": "<|end|>", "special": True}])
def test_the_end_is_found_before_the_tokenizer_is_read(
    place: str, end: object, tmp_path: Path
) -> None:
    tokenizer_files.save(tokenizer_files.byte_level(), tmp_path)
    assert read_eos_token_id(tmp_path) is None
    (tmp_path / place).write_text(json.dumps({"eos_token": end}))
    tokenizer = load(tmp_path)
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.eos_token_id == read_eos_token_id(tmp_path) == tokenizer.token_id("<|end|>")


def test_an_end_that_is_no_added_token_is_looked_up_in_the_vocabulary(tmp_path: Path) -> None:
    tokenizer_files.save(tokenizer_files.byte_level(), tmp_path)
    for end in ("hello", "nowhere"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
        assert load(tmp_path).eos_token_id == read_eos_token_id(tmp_path)
        assert (read_eos_token_id(tmp_path) is None) == (end == "nowhere")


def test_added_tokens_that_are_none_are_the_librarys_to_refuse(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    for added in ('[{"id": "x", "content": "</s>"}]', "[3]", "[", '{"</s>": 2}'):
        (tmp_path / "tokenizer.json").write_text(f'{{"added_tokens": {added}}}')
        with pytest.raises(CorruptFile, match=r"tokenizer\.json: not"):
            read_eos_token_id(tmp_path)


def test_names_of_transformers_mean_what_they_mean_there() -> None:
    ours = load(demo_model_path())
    theirs = transformers.AutoTokenizer.from_pretrained(demo_model_path())
    names = [f"{kind}_token{end}" for kind in ("bos", "eos", "pad", "unk") for end in ("", "_id")]
    for name in (*names, "vocab_size"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert set(theirs.all_special_ids) <= set(ours.all_special_ids)
    assert len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    texts = ["Hello you", "Once<|im_end|>"]
    for text in (texts[0], texts):
        assert ours(text).input_ids == ours(text)["input_ids"] == theirs(text).input_ids
    ids = ours(texts).input_ids
    assert ours.convert_ids_to_tokens(ids[0]) == theirs.convert_ids_to_tokens(ids[0])
    assert ours.convert_ids_to_tokens(2) == theirs.convert_ids_to_tokens(2) == "<|im_end|>"
    for tokens in ("<|im_end|>", "nowhere", ["<|im_end|>", "nowhere"]):
        assert ours.convert_tokens_to_ids(tokens) == theirs.convert_tokens_to_ids(tokens)
    for skip in (True, False):
        expected = theirs.batch_decode(ids, skip_special_tokens=skip)
        assert ours.batch_decode(ids, skip_special_tokens=skip) == expected
    assert ours.decode(ids[0][0]) == theirs.decode(ids[0][0])
    with pytest.raises(KeyError, match="there is 'input_ids' alone"):
        ours("a")["attention_mask"]


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path: Path) -> None:
    library = tokenizer_files.byte_level()
    library.enable_truncation(2)
    library.enable_padding(length=9)
    tokenizer = load(tokenizer_files.save(library, tmp_path))
    text = "the quick brown fox jumps over the lazy dog"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("a")) == 1


def test_encode_takes_odd_text(tmp_path: Path) -> None:
    tokenizer = load(tokenizer_files.save(tokenizer_files.byte_level(), tmp_path))
    for text in ("\0", "😀 \u200d", "<|end|>", "a" * 100_000, "\r\n\t"):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_a_long_text_leaves_other_threads_their_turns() -> None:
    tokenizer = Tokenizer.from_directory(demo_model_path())
    rng = random.Random(3)
    text = " ".join("".join(rng.choices("abcdefgh", k=6)) for _ in range(100_000))
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        encoding = pool.submit(tokenizer.encode, text)
        num_turns = 0
        while not encoding.done():
            time.sleep(0.001)
            num_turns += 1
        duration_s = time.monotonic() - began
    assert len(encoding.result()) > 100_000
    # A turn takes a few milliseconds at most. With the lock held there were two.
    assert num_turns > duration_s / 0.1
    short = text[:1000]
    assert tokenizer.encode(text)[:100] == tokenizer.encode(short)[:100]


def test_a_lone_surrogate_is_refused(tmp_path: Path) -> None:
    tokenizer = load(tokenizer_files.save(tokenizer_files.byte_level(), tmp_path))
    with pytest.raises(InvalidArgument, match="lone surrogate at character 2"):
        tokenizer.encode("ab\ud800")


def test_decode_refuses_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = load(tokenizer_files.save(tokenizer_files.byte_level(), tmp_path))
    for bad in (-1, tokenizer.num_tokens, 2**40):
        with pytest.raises(InvalidArgument, match=f"token id {bad} is outside the vocabulary"):
            tokenizer.decode([bad])


def test_an_id_outside_the_vocabulary_stands_for_nothing(tmp_path: Path) -> None:
    tokenizer = load(tokenizer_files.save(tokenizer_files.byte_level(), tmp_path))
    for outside in (-1, tokenizer.num_tokens, 2**80):
        assert tokenizer.token_bytes(outside) == b""
        assert tokenizer.token_text(outside) == ""


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    tokenizer = load(tokenizer_files.save(tokenizer_files.byte_level(), tmp_path))
    assert tokenizer.check_fits(tokenizer.num_tokens) == []
    assert tokenizer.check_fits(tokenizer.vocab_size) == ["ab cd", "éx", "日本", "<|é|>"]
    with pytest.raises(InvalidArgument, match=r"largest token id is \d+, .*vocab_size=300"):
        tokenizer.check_fits(300)


def test_a_directory_without_a_tokenizer_gives_none(tmp_path: Path) -> None:
    assert Tokenizer.from_directory(tmp_path) is None


BAD_FILES = [
    (b"", "not JSON at byte 0"),
    (b"[1]", "expected a JSON object"),
    (b'{"a": \xff}', "not UTF-8 at byte 6"),
    (b'{"a": 1', "not JSON at byte 7"),
    (b"{}", "not a tokenizer"),
    (b'{"a":' * 50_000, "not JSON"),
]


@pytest.mark.parametrize(("data", "message"), BAD_FILES)
def test_a_broken_tokenizer_file_is_named(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(CorruptFile, match=message) as error:
        Tokenizer.from_directory(tmp_path)
    assert "tokenizer.json" in str(error.value)


def test_a_tokenizer_that_links_out_of_the_directory_is_not_opened(tmp_path: Path) -> None:
    outside = tmp_path / "outside.json"
    outside.write_text("{}")
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").symlink_to(outside)
    with pytest.raises(CorruptFile, match="outside the checkpoint directory"):
        Tokenizer.from_directory(model)


def test_links_within_a_hub_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abcd"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    tokenizer_files.save(tokenizer_files.byte_level(), blobs)
    (snapshot / "tokenizer.json").symlink_to(Path("../../blobs/tokenizer.json"))
    assert load(snapshot).num_tokens > 256


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(CorruptFile, match="expected a regular file"):
        Tokenizer.from_directory(tmp_path)


OTHER_DECODERS = [
    ({"type": "BPEDecoder", "suffix": "</w>"}, "decoder BPEDecoder is not supported"),
    ({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}, "CTC"),
    (
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
        "decoder Replace with pattern",
    ),
]


FUSE, FALLBACK = {"type": "Fuse"}, {"type": "ByteFallback"}
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": True,
    "trim_offsets": True,
    "use_regex": True,
}
STRIP_END = {"type": "Strip", "content": " ", "start": 0, "stop": 1}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


def replacing(text: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": {"String": text}, "content": "x"}


OTHER_SEQUENCES = [
    ([BYTE_LEVEL, replacing("a")], "Replace after ByteLevel"),
    ([FALLBACK, replacing("a")], "Replace after ByteFallback"),
    ([FALLBACK, FUSE, replacing("▁")], "Replace after Fuse"),
    ([FUSE, replacing("ab")], "Replace of 'ab' across tokens"),
    ([FUSE, STRIP_END], "Strip of the text's end"),
    ([FUSE, METASPACE], "Metaspace after Fuse"),
    ([FUSE, BYTE_LEVEL], "ByteLevel after Fuse"),
    ([FUSE, FALLBACK], "ByteFallback after Fuse"),
    ([FALLBACK, METASPACE], "Metaspace after ByteFallback"),
]


@pytest.mark.parametrize(("decoders", "name"), OTHER_SEQUENCES)
def test_a_sequence_whose_steps_look_at_neighbours_is_refused(
    decoders: list[dict[str, object]], name: str, tmp_path: Path
) -> None:
    decoder = {"type": "Sequence", "decoders": decoders}
    tokenizer_files.save(tokenizer_files.byte_level(), tmp_path, decoder=decoder)
    with pytest.raises(NotSupported, match=name):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(("decoder", "name"), OTHER_DECODERS)
def test_a_decoder_that_is_not_supported_is_named(
    decoder: dict[str, object] | None, name: str, tmp_path: Path
) -> None:
    tokenizer_files.save(tokenizer_files.byte_level(), tmp_path, decoder=decoder)
    with pytest.raises(NotSupported, match=name):
        Tokenizer.from_directory(tmp_path)


def test_strip_before_fuse_applies_to_every_token() -> None:
    strip = {"type": "Strip", "content": "_", "start": 1, "stop": 2}
    decoder = {"type": "Sequence", "decoders": [strip, {"type": "Fuse"}]}
    steps = decoder_steps(decoder, Path("tokenizer.json"))
    vocabulary = Vocabulary.decode({"__a___": 0, "_": 1}, steps, [])
    assert [vocabulary.bytes(i) for i in range(2)] == [b"_a_", b""]


def test_every_byte_has_a_character_and_other_characters_are_themselves() -> None:
    texts = [byte_level_text(bytes([byte])) for byte in range(256)]
    assert len(set(texts)) == 256
    literal = ["\u0144", "a b", "caf\u00e9\u2581", "\U0001f600", "\u00ad"]
    tokens = {text: idx for idx, text in enumerate([*texts, *literal])}
    vocabulary = Vocabulary.decode(tokens, [ByteLevelStep()], [])
    expected = [*(bytes([byte]) for byte in range(256)), *(text.encode() for text in literal)]
    assert [vocabulary.bytes(i) for i in range(len(vocabulary))] == expected


def test_a_byte_of_a_fallback_is_written_with_two_digits() -> None:
    literal = ["<0x0>", "<0xGG>", "<0x+1>", "<0x0A>>", "<0x0A", "x<0x0A>"]
    tokens = {text: idx for idx, text in enumerate(["<0x0A>", "<0xfF>", *literal])}
    steps = [ByteFallbackStep(), ReplaceStep("<", "_")]
    vocabulary = Vocabulary.decode(tokens, steps, [])
    expected = [b"\n", b"\xff", *(text.replace("<", "_").encode() for text in literal)]
    assert [vocabulary.bytes(i) for i in range(len(vocabulary))] == expected


def test_an_id_that_no_vocabulary_reaches_takes_no_memory() -> None:
    with pytest.raises(CorruptFile, match='the id 4294967295 of the token "a" is outside 0 to'):
        Vocabulary.decode({"a": 2**32 - 1}, [], [])


def test_ids_without_a_token_are_empty() -> None:
    vocabulary = Vocabulary.decode({"a": 5, "b": 2}, [], [5])
    assert [vocabulary.bytes(i) for i in range(-1, 7)] == [b"", b"", b"", b"b", b"", b"", b"a", b""]
    assert vocabulary.special_token_ids == [5]


def test_a_step_that_would_not_end_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="old_text: must not be empty"):
        ReplaceStep("", "a")
    with pytest.raises(InvalidArgument, match="character: must not be empty"):
        StripStep("", 1, 1)


def test_the_demo_tokenizer_gives_its_text_back() -> None:
    tokenizer = load(demo_model_path())
    parsed = json.loads((demo_model_path() / "tokenizer.json").read_text(encoding="utf-8"))
    assert parsed["decoder"]["type"] == "ByteLevel"
    text = "Once upon a time, a fox met a crow. 日本"
    assert tokenizer.decode(tokenizer.encode(text)) == text
