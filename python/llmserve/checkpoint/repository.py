"""Which files of a repository are a model's, by their names alone."""

import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from llmserve.checkpoint.foreign import refuse_foreign
from llmserve.errors import InvalidArgument, NotSupported

LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_PARTS = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
# Projectors of images and what quantizing was weighted with: GGUF files without a model.
_NO_MODEL = re.compile(r"(?:^|[-._])(?:mmproj|imatrix)(?:[-._]|$)", re.IGNORECASE)
# Which file of several, where the name does not say: as llama.cpp, small first and then exact.
_PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q5_K_M", "Q8_0", "BF16", "F16", "F32")

# What all layouts have; then the files of tokenizers, of which the first that is there is read.
_CONFIGS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "modules.json",
    "*_Pooling/config.json",
    "model.safetensors.index.json",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
)
_TOKENIZERS = (
    ("tokenizer.json",),
    ("tekken.json",),
    ("tokenizer.model",),
    ("tokenizer.model.v3",),
    ("tiktoken.model",),
    ("*.tiktoken",),
    ("vocab.json", "merges.txt"),
)
# Heads that draft as torch.save wrote them, the first that is there: they are read without running
# what they say.
PICKLED_HEADS = ("medusa_lm_head.pt", "pytorch_model.bin")
_MISTRAL = ("consolidated*.safetensors", "params.json")


def model_files(
    names: Collection[str], file: str | None, where: str, *, may_be_pickled_head: bool = False
) -> list[str]:
    """The names of the files to download; a GGUF file, or the first of its parts, comes first.

    file: a GGUF file's name or the quantization in one; None takes safetensors where there are any.
    may_be_pickled_head: without any, the file of torch.save that a head may be in.
    Raises InvalidArgument for one that is not there, and NotSupported for what is no model here.
    """
    weights = [name for name in names if is_weights(name)]
    ggufs = sorted(name for name in names if is_gguf_model(name))
    if file is not None or (ggufs and not weights):
        return _with_parts(_chosen(ggufs, file, where), names)
    if weights:
        return [*_matching(names, _CONFIGS), *weights, *tokenizer_files(names)]
    mistral = _matching(names, _MISTRAL)
    if "params.json" in mistral and len(mistral) > 1:
        return [*_matching(names, _CONFIGS), *mistral, *tokenizer_files(names)]
    pickled = [name for name in PICKLED_HEADS if name in names] if may_be_pickled_head else []
    if pickled:
        return [*_matching(names, _CONFIGS), pickled[0]]
    refuse_foreign(names, where)
    raise NotSupported(
        f"{where} has no *.safetensors and no *.gguf, of which llmserve reads a model; look for "
        f"another revision, or another copy of the model"
    )


def tokenizer_files(names: Collection[str]) -> list[str]:
    """The files of the tokenizer that is read of a folder with such names."""
    for patterns in _TOKENIZERS:
        found = [_matching(names, [pattern]) for pattern in patterns]
        if all(found):
            return [name for names_of_pattern in found for name in names_of_pattern]
    return []


def tokenizer_repository_files(names: Collection[str], where: str) -> list[str]:
    """The names of a tokenizer's files, and of the configs beside it. Raises InvalidArgument."""
    found = tokenizer_files(names)
    if not found:
        raise InvalidArgument(f"tokenizer: {where} has no file of a tokenizer")
    return [*_matching(names, _CONFIGS), *found]


def is_weights(name: str) -> bool:
    """Whether it is weights in the layout of transformers: not of a folder such as original/."""
    return (
        name.endswith(".safetensors")
        and "/" not in name
        and not name.startswith("consolidated")
        and name != "adapter_model.safetensors"
    )


def is_gguf_model(name: str) -> bool:
    path = PurePosixPath(name)
    return (
        path.suffix == ".gguf"
        and _NO_MODEL.search(path.stem) is None
        and LATER_PART.search(name) is None
    )


def _chosen(ggufs: list[str], file: str | None, where: str) -> str:
    if not ggufs:
        raise InvalidArgument(f"{where} has no GGUF file of a model, which {file!r} asks for")
    if file is None and len(ggufs) == 1:
        return ggufs[0]
    for wanted in _PREFERRED if file is None else (file,):
        found = [name for name in ggufs if _is_named(name, wanted)]
        if found:
            return min(found, key=lambda name: (len(name), name))
    listed = ", ".join(_quantizations(ggufs))
    asked = "several GGUF files" if file is None else f"no GGUF file for {file!r}"
    raise InvalidArgument(f"{where} has {asked}; add one of them after a colon: {listed}")


def _is_named(name: str, wanted: str) -> bool:
    """Whether the name or its end is `wanted`, or has it as a word: "Q4_K_M" of "x-Q4_K_M.gguf"."""
    if wanted.lower().endswith(".gguf"):
        return name == wanted or PurePosixPath(name).name == wanted
    return (
        re.search(rf"(?:^|[-._/]){re.escape(wanted)}(?:[-./]|$)", name, re.IGNORECASE) is not None
    )


def _quantizations(ggufs: list[str]) -> list[str]:
    """What tells files apart: the ends of their names after what all begin with, or the names."""
    stems = [_PARTS.sub("", PurePosixPath(name).name).removesuffix(".gguf") for name in ggufs]
    ends = [re.split(r"[-.](?=[^-.]*$)", stem)[-1] for stem in stems]
    return ends if len(set(ends)) == len(ends) else ggufs


def _with_parts(first: str, names: Iterable[str]) -> list[str]:
    parts = _PARTS.search(first)
    if parts is None:
        return [first]
    begin = first[: parts.start()]
    later = [n for n in names if n.startswith(begin) and LATER_PART.search(n) is not None]
    return [first, *sorted(n for n in later if n.endswith(f"-of-{parts[1]}.gguf"))]


def _matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Names of the repository's own folder match patterns without one alone."""
    patterns = list(patterns)
    return sorted(
        name
        for name in names
        if any(fnmatchcase(name, p) and name.count("/") == p.count("/") for p in patterns)
    )
