"""Small good files to fuzz from: `PYTHONPATH=python:tests python tests/fuzz/seeds.py DIR`."""

import json
import sys
from pathlib import Path

from checkpoints import checkpoint
from safetensors_files import header_entry, safetensors_bytes
from unit.io.test_gguf import GOOD


def write_seeds(directory: Path) -> None:
    """One file a format, in a folder of its own."""
    header = {
        "__metadata__": {"format": "pt"},
        "a": header_entry("F32", [2, 3], 0, 24),
        "b": header_entry("F8_E4M3", [4], 24, 28),
    }
    llama = json.loads((checkpoint("llama") / "config.json").read_text())
    for name, contents in {
        "gguf": GOOD,
        "safetensors": safetensors_bytes(header, bytes(28)),
        "json": b'{"a": [1, -2.5e3, "\\u00e9\\ud83d\\ude00"], "b": {"c": null, "d": true}}',
        "config": json.dumps(llama).encode(),
        "text": b"<0x0A> hello stop",
    }.items():
        (directory / name).mkdir(parents=True, exist_ok=True)
        (directory / name / "seed").write_bytes(contents)


if __name__ == "__main__":
    write_seeds(Path(sys.argv[1]))
