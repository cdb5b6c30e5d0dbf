"""A long text is cut where that changes no token, and its tokens take little memory."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from llmserve import CorruptFile, Tokenizer, demo_model_path
from llmserve.tokenization import long_texts, slow_patterns, tokenizer
from llmserve.tokenization.long_texts import CUTS, CUTS_AT_NUMBERS, TextCutter, word_patterns
from llmserve.tokenization.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from llmserve.tokenization.slow_patterns import check_patterns
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

ROWS = {row.patterns: row for row in PRE_TOKENIZERS.values() if row.ends_words_everywhere}
# One of each class that the patterns tell apart.
CHARACTERS = "aB1 \n.'é中/"


def pre_tokenizer(row: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in row.patterns]
    return pre_tokenizers.Sequence(splits)


def check_cuts(row: PreTokenizer, num_before: int, num_behind: int) -> int:
    """All texts of so many characters around every cut have the same words in two parts."""
    words = pre_tokenizer(row)
    known: dict[str, list[str]] = {}

    def words_of(text: str) -> list[str]:
        if text not in known:
            known[text] = [word for word, _ in words.pre_tokenize_str(text)]
        return known[text]

    cuts = re.compile("|".join(long_texts._kinds(row.patterns)))
    num_cuts = 0
    for letters in itertools.product(CHARACTERS, repeat=num_before + num_behind):
        text = "".join(letters)
        for found in cuts.finditer(text):
            at = found.start()
            assert words_of(text[:at]) + words_of(text[at:]) == words_of(text), (text, at)
            num_cuts += 1
    return num_cuts


@pytest.mark.parametrize("row", ROWS.values(), ids=range(len(ROWS)))
def test_a_cut_is_the_end_of_a_word_whatever_stands_around_it(row: PreTokenizer) -> None:
    assert check_cuts(row, 2, 2) > 1000


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS.values(), ids=range(len(ROWS)))
def test_a_cut_is_the_end_of_a_word_in_more_of_a_text(row: PreTokenizer) -> None:
    assert check_cuts(row, 3, 3) > 100_000


def test_no_other_pattern_is_cut() -> None:
    joins = PRE_TOKENIZERS["exaone-moe"]  # words with spaces within
    with pytest.raises(AssertionError):
        check_cuts(joins, 2, 2)
    assert joins.patterns not in long_texts._KINDS
    assert len(ROWS) > 20


PIECES = ["Once upon a time", " ", "\n", "12345", "x1y2", "<|im_start|>", "<|im_end|>user\n"]
PIECES += [
    "It's",
    ".",
    "日本語",
    "é",
    "\t",
    "  ",
    "\n\n",
    "😀",
    "tool_call",
    "<tool_call>",
    "//",
    "'",
]


def random_text(rng: random.Random, num_pieces: int) -> str:
    return "".join(rng.choice(PIECES) for _ in range(num_pieces))


@pytest.mark.parametrize("size", [1, 7, 64])
def test_a_text_in_pieces_has_the_tokens_of_the_whole(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = Tokenizer.from_directory(demo_model_path())
    assert loaded is not None
    rng = random.Random(size)
    texts = [random_text(rng, 60) for _ in range(100)]
    wanted = [[loaded.encode(text, adds) for text in texts] for adds in (True, False)]
    monkeypatch.setattr(long_texts, "PIECE_CHARACTERS", size)
    monkeypatch.setattr(tokenizer, "PIECE_CHARACTERS", size)
    assert sum(len(loaded._cutter.pieces(text)) for text in texts) > 2 * len(texts)
    assert [loaded.encode_batch(texts, adds) for adds in (True, False)] == wanted
    assert loaded.encode("", True) == loaded.encode_batch(["", texts[0]])[0]


def library(**added: bool) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_tokens([AddedToken("<s1>" if added else "<s>", **added)])
    return made


TEXT = "abc def\nghi 123x " * 4000


def test_only_tokenizers_whose_cuts_are_known_cut() -> None:
    assert len(TextCutter(library()).pieces(TEXT)) == 3
    assert TextCutter(library(lstrip=True)).pieces(TEXT) == [TEXT]
    cuts = TextCutter(library(single_word=True))._pattern
    assert cuts is not None
    assert cuts.pattern == CUTS
    other = library()
    other.add_tokens([AddedToken("two words")])
    assert TextCutter(other).pieces(TEXT) == [TEXT]
    other = library(normalized=True)  # has a number behind a letter
    assert CUTS_AT_NUMBERS not in str(TextCutter(other)._pattern)
    for normalizer in (normalizers.NFC(), normalizers.Lowercase()):
        other = library()
        other.normalizer = normalizer
        pieces = TextCutter(other).pieces(TEXT)
        assert (len(pieces) > 1) == isinstance(normalizer, normalizers.NFC)
    for changed in (
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Metaspace(),
        pre_tokenizers.Split(Regex(r"\s"), "removed"),
        pre_tokenizers.Split(Regex(r"\w+ \w+"), "isolated"),
    ):
        other.normalizer = None
        other.pre_tokenizer = changed
        assert TextCutter(other).pieces(TEXT) == [TEXT]


def test_published_tokenizers_are_known_by_their_patterns() -> None:
    contractions = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    rest = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    begin = contractions + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    for pattern in (begin + rest, begin + "{1,3}" + rest):  # Qwen 2 and 3; Llama 3
        found = word_patterns([{**split, "pattern": {"Regex": pattern}}, byte_level])
        assert found in long_texts._KINDS
    for element in ({"type": "Digits", "individual_digits": True}, byte_level):  # StarCoder
        found = word_patterns([element, {**byte_level, "use_regex": True}])
        assert found in long_texts._KINDS
    cjk = {**split, "pattern": {"Regex": "[一-龥\u3040-\u309f\u30a0-\u30ff]+"}}  # DeepSeek V3
    assert word_patterns([cjk]) == (
        long_texts.canonical(PRE_TOKENIZERS["deepseek-v3"].patterns[1]),
    )


MEASURE = """
import resource
from llmserve import CorruptFile, Tokenizer, demo_model_path
tokenizer = Tokenizer.from_directory(demo_model_path())
tokenizer.encode("x" * 2**16)
texts = [kind * (2**20 // len(kind)) for kind in ("once upon ", "0123456789", "ab12+")]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for text in texts:
    tokenizer.encode(text)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_megabyte_of_text_takes_no_more_than_a_few() -> None:
    # At once: 120 to 300 MB. What is left is mostly the list of ids.
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, check=True)
    assert int(done.stdout) < 48 * 2**10  # KiB


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+b",
        r"(\w+\s?)+;",
        "a*a*a*a*a*b",  # near the library's limit, and not beyond it
        "(xyz|xyzxyz)+q",
        r"( |  )+;",
    ],
)
@pytest.mark.parametrize("where", ["pre_tokenizer", "normalizer"])
def test_a_pattern_that_backtracks_too_long_is_refused(
    pattern: str, where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    made = library()
    if where == "normalizer":
        made.normalizer = normalizers.Replace(Regex(pattern), "")
    else:
        made.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    with pytest.raises(CorruptFile, match=f"a.json: {where}: the pattern .* (takes|gives up)"):
        check_patterns(made, Path("a.json"))


def test_published_patterns_are_quick_and_take_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    made = library()
    for row in PRE_TOKENIZERS.values():
        made.pre_tokenizer = pre_tokenizer(row)
        with monkeypatch.context() as without:
            without.setattr(slow_patterns, "KNOWN_PATTERNS", ())
            check_patterns(made, Path("a.json"))
    monkeypatch.setattr(slow_patterns, "_tries", None)
    check_patterns(made, Path("a.json"))
