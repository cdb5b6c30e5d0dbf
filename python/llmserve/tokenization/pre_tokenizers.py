"""The pre-tokenizers of byte-level BPE vocabularies, by the names that GGUF files have for them.

A file gives no more than the name. Names: llama.cpp, llama-vocab.cpp, of llama-cpp-python 0.3.36;
patterns: those of the tokenizer.json of the models that the names stand for.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a text is cut into words before BPE runs in each: every pattern cuts the pieces of the
    one before it at its matches."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is that token
    add_bos: bool = False  # where the file does not say
    is_byte_level: bool = True  # False: spaces become U+2581, other bytes are tokens of their own
    # A word ends before a space and a letter, behind a lone line break and at the ends of a
    # number, whatever else stands there (long_texts.py)
    ends_words_everywhere: bool = True


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""


def _llama3(digits: str, contractions: str = _CONTRACTIONS + "|") -> str:
    """Llama 3's pattern and its kin, which differ in how many digits make a word."""
    return (
        rf"{contractions}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _cased(digits: str, contractions: str = "", not_letters: str = "") -> str:
    """Words in upper and lower case, as o200k_base has them; `not_letters` leaves classes out."""
    upper, lower = f"[{_UPPER}{not_letters}]", f"[{_LOWER}{not_letters}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{upper}*{lower}+{contractions}|{before}{upper}+{lower}*{contractions}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


def _deepseek3(lines: str = r"+[\r\n]*|\s*[\r\n]+") -> str:
    return (
        rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        rf"| ?[\p{{P}}\p{{S}}]{lines}|\s+(?!\S)|\s+"
    )


# Code points instead of characters: many of these look like others, and some change when a text is
# normalised.
_CJK = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
_DEEPSEEK_CJK = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_DEEPSEEK_PUNCTUATION = (
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"
)
_DEEPSEEK_LETTERS = (
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}"
    r"\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}"
    r"\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}"
    r"\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}"
    r"\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}"
    r"\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}"
    r"\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}"
    r"\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}"
    r"\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}"
    r"\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}"
    r"\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}"
    r"\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}"
    r"\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}"
    r"\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}"
    r"\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}"
    r"\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}"
)
_AFMOE_SCRIPTS = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{8C48}-\x{FAFF}\x{3040}-\x{309F}"
    r"\x{30A0}-\x{30FF}\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}\x{E40}-\x{E7F}\x{E80}-\x{EFF}"
    r"\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}"
    r"\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+"
)
_YOUTU_SCRIPTS = (
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}"
    r"\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|["
    r"\x{3105}-\x{312F}]+|[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
)
_GPT2_DIGITS = (r"\p{N}", GPT2)
_NEWLINES = r"[^\n]+|[\n]+"
_BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"
_QWEN2 = _llama3(r"\p{N}")
_THREES = r"\d{1,3}(?=(?:\d{3})*\b)"
_GPT4O = _cased(r"\p{N}{1,3}", f"{_CONTRACTIONS}?")

_ROWS: tuple[tuple[str, PreTokenizer], ...] = (
    (
        "default",
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_llama3(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_llama3(r"\p{N}{1,3}"),))),
    ("glm4 glm5", PreTokenizer((_llama3(r"\p{N}{1,3}"),), ignore_merges=True)),
    (
        "minicpm5",
        PreTokenizer((r"\p{N}{1,3}", _llama3(r"\p{N}+")), ignore_merges=True),
    ),
    (
        "jais-2",
        PreTokenizer(
            (
                _llama3(r"\p{N}{1,3}").replace(
                    r"|\s+(?!\S)|\s+",
                    "".join(rf"|\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
                    + r"|\s{1,2}(?!\S)|\s{1}",
                ),
            )
        ),
    ),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        PreTokenizer((_QWEN2,)),
    ),
    (
        "qwen35",
        PreTokenizer(
            (
                rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
            )
        ),
    ),
    ("ufakzeka", PreTokenizer((_llama3(r"\p{N}", contractions=""),))),
    ("laguna", PreTokenizer((_NEWLINES, _QWEN2))),
    (
        "bailingmoe bailingmoe2 llada-moe",
        PreTokenizer(
            (
                r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
                r"|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
    ),
    (
        "seed-coder",
        PreTokenizer(
            (
                rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
                rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",
            )
        ),
    ),
    (
        "exaone-moe",
        PreTokenizer(
            (
                rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
                r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
            ),
            ends_words_everywhere=False,
        ),
    ),
    (
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert "
        "jina-v1-en jina-v2-code roberta-bpe exaone4 mpt olmo jais trillion granite-docling",
        PreTokenizer((GPT2,)),
    ),
    (
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        PreTokenizer(_GPT2_DIGITS),
    ),
    (
        "falcon",
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    ),
    ("bloom poro-chat gpt3-finnish", PreTokenizer((_BLOOM,), ends_words_everywhere=False)),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
    (
        "chameleon",
        PreTokenizer(
            (
                "<sentinel:[0-9]+>",
                "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                GPT2,
            ),
            add_bos=True,
            ends_words_everywhere=False,
        ),
    ),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                "[\r\n]",
                rf"\s?[{_DEEPSEEK_LETTERS}]+",
                _DEEPSEEK_PUNCTUATION,
                r"\s+$",
                _DEEPSEEK_CJK,
                r"\p{N}+",
            )
        ),
    ),
    (
        "deepseek-coder",
        PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
    ),
    (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        PreTokenizer((r"\p{N}{1,3}", _CJK, _deepseek3())),
    ),
    (
        "spark2_5",
        PreTokenizer((r"\p{N}{1,3}", _CJK, _deepseek3("+|[\\r\\n]"), r"\p{N}")),
    ),
    (
        "afmoe",
        PreTokenizer(
            (
                r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
                _AFMOE_SCRIPTS,
                _deepseek3(),
            )
        ),
    ),
    (
        "youtu",
        PreTokenizer(
            (
                _YOUTU_SCRIPTS,
                _cased(r"\p{N}", f"{_CONTRACTIONS}?"),
            ),
            ignore_merges=True,
        ),
    ),
    (
        "tekken",
        PreTokenizer((_cased(r"\p{N}"),), ignore_merges=True, add_bos=True),
    ),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_GPT4O,))),
    ("granite-embed-multi-97m", PreTokenizer((_GPT4O,), ignore_merges=True)),
    ("tiny_aya cohere2moe", PreTokenizer((_THREES, _GPT4O), ends_words_everywhere=False)),
    (
        "kimi-k2",
        PreTokenizer(
            (
                r"[\p{Han}]+|"
                + _cased(r"\p{N}{1,3}", f"{_CONTRACTIONS}?", r"&&[^\p{Han}]").replace(
                    r"[\r\n/]*", r"[\r\n]*"
                ),
            ),
            ignore_merges=True,
        ),
    ),
    ("superbpe", PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))"), ends_words_everywhere=False)),
    (
        "gemma4 granite-embed-multi-311m sarvam-moe",
        PreTokenizer((_NEWLINES,), is_byte_level=False, ends_words_everywhere=False),
    ),
)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: row for names, row in _ROWS for name in names.split()
}
