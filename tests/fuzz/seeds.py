"""Small good files to fuzz from: `PYTHONPATH=python:tests python tests/fuzz/seeds.py DIR`."""

import sys
from pathlib import Path

from safetensors_files import header_entry, safetensors_bytes
from unit.io.test_gguf import GOOD


def write_seeds(directory: Path) -> None:
    """One file a format, in a folder of its own."""
    header = {
        "__metadata__": {"format": "pt"},
        "a": header_entry("F32", [2, 3], 0, 24),
        "b": header_entry("F8_E4M3", [4], 24, 28),
    }
    for name, contents in {
        "gguf": GOOD,
        "safetensors": safetensors_bytes(header, bytes(28)),
    }.items():
        (directory / name).mkdir(parents=True, exist_ok=True)
        (directory / name / "seed").write_bytes(contents)


if __name__ == "__main__":
    write_seeds(Path(sys.argv[1]))
