"""Frames of KV blocks: what is none is refused, and what is one is read as it was written."""

from __future__ import annotations

import hashlib
import hmac
import struct

import pytest
from llmserve import _core_testing as testing
from llmserve.errors import LLMServeError

HEAD = struct.Struct("<IBBHIIQ32s")
SAMPLES = testing.kv_frame_samples()


@pytest.mark.parametrize("length", [0, 1, 16, 63, 64, 65, 200])
def test_a_message_code_is_hmac_with_sha_256(length: int) -> None:
    key = bytes(range(7, 7 + length % 256)) * (1 + length // 256)
    for size in (0, 1, 55, 56, 63, 64, 65, 1000):
        data = bytes(i * 31 % 256 for i in range(size))
        expected = hmac.digest(key, data, hashlib.sha256)
        assert testing.message_code(key, [data]) == expected
        assert testing.message_code(key, [data[: size // 3], data[size // 3 :]]) == expected


def test_each_type_is_written_as_it_was_read() -> None:
    assert len({frame[4] for frame in SAMPLES}) == 9
    for frame in SAMPLES:
        assert testing.read_kv_frame(frame) == frame


@pytest.mark.parametrize("type", range(9))
def test_a_frame_that_is_cut_or_longer_is_refused(type: int) -> None:
    frame = SAMPLES[type]
    for length in range(len(frame)):
        with pytest.raises(LLMServeError, match="frame of KV blocks"):
            testing.read_kv_frame(frame[:length])
    with pytest.raises(LLMServeError, match="its length is another"):
        testing.read_kv_frame(frame + b"\0")


def changed(frame: bytes, **fields: int) -> bytes:
    names = ("magic", "type", "zero", "zeros", "num_bytes", "more_zeros", "number", "code")
    values = dict(zip(names, HEAD.unpack(frame[: HEAD.size]), strict=True)) | fields
    return HEAD.pack(*(values[name] for name in names)) + frame[HEAD.size :]


@pytest.mark.parametrize(
    "fields",
    [
        {"magic": 0},
        {"type": 0},
        {"type": 9},
        {"zero": 1},
        {"zeros": 1},
        {"more_zeros": 1},
        {"num_bytes": 2**32 - 1},
        {"num_bytes": 1025},
    ],
)
def test_a_head_with_a_field_out_of_bounds_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(LLMServeError, match="frame of KV blocks"):
        testing.read_kv_frame(changed(SAMPLES[0], **fields))


def test_a_count_that_the_payload_does_not_have_allocates_nothing() -> None:
    pull = bytearray(next(frame for frame in SAMPLES if frame[4] == 4))
    place = HEAD.size + 8 + 8 + 4 + 32 + 4
    pull[place : place + 4] = struct.pack("<I", 2**32 - 1)
    with pytest.raises(LLMServeError, match="cut short"):
        testing.read_kv_frame(bytes(pull))


def test_frames_that_are_nearly_right_are_read_or_refused() -> None:
    num_read = testing.fuzz_kv_frames(200_000, seed=1)
    assert 1000 < num_read < 199_000


@pytest.mark.long
def test_ten_million_frames_that_are_nearly_right() -> None:
    assert testing.fuzz_kv_frames(10_000_000, seed=2) > 0
