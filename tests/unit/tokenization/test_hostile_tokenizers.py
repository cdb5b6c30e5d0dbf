"""Tokenizer files that mean harm: refused in time and memory that follow from their size, by typed
errors, whatever the library makes of them."""

from __future__ import annotations

import base64
import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import sentencepiece_files
from llmserve.errors import CorruptFile, NotSupported
from llmserve.tokenization.eos_token import read_eos_token_id
from llmserve.tokenization.file_bounds import check_charsmap
from llmserve.tokenization.tokenizer import Tokenizer
from tokenizer_files import byte_level, sentence_piece, word_piece
from tokenizer_files import save as save_tokenizer

HANG_S = 10.0  # each of these took longer; they take less than a second


def parsed(tokenizer: Any) -> dict[str, Any]:
    return json.loads(tokenizer.to_str())


def save(directory: Path, document: dict[str, Any]) -> Path:
    (directory / "tokenizer.json").write_text(json.dumps(document))
    return directory


def load(directory: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer is not None
    return tokenizer


def refusal(directory: Path) -> str:
    begin = time.monotonic()
    with pytest.raises(CorruptFile) as caught:
        load(directory)
    assert time.monotonic() - begin < HANG_S
    return str(caught.value)


def replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def charsmap(units: list[int], texts: bytes = b"a\0") -> bytes:
    units = units + [0] * (256 - len(units))
    return struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + texts


def test_decoder_that_doubles_a_text_is_refused(tmp_path: Path) -> None:
    doubling = {"type": "Sequence", "decoders": [replace("e", "ee")] * 22}
    save_tokenizer(sentence_piece(), tmp_path, decoder=doubling)
    assert "a token has more than 65536 bytes" in refusal(tmp_path)


def test_decoder_that_doubles_and_shrinks_again_is_refused(tmp_path: Path) -> None:
    steps = [replace("Z", "ZZ")] * 15 + [replace("Z" * 2**15, "")]
    save_tokenizer(sentence_piece(), tmp_path, decoder={"type": "Sequence", "decoders": steps * 3})
    load(tmp_path)  # of few tokens
    document = parsed(sentence_piece())
    vocab = document["model"]["vocab"]
    for i in range(20_000):
        vocab[f"Z{i}"] = len(vocab)
    save(tmp_path, {**document, "decoder": {"type": "Sequence", "decoders": steps * 3}})
    assert "the tokens have more than" in refusal(tmp_path)


def test_decoder_of_many_steps_is_refused(tmp_path: Path) -> None:
    steps = {"type": "Sequence", "decoders": [replace("q", "q")] * 65}
    save_tokenizer(sentence_piece(), tmp_path, decoder=steps)
    assert "the decoder has 65 steps; at most 64" in refusal(tmp_path)


def test_normalizer_that_doubles_a_text_is_refused(tmp_path: Path) -> None:
    steps = {"type": "Sequence", "normalizers": [replace("e", "ee")] * 22}
    save_tokenizer(sentence_piece(), tmp_path, normalizer=steps)
    assert "normalizer: can make a text more than 1024 times as long" in refusal(tmp_path)


def test_post_processor_of_many_tokens_is_refused(tmp_path: Path) -> None:
    document = parsed(sentence_piece())
    special = document["post_processor"]["single"][0]
    document["post_processor"]["single"] += [special] * 10_000
    assert "post_processor: more than" in refusal(save(tmp_path, document))


def test_panic_of_the_library_is_a_corrupt_file(tmp_path: Path) -> None:
    document = parsed(byte_level())
    document["model"]["continuing_subword_prefix"] = "##é"
    assert "not a tokenizer" in refusal(save(tmp_path, document))


@pytest.mark.parametrize("merge", [["▁", "▁"], "▁ ▁"])
@pytest.mark.parametrize("name", ["continuing_subword_prefix", "\\u0063ontinuing_subword_prefix"])
def test_prefix_that_cuts_a_character_is_refused_before_the_library_ends_the_process(
    tmp_path: Path, merge: object, name: str
) -> None:
    document = parsed(byte_level())
    document["model"]["vocab"] = {"▁": 0, "a": 1, "▁▁": 2}
    document["model"] |= {"merges": [merge], "continuing_subword_prefix": "a"}
    save(tmp_path, document)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace('"continuing_subword_prefix"', f'"{name}"'))
    assert "cuts a character of the merge" in refusal(tmp_path)


def test_words_without_an_unknown_token_are_refused(tmp_path: Path) -> None:
    document = parsed(word_piece())
    document["model"]["unk_token"] = "[NONE]"
    assert "'[NONE]', which stands for words" in refusal(save(tmp_path, document))


class _Panics:
    def __call__(self, *_: object, **__: object) -> None:
        raise type("PanicException", (BaseException,), {})("index out of bounds")


def test_panic_in_encode_and_decode_is_an_error_and_the_next_call_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load(save_tokenizer(byte_level(), tmp_path))
    wanted = tokenizer.encode("hello")

    class Broken:
        encode = encode_batch_fast = decode = _Panics()

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "_tokenizer", Broken())
        for call in (
            lambda: tokenizer.encode("hello"),
            lambda: tokenizer.encode("h" * 5000),
            lambda: tokenizer.decode(wanted),
        ):
            with pytest.raises(NotSupported, match=r"the tokenizer cannot .*index out of bounds"):
                call()
    assert tokenizer.encode("hello") == wanted


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "claims a trie of 0 bytes"),
        (b"\xff\xff\xff\xff" + bytes(8), "claims a trie of 4294967295 bytes"),
        (b"\x06\0\0\0" + bytes(8), "claims a trie of 6 bytes"),
        (struct.pack("<II", 4, 0) + b"a\0", "leads out of its 1 units"),
        (charsmap([1 << 10 | 1 << 9]), "leads out of its 256 units"),
        (charsmap([0, 1 << 20]), "leads out of its 256 units"),
        (charsmap([0x100], b"a\0"), "names a text that is not there"),
        (charsmap([0, 0x100 | 5 << 10, 0, 0, 1 << 31 | 77]), "names a text that is not there"),
        (charsmap([0, 0x100 | 5 << 10, 0, 0, 1 << 31 | 1], "é\0".encode()), "not there"),
        (charsmap([0], b"\xff\0"), "not UTF-8 at byte 0"),
        (charsmap([0], b"a" * 2000), "makes 2000 bytes of a character"),
        (bytes(2**22 + 1), "at most 4194304 are read"),
    ],
)
def test_bad_character_map_is_refused_before_the_library_has_it(
    data: bytes, message: str, tmp_path: Path
) -> None:
    with pytest.raises(CorruptFile, match=message):
        check_charsmap(data, "map")
    encoded = base64.b64encode(data).decode()
    precompiled = {"type": "Precompiled", "precompiled_charsmap": encoded}
    document = {**parsed(sentence_piece()), "normalizer": precompiled}
    assert message in refusal(save(tmp_path, document))
    text = json.dumps(document)
    for spelled in (
        text.replace('"precompiled_charsmap"', '"precompiled_char\\u0073map"'),
        text.replace(encoded, encoded.replace("/", "\\/")) if "/" in encoded else text,
    ):
        (tmp_path / "tokenizer.json").write_text(spelled)
        assert message in refusal(tmp_path)


def test_bad_character_map_of_a_sentencepiece_file_is_refused(tmp_path: Path) -> None:
    file = sentencepiece_files.model([("<unk>", 0.0, 2), ("a", -1.0, 1)], charsmap=b"\xff" * 8)
    (tmp_path / "tokenizer.model").write_bytes(file)
    assert "precompiled_charsmap: claims a trie of 4294967295 bytes" in refusal(tmp_path)


def test_sentencepieces_own_map_is_taken(tmp_path: Path) -> None:
    # Its NFKC map of 240 KB, which the check must read to its end.
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world how are you"] * 3),
        model_writer=model,
        vocab_size=30,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    assert load(tmp_path).encode("\ufb01", add_special_tokens=False)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), float("-inf")])
def test_score_that_is_not_finite_is_refused(score: float, tmp_path: Path) -> None:
    file = sentencepiece_files.model([("<unk>", 0.0, 2), ("a", score, 1), ("b", 0.0, 1)])
    (tmp_path / "tokenizer.model").write_bytes(file)
    assert "the score of the piece 'a' is" in refusal(tmp_path)


def test_piece_of_a_megabyte_is_refused_in_time(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0, 2), ("a", -1.0, 1), ("a" * 10**6, -2.0, 1)]
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_files.model(pieces, is_bpe=True))
    assert "the longest has 1000000 characters" in refusal(tmp_path)


def tiktoken_lines(*more: bytes) -> bytes:
    tokens = [bytes([byte]) for byte in range(256)] + list(more)
    return b"".join(base64.b64encode(t) + b" %d\n" % rank for rank, t in enumerate(tokens))


def test_tiktoken_token_of_300_kilobytes_is_refused_in_time(tmp_path: Path) -> None:
    (tmp_path / "qwen.tiktoken").write_bytes(tiktoken_lines(b"a" * 300_000))
    assert "the longest has 300000 characters" in refusal(tmp_path)


def test_tiktoken_token_of_a_thousand_spaces_is_taken(tmp_path: Path) -> None:
    (tmp_path / "qwen.tiktoken").write_bytes(tiktoken_lines(b" " * 1000))
    assert load(tmp_path).token_bytes(256) == b" " * 1000


def test_most_special_tokens_of_a_tekken_file_are_read_in_time(tmp_path: Path) -> None:
    count = 1 << 16
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(bytes([rank])).decode()}
        for rank in range(256)
    ]
    special = [{"rank": rank, "token_str": f"<{rank}>"} for rank in range(count)]
    config = {
        "default_vocab_size": count + 256,
        "default_num_special_tokens": count,
        "pattern": "a+",
    }
    file = {"config": config, "vocab": vocab, "special_tokens": special}
    (tmp_path / "tekken.json").write_text(json.dumps(file))
    begin = time.monotonic()
    assert load(tmp_path).num_tokens == count + 256
    assert time.monotonic() - begin < 2 * HANG_S


def test_file_of_many_empty_values_is_refused_by_their_number(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"[" + b"{}," * (2**22 + 1) + b"{}]")
    assert "more than 4194304 values" in refusal(tmp_path)


def test_file_of_many_empty_lines_is_refused_by_their_number(tmp_path: Path) -> None:
    (tmp_path / "qwen.tiktoken").write_bytes(b"IQ== 0\n" + b"\n" * (2**21 + 1))
    assert "more than 2097152 lines" in refusal(tmp_path)
    byte_level().model.save(str(tmp_path))
    (tmp_path / "qwen.tiktoken").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    load(tmp_path)
    (tmp_path / "merges.txt").write_bytes(b"\n" * (2**21 + 1))
    assert "more than 2097152 lines" in refusal(tmp_path)


@pytest.mark.parametrize("token_id", ["1e400", "NaN", "[]"])
def test_added_token_without_an_id_is_no_eos_token(token_id: str, tmp_path: Path) -> None:
    text = json.dumps(parsed(byte_level()))
    broken = text.replace('"added_tokens": [{"id": ', f'"added_tokens": [{{"id": {token_id}, "x": ')
    assert broken != text
    (tmp_path / "tokenizer.json").write_text(broken)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    with pytest.raises(CorruptFile, match=r"not a tokenizer|not JSON"):
        read_eos_token_id(tmp_path)


@pytest.mark.parametrize("token_id", ["²", "-1", "1" * 5000, "१"])
def test_id_of_a_configured_token_is_a_number(token_id: str, tmp_path: Path) -> None:
    (tmp_path / "qwen.tiktoken").write_bytes(tiktoken_lines())
    config = {"added_tokens_decoder": {token_id: {"content": "<x>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert "added_tokens_decoder: expected ids" in refusal(tmp_path)


def test_special_token_of_megabytes_is_refused(tmp_path: Path) -> None:
    save_tokenizer(byte_level(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "x" * 2_000_000}))
    assert "bos_token: 2000000 characters" in refusal(tmp_path)


def test_tekken_token_of_half_a_character_is_refused(tmp_path: Path) -> None:
    config = {"default_vocab_size": 286, "default_num_special_tokens": 30, "pattern": "a"}
    vocab = [{"rank": rank, "token_bytes": "\ud800"} for rank in range(256)]
    (tmp_path / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab}))
    assert "vocab[0]: expected rank 0 and bytes in base64" in refusal(tmp_path)


def test_template_without_the_text_or_of_no_token_is_refused(tmp_path: Path) -> None:
    document = parsed(sentence_piece())
    template = document["post_processor"]
    save(tmp_path, {**document, "post_processor": {**template, "single": template["single"][:1]}})
    assert "its template leaves the text out" in refusal(tmp_path)
    template["special_tokens"]["<s>"]["ids"] = [2**31]
    assert "2147483648 is no token's id" in refusal(save(tmp_path, document))
