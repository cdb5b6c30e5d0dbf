"""Safetensors files of untrusted origin: typed errors that name file and tensor."""

from __future__ import annotations

import json
import math
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint
from fuzzing import fuzzed, mutations
from llmserve import _core_testing
from llmserve.errors import CorruptFile, NotSupported
from safetensors.numpy import load_file, save_file
from safetensors_files import header_entry, safetensors_bytes, write_checkpoint

GOOD_HEADER = {
    "__metadata__": {"format": "pt"},
    "a": header_entry("F32", [2, 3], 0, 24),
    "b": header_entry("BF16", [4], 24, 32),
    "empty": header_entry("F16", [0, 7], 32, 32),
    "scalar": header_entry("I64", [], 32, 40),
}
GOOD_DATA = bytes(range(40))


def list_tensors(path: str | Path) -> list[dict[str, Any]]:
    return _core_testing.list_tensors(str(path))


def refusal(path: str | Path, error: type[Exception] = CorruptFile) -> str:
    with pytest.raises(error) as caught:
        list_tensors(path)
    return str(caught.value)


def test_lists_names_dtypes_shapes_and_ranges_in_order(tmp_path: Path) -> None:
    contents = safetensors_bytes(GOOD_HEADER, GOOD_DATA)
    tensors = list_tensors(write_checkpoint(tmp_path, contents))
    assert [tensor["name"] for tensor in tensors] == ["a", "b", "empty", "scalar"]
    assert tensors[1]["dtype"] == "bfloat16"
    assert tensors[0]["shape"] == [2, 3]
    assert tensors[3]["shape"] == []
    assert contents[tensors[1]["offset"] :][: tensors[1]["num_bytes"]] == GOOD_DATA[24:32]


def test_agrees_with_the_safetensors_package(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        f"t{i}": rng.standard_normal(rng.integers(0, 5, rng.integers(0, 6))).astype(dtype)
        for i, dtype in enumerate([np.float32, np.float16, np.int8, np.float64] * 5)
    }
    save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    contents = (tmp_path / "model.safetensors").read_bytes()
    loaded = load_file(tmp_path / "model.safetensors")
    tensors = {tensor["name"]: tensor for tensor in list_tensors(tmp_path)}
    assert tensors.keys() == loaded.keys()
    for name, tensor in tensors.items():
        assert tensor["shape"] == list(loaded[name].shape)
        begin = tensor["offset"]
        assert contents[begin : begin + tensor["num_bytes"]] == loaded[name].tobytes()


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "no bytes": (b"", "is 0 bytes long, too short for a safetensors file"),
    "seven bytes": (b"\0" * 7, "is 7 bytes long, too short"),
    "header past the end": (
        safetensors_bytes({}, b"", header_length=3),
        "byte 0: the header claims 3 bytes, at most 2 are possible",
    ),
    "header of 2^63": (
        safetensors_bytes({}, b"", header_length=1 << 63),
        "the header claims 9223372036854775808 bytes",
    ),
    "header not JSON": (safetensors_bytes(b"{]", b""), "byte 9: expected '\"' to begin a string"),
    "header an array": (safetensors_bytes([], b""), "byte 8: expected '{' to begin an object"),
    "header not UTF-8": (safetensors_bytes(b'{"\xff":1}', b""), "byte 10: a string is not valid"),
    "no shape": (
        safetensors_bytes({"a": {"dtype": "F32", "data_offsets": [0, 0]}}, b""),
        'tensor "a": lacks dtype, shape or data_offsets',
    ),
    "two dtypes": (
        safetensors_bytes(b'{"a":{"dtype":"F32","dtype":"F32"}}', b""),
        'tensor "a": has two dtypes',
    ),
    "two tensors of a name": (
        safetensors_bytes(
            b'{"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},'
            b'"a":{"dtype":"I8","shape":[1],"data_offsets":[1,2]}}',
            b"xy",
        ),
        'the tensor "a" comes twice',
    ),
    "unknown dtype": (
        safetensors_bytes({"a": header_entry("F99", [1], 0, 4)}, b"1234"),
        'tensor "a": has the unknown dtype "F99"',
    ),
    "negative dimension": (
        safetensors_bytes({"a": header_entry("F32", [-1], 0, 4)}, b"1234"),
        'tensor "a": has a negative dimension -1',
    ),
    "fraction of a dimension": (
        safetensors_bytes({"a": header_entry("F32", [1.5], 0, 4)}, b"1234"),  # type: ignore[list-item]
        "expected an integer",
    ),
    "shape that overflows": (
        safetensors_bytes({"a": header_entry("F32", [1 << 40, 1 << 40], 0, 4)}, b"1234"),
        'tensor "a": float32 [1099511627776, 1099511627776] takes too many bytes',
    ),
    "shape larger than the bytes": (
        safetensors_bytes({"a": header_entry("F32", [2], 0, 4)}, b"1234"),
        'tensor "a": float32 [2] takes 8 bytes, but its data_offsets hold 4',
    ),
    "offsets past the end": (
        safetensors_bytes({"a": header_entry("F32", [2], 0, 8)}, b"1234"),
        'tensor "a": data_offsets [0, 8] leave the file, which holds 4 bytes of data',
    ),
    "offsets backwards": (
        safetensors_bytes({"a": header_entry("F32", [0], 4, 0)}, b"1234"),
        "data_offsets [4, 0] leave the file",
    ),
    "offsets of 2^63": (
        safetensors_bytes({"a": header_entry("F32", [0], 0, 1 << 63)}, b""),
        "the integer does not fit 64 bits",
    ),
    "three offsets": (
        safetensors_bytes(
            {"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4, 8]}}, b"12345678"
        ),
        'tensor "a": data_offsets: expected 2 numbers, got 3',
    ),
    "overlap": (
        safetensors_bytes(
            {"a": header_entry("I8", [4], 0, 4), "b": header_entry("I8", [4], 2, 6)}, b"123456"
        ),
        'tensor "b": overlaps the tensor before it',
    ),
    "same range twice": (
        safetensors_bytes(
            {"a": header_entry("I8", [4], 0, 4), "b": header_entry("I8", [4], 0, 4)}, b"1234"
        ),
        "overlaps the tensor before it",
    ),
    "hole": (
        safetensors_bytes(
            {"a": header_entry("I8", [2], 0, 2), "b": header_entry("I8", [2], 4, 6)}, b"123456"
        ),
        'tensor "b": leaves a hole before it',
    ),
    "bytes after the last tensor": (
        safetensors_bytes({"a": header_entry("I8", [2], 0, 2)}, b"123456"),
        "4 bytes belong to no tensor",
    ),
    "metadata not strings": (
        safetensors_bytes({"__metadata__": {"a": 1}}, b""),
        "expected '\"' to begin a string",
    ),
    "name of 5,000 bytes": (
        safetensors_bytes({"a" * 5000: header_entry("I8", [0], 0, 0)}, b""),
        "a tensor's name is 5000 bytes long, at most 4096 are read",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_refuses_bad_file(case: str, tmp_path: Path) -> None:
    contents, message = BAD_FILES[case]
    path = write_checkpoint(tmp_path, contents)
    got = refusal(path)
    assert message in got
    assert str(tmp_path / "model.safetensors") in got


def test_element_type_that_no_layer_reads_is_not_supported(tmp_path: Path) -> None:
    contents = safetensors_bytes({"a": header_entry("C64", [1], 0, 8)}, b"12345678")
    message = refusal(write_checkpoint(tmp_path, contents), NotSupported)
    assert 'tensor "a" has dtype C64, which llmserve does not read' in message


def test_more_dimensions_than_any_layer_reads_are_not_supported(tmp_path: Path) -> None:
    contents = safetensors_bytes({"a": header_entry("F32", [1] * 6, 0, 4)}, b"1234")
    message = refusal(write_checkpoint(tmp_path, contents), NotSupported)
    assert 'tensor "a" has more than 5 dimensions' in message
    contents = safetensors_bytes({"a": header_entry("F32", [1] * 5, 0, 4)}, b"1234")
    assert list_tensors(write_checkpoint(tmp_path, contents))[0]["shape"] == [1] * 5


PEAK_OF_OPENING = """
import resource, sys
from llmserve import _core_testing as testing
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
testing.count_tensors(sys.argv[1])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_a_header_of_many_tiny_tensors_takes_at_most_twice_its_size(tmp_path: Path) -> None:
    entries = ",".join(
        f'"{i:x}":{{"dtype":"I8","shape":[0],"data_offsets":[0,0]}}' for i in range(200_000)
    )
    path = write_checkpoint(tmp_path, safetensors_bytes(f"{{{entries}}}".encode(), b""))
    assert _core_testing.count_tensors(path) == 200_000
    process = subprocess.run(
        [sys.executable, "-c", PEAK_OF_OPENING, path], capture_output=True, text=True, check=True
    )
    # The mapping's own pages count too, and are the file's.
    assert int(process.stdout) < (1 + 2) * len(entries)


_INTEGERS = (-1, 0, 1, 2, 7, 8, 24, 40, 1 << 31, 1 << 32, 1 << 62, 1 << 63, 1 << 64)
_FIELDS = ("entry", "dtype", "shape", "data_offsets", "drop", "copy")


def _junk(rng: random.Random) -> Any:
    integers = [rng.choice(_INTEGERS) for _ in range(rng.randrange(6))]
    plain = (None, True, math.nan, math.inf, -0.5, 1e308, "", "é\0", "F32", "F16", "I8", "U64")
    return rng.choice((*plain, {}, integers, {"a": integers}, rng.choice(_INTEGERS)))


def mutated_file(rng: random.Random) -> bytes:
    """A good file with a few fields, bytes or lengths changed."""
    header = json.loads(json.dumps(GOOD_HEADER))
    for _ in range(rng.randrange(4)):
        name = rng.choice(["a", "b", "empty", "scalar", "__metadata__", "new"])
        action = rng.choice(_FIELDS)
        if action == "drop":
            header.pop(name, None)
        elif action == "copy":
            header["copy"] = header.get(name)
        elif action == "entry":
            header[name] = _junk(rng)
        elif isinstance(header.get(name), dict):
            header[name][action] = _junk(rng)
    text = bytearray(json.dumps(header).encode())
    for _ in range(rng.randrange(3)):
        text[rng.randrange(len(text))] = rng.randrange(256)
    lengths = [len(text)] * 8 + [rng.randrange(2 * len(text)), rng.choice(_INTEGERS)]
    contents = struct.pack("<Q", rng.choice(lengths) % (1 << 64)) + bytes(text) + GOOD_DATA
    return contents[: rng.randrange(len(contents)) if rng.random() < 0.2 else None]


def check_mutation(directory: Path, contents: bytes) -> None:
    path = write_checkpoint(directory, contents)
    try:
        tensors = list_tensors(path)
    except (CorruptFile, NotSupported) as error:
        assert "model.safetensors" in str(error)  # noqa: PT017
        return
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor["offset"], tensor["num_bytes"])):
        assert end == 0 or tensor["offset"] == end
        end = tensor["offset"] + tensor["num_bytes"]
    assert end in (0, len(contents))


@fuzzed(10_000)
def test_mutated_files_are_read_or_refused_by_type(tmp_path: Path, seed: int) -> None:
    for contents in mutations(mutated_file, seed):
        check_mutation(tmp_path, contents)


@pytest.mark.long
@fuzzed(1_000_000)
def test_a_million_mutated_files_are_read_or_refused_by_type(tmp_path: Path, seed: int) -> None:
    for contents in mutations(mutated_file, seed):
        check_mutation(tmp_path, contents)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "llama", max_shard_size="40KB", num_hidden_layers=1)
    return tmp_path


def _edit_index(directory: Path, **weight_map: str | None) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for name, file in weight_map.items():
        if file is None:
            index["weight_map"].pop(name)
        else:
            index["weight_map"][name] = file
    path.write_text(json.dumps(index))


def _shard_of(directory: Path, tensor: str) -> Path:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return directory / index["weight_map"][tensor]


def test_missing_shard_is_named(shards: Path) -> None:
    shard = _shard_of(shards, "model.norm.weight")
    shard.unlink()
    assert f"{shard}: No such file or directory" in refusal(shards)


def test_truncated_shard_is_named(shards: Path) -> None:
    shard = _shard_of(shards, "model.norm.weight")
    shard.write_bytes(shard.read_bytes()[:-4])
    message = refusal(shards)
    assert str(shard) in message
    assert "leave the file" in message
    assert "download it again" in message


def test_empty_shard_is_named(shards: Path) -> None:
    shard = _shard_of(shards, "model.norm.weight")
    shard.write_bytes(b"")
    assert f"{shard}: is 0 bytes long" in refusal(shards)


def test_tensor_that_is_not_in_its_shard_is_named(shards: Path) -> None:
    other = _shard_of(shards, "model.embed_tokens.weight").name
    assert other != _shard_of(shards, "model.norm.weight").name
    _edit_index(shards, **{"model.norm.weight": other})
    message = refusal(shards)
    assert f'tensor "model.norm.weight" should be in {other}, which does not have it' in message


def test_tensor_that_the_index_does_not_have_is_named(shards: Path) -> None:
    shard = _shard_of(shards, "model.norm.weight")
    save_file(load_file(shard) | {"stray": np.zeros(1, np.float32)}, shard)
    message = refusal(shards)
    assert f'{shard}: tensor "stray" is not in the weight_map of' in message


def test_tensor_in_two_shards_is_named(shards: Path) -> None:
    shard = _shard_of(shards, "model.norm.weight")
    other = _shard_of(shards, "model.embed_tokens.weight")
    arrays = load_file(shard) | {"model.embed_tokens.weight": np.zeros(1, np.float32)}
    save_file(arrays, shard)
    assert other != shard
    assert 'the tensor "model.embed_tokens.weight" comes twice' in refusal(shards)


@pytest.mark.parametrize(
    "name",
    ["../model-00001.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ".", "", "a\\b"],
)
def test_index_cannot_name_a_file_elsewhere(shards: Path, name: str) -> None:
    _edit_index(shards, **{"model.norm.weight": name})
    message = refusal(shards)
    assert "is not a plain file name" in message
    assert "passwd:" not in message


@pytest.mark.parametrize(
    "index", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', ""]
)
def test_bad_index_is_refused(shards: Path, index: str) -> None:
    (shards / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in refusal(shards)
