"""The small files of a checkpoint, whatever a stranger has put there."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from llmserve.checkpoint.model_files import (
    MAX_TOKENIZER_BYTES,
    parse_json_object,
    read_bytes,
    read_json_object,
)
from llmserve.errors import CorruptFile


def test_reading_a_small_file_takes_no_room_for_a_large_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    tracemalloc.start()
    try:
        assert read_bytes(tmp_path, "tokenizer.json", MAX_TOKENIZER_BYTES) == b"{}"
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("target", ["config.json", "other"])
def test_link_that_leads_to_itself_is_a_corrupt_file(target: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(target)
    (tmp_path / "other").symlink_to("config.json")
    with pytest.raises(CorruptFile, match=r"config\.json: cannot be read"):
        read_json_object(tmp_path, "config.json")


def test_json_of_many_empty_values_is_refused_by_their_number(tmp_path: Path) -> None:
    data = b'{"a": [' + b"{}," * 2**20 + b"{}, {}]}"
    with pytest.raises(CorruptFile, match="more than the 1048576 values"):
        parse_json_object(data, tmp_path / "config.json")
