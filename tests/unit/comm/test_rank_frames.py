"""Frames between the processes of one model: what is none is refused, and nothing is forged."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from llmserve import _core_testing as testing
from llmserve.errors import DeviceError, LLMServeError

HEAD = struct.Struct("<IBBBBQQ")
SAMPLES = testing.rank_frame_samples()
STEP = next(frame for frame in SAMPLES if frame[4] == 7)
# SipHash-2-4 with 128 bits, of the bytes 0, 1, 2 … under the key 0, 1, 2 … 15: its authors' vectors
# of lengths 0 and 1.
VECTORS = {0: "a3817f04ba25a8e66df67214c7550293", 1: "da87c1d86b99af44347659119b22fc45"}


@pytest.mark.parametrize("length", VECTORS)
def test_a_short_code_is_siphash(length: int) -> None:
    code = testing.short_code(bytes(range(16)), [bytes(range(length))])
    assert code.hex() == VECTORS[length]


def test_a_short_code_takes_parts_one_after_the_other() -> None:
    key, data = bytes(range(16)), bytes(i * 31 % 256 for i in range(1001))
    for size in (0, 7, 8, 9, 63, 64, 1000, 1001):
        whole = testing.short_code(key, [data[:size]])
        for cut in range(0, size + 1, 8):
            assert testing.short_code(key, [data[:cut], data[cut:size]]) == whole
    codes = {testing.short_code(key, [data[:size]]) for size in range(1001)}
    assert len(codes) == 1001


def test_each_type_is_written_as_it_was_read() -> None:
    assert len({frame[4] for frame in SAMPLES}) == 18
    for frame in SAMPLES:
        assert testing.read_rank_frame(frame) == frame


@pytest.mark.parametrize("idx", range(13))
def test_a_frame_that_is_cut_or_longer_is_refused(idx: int) -> None:
    frame = SAMPLES[idx]
    for length in range(len(frame)):
        with pytest.raises(LLMServeError, match="frame of another rank"):
            testing.read_rank_frame(frame[:length])
    with pytest.raises(LLMServeError, match="its length is another"):
        testing.read_rank_frame(frame + b"\0")


def changed(frame: bytes, **fields: int) -> bytes:
    names = ("magic", "type", "op", "dtype", "zero", "num_bytes", "number")
    values = dict(zip(names, HEAD.unpack(frame[: HEAD.size]), strict=True)) | fields
    return HEAD.pack(*(values[name] for name in names)) + frame[HEAD.size :]


@pytest.mark.parametrize(
    "fields",
    [
        {"magic": 0},
        {"type": 0},
        {"type": 14},
        {"op": 1},
        {"dtype": 12},
        {"zero": 1},
        {"num_bytes": 2**63},
        {"num_bytes": 2**14 + 1},
    ],
)
def test_a_head_with_a_field_out_of_bounds_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(DeviceError, match="frame of another rank"):
        testing.read_rank_frame(changed(SAMPLES[0], **fields))


def with_number(position: int, value: int) -> bytes:
    """The sample step with the 32 bits at this place of its payload changed."""
    frame = bytearray(STEP)
    place = HEAD.size + 4 * position
    frame[place : place + 4] = struct.pack("<i", value)
    return bytes(frame)


# Ten sizes, then tokens [4], starts [3], lengths [2], adapters [2], states [2], rows [2], two
# tables [2, 2], one layer, (0, 3, 8), (1, 2), (1, 2).
@pytest.mark.parametrize(
    ("position", "value", "told"),
    [
        (0, 33, "too many tokens"),
        (1, 9, "too many sequences"),
        (2, 65, "too many rows"),
        (3, 9, "its tables are too wide"),
        (4, 1, "other cache groups"),
        (5, 3, "wants too many layers"),
        (9, 4, "its second half has no tokens"),
        (9, 2, "it runs in halves"),
        (10, 100, "a token that there is not"),
        (10, -1, "a token that there is not"),
        (14, 1, "its sequences are not its tokens"),
        (15, 5, "its sequences are not its tokens"),
        (16, 3, "its sequences are not its tokens"),
        (17, 2, "a sequence's length"),
        (17, 65, "a sequence's length"),
        (19, 0, "an adapter that there is not"),
        (21, 2, "a state that there is not"),
        (23, 4, "a row that there is not"),
        (25, 16, "a block that there is not"),
        (25, -1, "a block that there is not"),
        (33, 5, "a layer that there is not"),
        (35, 5, "a pooled prompt"),
        (37, 16, "a block"),
        (40, 4, "a given prompt"),
    ],
)
def test_a_step_names_nothing_that_there_is_not(position: int, value: int, told: str) -> None:
    with pytest.raises(DeviceError, match=told):
        testing.read_rank_frame(with_number(position, value))


def test_a_step_in_halves_is_read() -> None:
    """The sample without what halves cannot have: its place is behind nine other sizes."""
    halves = [frame for frame in SAMPLES if frame[4] == 7][1]
    assert struct.unpack_from("<i", halves, HEAD.size + 4 * 9) == (2,)
    assert testing.read_rank_frame(halves) == halves


def test_frames_that_are_nearly_right_are_read_or_refused() -> None:
    num_read = testing.fuzz_rank_frames(200_000, seed=1)
    assert 1000 < num_read < 199_000


def test_memory_grows_with_what_has_come_and_not_with_what_a_head_says() -> None:
    def peak_kib() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0])

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak_kib()
    assert testing.receive_claimed(2**30, 60_000) == "another rank does not answer"
    assert peak_kib() - before < 64 * 1024


@pytest.mark.long
def test_ten_million_frames_that_are_nearly_right() -> None:
    assert testing.fuzz_rank_frames(10_000_000, seed=2) > 0
