"""What a text's length alone says of its number of tokens, and where it says nothing."""

from __future__ import annotations

import json
import random
import sys
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tokenizer_files
import tokenizers
from llmserve import LLM, SamplingParams, Tokenizer, demo_model_path
from llmserve.errors import PromptTooLong
from llmserve.tokenization.length_bound import read_length_ratio
from offline import generate
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

Make = Callable[[], tokenizers.Tokenizer]


def demo() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))


def with_normalizer(make: Make, *steps: normalizers.Normalizer) -> tokenizers.Tokenizer:
    tokenizer = make()
    tokenizer.normalizer = normalizers.Sequence(list(steps))
    return tokenizer


def composed() -> tokenizers.Tokenizer:
    """As Qwen has it."""
    return with_normalizer(tokenizer_files.byte_level, normalizers.NFC())


def decomposed_in_lower_case() -> tokenizers.Tokenizer:
    return with_normalizer(tokenizer_files.byte_level, normalizers.NFKD(), normalizers.Lowercase())


BOUNDED = [
    tokenizer_files.byte_level,
    tokenizer_files.sentence_piece,
    tokenizer_files.gemma,
    tokenizer_files.metaspace,
    tokenizer_files.metaspace_that_prepends_nothing,
    composed,
    decomposed_in_lower_case,
    demo,
]


def texts_of(tokenizer: tokenizers.Tokenizer) -> Iterator[str]:
    """Runs of its longest tokens, and what normalizers make short."""
    rng = random.Random(1)
    longest = sorted(tokenizer.get_vocab(), key=len)[-20:]
    for name in longest:
        ids = [tokenizer.token_to_id(name)]
        for text in (
            name,
            name.replace("▁", " "),
            tokenizer.decode(ids, skip_special_tokens=False),
        ):
            yield text * 50
            yield f" {text}" * 50
    # Seven bytes and three characters that NFC makes one of, four characters, Hangul, one for one.
    marks = ["\u1fbe\u0308\u0301", "\u03b1\u0313\u0342\u0345", "\u1112\u1161\u11ab", "\u212a"]
    for text in (*marks, " ", "\n", "\u200b", "▁", "\U0010ffff", "é", "日本語"):
        yield text * 100
    for _ in range(100):
        yield "".join(rng.choices([*longest, *marks, " ", "  ", "a", "é", "☕"], k=50))


@pytest.mark.parametrize("make", BOUNDED)
def test_no_text_has_fewer_tokens_than_its_length_says(make: Make) -> None:
    tokenizer = make()
    ratio = read_length_ratio(tokenizer)
    assert ratio is not None
    for text in texts_of(tokenizer):
        num_tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
        assert 0 < ratio.min_num_tokens(text) <= num_tokens, text


def test_the_longest_token_alone_has_as_few_as_the_length_says() -> None:
    ratio = read_length_ratio(demo())
    assert ratio is not None
    assert ratio.min_num_tokens("<|endoftext|>" * 7) == 7
    assert ratio.min_num_tokens("<|endoftext|>" * 7 + "a") == 8


def test_no_character_is_composed_of_more_than_four() -> None:
    characters = (chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000)
    assert max(len(unicodedata.normalize("NFD", c)) for c in characters) == 4


def with_added_token(**options: bool) -> tokenizers.Tokenizer:
    tokenizer = tokenizer_files.byte_level()
    tokenizer.add_special_tokens([AddedToken("<mask>", **options)])
    return tokenizer


def without_tokens(make: Make, *names: str) -> tokenizers.Tokenizer:
    parsed = json.loads(make().to_str())
    vocab: dict[str, int] = parsed["model"]["vocab"]
    parsed["model"] |= {
        "vocab": {name: token_id for name, token_id in vocab.items() if name not in names},
        "merges": [],
        "fuse_unk": True,
    }
    return tokenizers.Tokenizer.from_str(json.dumps(parsed))


def with_pre_tokenizers(*steps: Any) -> tokenizers.Tokenizer:
    tokenizer = tokenizer_files.byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, tokenizer.pre_tokenizer])
    return tokenizer


def with_suffix() -> tokenizers.Tokenizer:
    tokenizer = tokenizer_files.byte_level()
    tokenizer.model = models.BPE({"a": 0, "a</w>": 1}, [], end_of_word_suffix="</w>")
    return tokenizer


BYTE_LEVEL = tokenizer_files.byte_level
# What makes few tokens of many characters, or leaves them out, and a text of which it does.
UNBOUNDED: list[tuple[str, Make, str]] = [
    ("strip", lambda: with_normalizer(BYTE_LEVEL, normalizers.Strip()), " " * 999 + "a"),
    ("accents", lambda: with_normalizer(BYTE_LEVEL, normalizers.StripAccents()), "\u0301" * 999),
    (
        "squeeze",
        lambda: with_normalizer(BYTE_LEVEL, normalizers.Replace(tokenizers.Regex(" +"), " ")),
        " " * 999,
    ),
    (
        "nothing for something",
        lambda: with_normalizer(BYTE_LEVEL, normalizers.Replace("a" * 99, "c")),
        "a" * 9999,
    ),
    (
        "composed of ASCII",
        lambda: with_normalizer(BYTE_LEVEL, normalizers.Replace("b", "\u0301"), normalizers.NFC()),
        "",
    ),
    ("added left", lambda: with_added_token(lstrip=True), " " * 999 + "<mask>"),
    ("added right", lambda: with_added_token(rstrip=True), "<mask>" + " " * 999),
    ("removed", lambda: with_pre_tokenizers(pre_tokenizers.Split(" ", "removed")), " " * 999),
    ("words", lambda: with_pre_tokenizers(pre_tokenizers.WhitespaceSplit()), " " * 999),
    ("no byte", lambda: without_tokens(BYTE_LEVEL, "z"), "z" * 999),
    ("no fallback", lambda: without_tokens(tokenizer_files.gemma, "<0xE2>"), "☃" * 999),
    ("suffix", with_suffix, "b" * 999),
    ("unigram", tokenizer_files.unigram, "☃" * 999),
    ("word pieces", tokenizer_files.word_piece, "☃" * 999),
    ("whole words", tokenizer_files.words, "☃" * 999),
]


@pytest.mark.parametrize(
    ("make", "text"), [case[1:] for case in UNBOUNDED], ids=[case[0] for case in UNBOUNDED]
)
def test_a_length_says_nothing_where_characters_get_lost(make: Make, text: str) -> None:
    tokenizer = make()
    assert read_length_ratio(tokenizer) is None
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert num_tokens * max(map(len, tokenizer.get_vocab())) < len(text) or not text


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of texts that are tokenized."""
    lengths: list[int] = []
    encode_batch = Tokenizer.encode_batch

    def watched(self: Tokenizer, texts: list[str], add_special_tokens: bool = True) -> Any:
        lengths.extend(map(len, texts))
        return encode_batch(self, texts, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode_batch", watched)
    return lengths


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    demo_llm: LLM, counted: list[int]
) -> None:
    longest = len("<|endoftext|>")
    text = "a b " * 4000
    with pytest.raises(PromptTooLong, match=r"prompt has \d+ tokens, but"):
        generate(demo_llm, text)  # of which the length does not tell
    assert counted == [len(text)]
    text = "a" * (longest * 4096)
    wanted = r"prompts\[1\] has at least 4096 tokens, but max_model_len=2048 has to hold"
    with pytest.raises(PromptTooLong, match=wanted):
        generate(demo_llm, ["a", text])
    with pytest.raises(PromptTooLong, match="prompt has at least 4096 tokens"):
        demo_llm.embed(text, use_tqdm=False)
    assert counted == [16_000]


def test_a_text_of_any_length_is_truncated(demo_llm: LLM, counted: list[int]) -> None:
    text = "a" * 100_000
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=8)
    (output,) = generate(demo_llm, text, params)
    assert len(output.prompt_token_ids) == 8
    assert counted == [100_000]


@pytest.fixture(scope="module")
def demo_llm() -> Iterator[LLM]:
    with LLM(demo_model_path(), num_threads=1, kv_cache_memory_bytes=2**23) as llm:
        yield llm
