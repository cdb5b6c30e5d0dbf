"""GGUF files of untrusted origin: typed errors that name file, byte and reason."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import checkpoint
from fuzzing import fuzzed, mutations
from gguf_files import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I32,
    STRING,
    U8,
    U32,
    U64,
    raw_array,
    raw_file,
    raw_string,
    raw_tensor,
    raw_value,
    write_gguf,
)
from llmserve import _core, _core_testing
from llmserve.errors import CorruptFile, InvalidArgument, NotSupported
from safetensors_files import write_anew

ARCH = raw_value(b"general.architecture", STRING, b"llama")
SHAPE = [
    ARCH,
    raw_value(b"llama.embedding_length", U32, 32),
    raw_value(b"llama.block_count", U32, 1),
    raw_value(b"llama.feed_forward_length", U32, 32),
    raw_value(b"llama.attention.head_count", U32, 2),
    raw_value(b"llama.context_length", U64, 64),
    raw_value(b"llama.attention.layer_norm_rms_epsilon", F32, 1e-6),
    raw_array(b"tokenizer.ggml.tokens", STRING, raw_string(b"a") + raw_string(b"bc"), 2),
    raw_array(b"tokenizer.ggml.scores", F32, struct.pack("<2f", 0.5, 1.5), 2),
]
TENSORS = [
    raw_tensor(b"token_embd.weight", [32, 2], 0, 0),
    raw_tensor(b"output_norm.weight", [32], 0, 256),
    raw_tensor(b"blk.0.attn_q.weight", [32, 2], 8, 384),
]
DATA = bytes(384 + 68)
GOOD = raw_file(SHAPE, TENSORS, DATA)


def write(directory: Path, contents: bytes) -> str:
    path = directory / "model.gguf"
    write_anew(path, contents)
    return str(path)


def refusal(directory: Path, contents: bytes, error: type[Exception] = CorruptFile) -> str:
    path = write(directory, contents)
    with pytest.raises(error) as caught:
        _core_testing.list_tensors(path)
    assert path in str(caught.value)
    return str(caught.value)


def test_good_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    tensors = {t["name"]: t for t in _core_testing.list_tensors(path)}
    query = tensors["model.layers.0.self_attn.q_proj.weight"]
    assert (query["dtype"], query["shape"], query["num_bytes"]) == ("Q8_0", [2, 32], 68)
    assert GOOD[query["offset"] :] == DATA[384:]
    assert _core.GgufFile(path).metadata("tokenizer.") == {
        "tokenizer.ggml.tokens": ["a", "bc"],
        "tokenizer.ggml.scores": [0.5, 1.5],
    }


def test_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    reader = gguf.GGUFReader(path)
    ours = sorted((t["offset"], t["num_bytes"]) for t in _core_testing.list_tensors(path))
    assert ours == sorted((t.data_offset, t.n_bytes) for t in reader.tensors)
    values = _core.GgufFile(path).metadata("llama.")
    for key, value in values.items():
        assert reader.fields[key].contents() == value


def with_value(value: bytes) -> bytes:
    return raw_file([*SHAPE, value], TENSORS, DATA)


def with_tensor(tensor: bytes) -> bytes:
    return raw_file(SHAPE, [*TENSORS[:2], tensor], DATA)


NESTED = b"".join(struct.pack("<IQ", ARRAY, 1) for _ in range(9)) + struct.pack("<IQB", U8, 1, 0)
BAD_FILES: dict[str, tuple[bytes, str]] = {
    "no bytes": (b"", "byte 0: is 0 bytes long, too short"),
    "wrong magic": (raw_file(SHAPE, [], b"", magic=b"GGML"), "byte 0: expected the letters GGUF"),
    "version 99": (raw_file(SHAPE, [], b"", version=99), "byte 4: expected GGUF version 2 or 3"),
    "2^64 - 1 tensors": (
        raw_file(SHAPE, TENSORS, DATA, num_tensors=2**64 - 1),
        "byte 8: number of tensors: 18446744073709551615, at most 4096",
    ),
    "2^63 entries": (
        raw_file(SHAPE, TENSORS, DATA, num_values=2**63),
        "byte 16: number of metadata entries: 9223372036854775808, at most 4096",
    ),
    "more entries than there are": (raw_file(SHAPE, [], b"", num_values=4000), "metadata key"),
    "key over the end": (with_value(raw_string(b"key", 2**64 - 1)), "a string of 184467"),
    "empty key": (with_value(raw_value(b"", U8, 1)), "a metadata key: expected 1 to 1024"),
    "key of control characters": (with_value(raw_value(b"a\n", U8, 1)), "printable characters"),
    "key twice": (with_value(ARCH), 'the metadata key "general.architecture" comes twice'),
    "string over the end": (
        with_value(raw_string(b"k") + struct.pack("<IQ", STRING, 1 << 40)),
        "k: a string of 1099511627776 bytes",
    ),
    "unknown value type": (
        with_value(raw_string(b"k") + struct.pack("<I", 13)),
        "metadata k: unknown type 13",
    ),
    "array that overflows": (
        with_value(raw_array(b"k", U64, b"", 2**61)),
        "k: 2305843009213693952, at most",
    ),
    "array over the end": (with_value(raw_array(b"k", U64, b"", 200)), "200 elements of uint64"),
    "array of strings over the end": (with_value(raw_array(b"k", STRING, b"", 100)), "a string of"),
    "arrays nested deeply": (
        with_value(raw_string(b"k") + struct.pack("<I", ARRAY) + NESTED),
        "metadata k: arrays nested more than 4 deep",
    ),
    "architecture no string": (
        raw_file([raw_value(b"general.architecture", U8, 1)], TENSORS, DATA),
        "metadata general.architecture: expected a string, got a uint8",
    ),
    "no architecture": (raw_file(SHAPE[1:], TENSORS, DATA), "metadata general.architecture: is"),
    "length that is a string": (
        raw_file([*SHAPE[:1], raw_value(b"llama.embedding_length", STRING, b"32")], TENSORS, DATA),
        "metadata llama.embedding_length: expected an integer, got a string",
    ),
    "length of 2^64 - 1": (
        raw_file([ARCH, raw_value(b"llama.embedding_length", U64, 2**64 - 1)], TENSORS, DATA),
        "metadata llama.embedding_length: 18446744073709551615 is out of range",
    ),
    "alignment 0": (
        with_value(raw_value(b"general.alignment", U32, 0)),
        "metadata general.alignment: expected a power of two up to 1048576, got 0",
    ),
    "alignment 48": (with_value(raw_value(b"general.alignment", U32, 48)), "a power of two"),
    "not finite": (
        raw_file([*SHAPE, raw_value(b"llama.rope.freq_base", F64, float("nan"))], TENSORS, DATA),
        "metadata llama.rope.freq_base: expected a finite number",
    ),
    "tensor without a name": (with_tensor(raw_tensor(b"", [1], 0, 384)), "a tensor's name"),
    "tensor of 5 dimensions": (
        with_tensor(raw_tensor(b"t", [1] * 5, 0, 384)),
        'tensor "t": expected 1 to 4 dimensions, got 5',
    ),
    "tensor of no dimension": (with_tensor(raw_tensor(b"t", [], 0, 384)), "got 0"),
    "dimension 0": (with_tensor(raw_tensor(b"t", [0], 0, 384)), 'tensor "t": dimension 0 is 0'),
    "dimensions that overflow": (
        with_tensor(raw_tensor(b"t", [1 << 32, 1 << 32], 0, 384)),
        'tensor "t": dimension 1 is 4294967296',
    ),
    "rows of half a block": (
        with_tensor(raw_tensor(b"t", [48], 8, 384)),
        'tensor "t": rows of 48 elements are no whole blocks of Q8_0',
    ),
    "unknown tensor type": (
        with_tensor(raw_tensor(b"t", [32], 99, 384)),
        'tensor "t": unknown type 99',
    ),
    "offset not aligned": (
        with_tensor(raw_tensor(b"t", [1], 0, 390)),
        'tensor "t": offset 390, expected a multiple of 32',
    ),
    "offset of 2^64 - 32": (
        with_tensor(raw_tensor(b"t", [1], 0, 2**64 - 32)),
        'tensor "t": offset 18446744073709551584, expected a multiple of 32 within the file',
    ),
    "tensor over the end": (
        with_tensor(raw_tensor(b"t", [32], 0, 384)),
        'tensor "t" takes 128 bytes and leaves the file',
    ),
    "tensors that overlap": (
        with_tensor(raw_tensor(b"t", [8], 0, 352)),
        'tensor "t" overlaps tensor "output_norm.weight"',
    ),
    "name twice": (
        with_tensor(raw_tensor(b"output_norm.weight", [8], 0, 384)),
        '"model.norm.weight" comes twice',
    ),
    "no embedding table": (raw_file(SHAPE, TENSORS[1:], DATA), '"token_embd.weight"'),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_refuses_bad_file(case: str, tmp_path: Path) -> None:
    contents, message = BAD_FILES[case]
    assert message in refusal(tmp_path, contents)


@pytest.mark.parametrize("cut", range(0, len(GOOD), 7))
def test_refuses_file_that_was_cut(cut: int, tmp_path: Path) -> None:
    refusal(tmp_path, GOOD[:cut])


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (raw_file(SHAPE, [], b"", version=1), "is GGUF version 1"),
        (raw_file(SHAPE, [], b"", version=3 << 24), "of a big-endian machine"),
        (with_tensor(raw_tensor(b"t", [256], 33, 384)), '"t" is of type Q4_0_8_8, which is not'),
        (with_tensor(raw_tensor(b"t", [256], 36, 384)), '"t" is of type IQ4_NL_4_4'),
        (with_tensor(raw_tensor(b"t", [256], 31, 384)), '"t" is of type Q4_0_4_4'),
        (
            raw_file([raw_value(b"general.architecture", STRING, b"rwkv6")], TENSORS, DATA),
            'architecture "rwkv6" is not supported in GGUF files; docs/support-matrix.md has',
        ),
        (
            raw_file([raw_value(b"general.architecture", STRING, b"glm-dsa")], TENSORS, DATA),
            'architecture "glm-dsa" is not supported: its attention reads the tokens that an',
        ),
        (
            raw_file([raw_value(b"general.architecture", STRING, b"llama4")], TENSORS, DATA),
            'architecture "llama4" is not supported: most of its layers attend within chunks of',
        ),
        (
            raw_file(
                [
                    *SHAPE,
                    raw_array(b"llama.attention.head_count_kv", I32, struct.pack("<2i", 2, 4), 2),
                ],
                TENSORS,
                DATA,
            ),
            "llama.attention.head_count_kv: layers that differ (2 and 4) are not supported",
        ),
    ],
)
def test_what_is_not_supported_is_named(contents: bytes, message: str, tmp_path: Path) -> None:
    assert message in refusal(tmp_path, contents, NotSupported)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K"])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.k_proj.bias"])
def test_vector_in_blocks_is_refused(name: str, kind: str, tmp_path: Path) -> None:
    source = checkpoint("qwen2", hidden_size=256, intermediate_size=256, num_key_value_heads=4)
    qtype = gguf.GGMLQuantizationType[kind]

    def quantize(tensor: str, array: np.ndarray) -> Any:
        if tensor != name:
            return array, None
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
        return np.zeros(array.size // block_elements * block_bytes, np.uint8), qtype

    path = write_gguf(tmp_path / "model.gguf", source, quantize)
    for load in (_core_testing.Model, _core_testing.list_tensors):
        with pytest.raises(NotSupported, match=f"a vector in blocks of {kind}"):
            load(str(path))


def test_vocabulary_of_another_size_than_the_table_is_refused(tmp_path: Path) -> None:
    for size in (2, 3, 1):
        contents = raw_file([*SHAPE, raw_value(b"llama.vocab_size", U32, size)], TENSORS, DATA)
        if size == 2:
            _core_testing.list_tensors(write(tmp_path, contents))
        else:
            with pytest.raises(CorruptFile, match=f"expected the 2 rows of .* got {size}"):
                _core_testing.list_tensors(write(tmp_path, contents))


def test_text_that_is_not_utf8_is_refused_by_key(tmp_path: Path) -> None:
    path = write(tmp_path, with_value(raw_value(b"tokenizer.chat_template", STRING, b"\xff")))
    with pytest.raises(CorruptFile, match=r"metadata tokenizer.chat_template: expected UTF-8"):
        _core.GgufFile(path).metadata("tokenizer.")


def test_several_files_in_a_folder_are_an_ambiguity(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(GOOD)
    with pytest.raises(InvalidArgument, match=r"has several GGUF files; pass the path of one"):
        _core_testing.list_tensors(str(tmp_path))


PEAK_OF_OPENING = """
import resource, sys
from llmserve import _core_testing as testing
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    testing.count_tensors(sys.argv[1])
except Exception:
    pass
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
# The interpreter's own heap moves by this much; the bounds below are of more.
NOISE_BYTES = 1 << 20


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (
            lambda n: raw_file([*SHAPE, raw_array(b"k", STRING, bytes(8 * n), n)], [], b""),
            1_000_000,
        ),
        (lambda n: raw_file([*SHAPE, raw_array(b"k", U8, bytes(n), n)], [], b""), 4_000_000),
        (
            lambda n: raw_file(
                SHAPE, [raw_tensor(b"%d" % i, [8], 0, 32 * i) for i in range(n)], bytes(32 * n)
            ),
            4096,
        ),
        (lambda n: raw_file([raw_value(b"%d" % i, BOOL, 1) for i in range(n)], [], b""), 4096),
    ],
)
def test_no_more_than_twice_the_file_is_allocated(
    make: Callable[[int], bytes], size: int, tmp_path: Path
) -> None:
    contents = make(size)
    path = write(tmp_path, contents)
    process = subprocess.run(
        [sys.executable, "-c", PEAK_OF_OPENING, path], capture_output=True, text=True, check=True
    )
    # The mapping's own pages count too, and are the file's.
    assert int(process.stdout) < 3 * len(contents) + NOISE_BYTES


NUMBERS = (0, 1, 2, 9, 31, 33, 255, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)


def mutated_file(rng: random.Random) -> bytes:
    """A good file with parts left out or doubled, numbers overwritten, and its end cut."""
    values, tensors = list(SHAPE), list(TENSORS)
    for part in (values, tensors):
        if rng.random() < 0.3:
            at = rng.randrange(len(part))
            part[at : at + 1] = [part[at]] * rng.randrange(3)
    contents = bytearray(raw_file(values, tensors, DATA))
    for _ in range(rng.randrange(4)):
        at, width = rng.randrange(len(contents) - len(DATA)), rng.choice((1, 4, 8))
        number = rng.choice(NUMBERS) if rng.random() < 0.7 else rng.randrange(2**64)
        contents[at : at + width] = (number % 256**width).to_bytes(width, "little")
    return bytes(contents[: rng.randrange(len(contents)) if rng.random() < 0.2 else None])


def check_mutation(directory: Path, contents: bytes) -> None:
    path = write(directory, contents)
    try:
        tensors = _core_testing.list_tensors(path)
        _core.GgufFile(path).metadata("")
    except (CorruptFile, NotSupported) as error:
        assert "model.gguf" in str(error)  # noqa: PT017
        return
    for tensor in tensors:
        assert 0 <= tensor["offset"] <= len(contents) - tensor["num_bytes"]


@fuzzed(10_000)
def test_mutated_files_are_read_or_refused_by_type(tmp_path: Path, seed: int) -> None:
    for contents in mutations(mutated_file, seed):
        check_mutation(tmp_path, contents)


@pytest.mark.long
@fuzzed(1_000_000)
def test_a_million_mutated_files_are_read_or_refused_by_type(tmp_path: Path, seed: int) -> None:
    for contents in mutations(mutated_file, seed):
        check_mutation(tmp_path, contents)
