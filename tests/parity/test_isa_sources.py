"""Code compiled for one instruction set must not leak into code that runs everywhere."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    *("immintrin.h", "arm_neon.h", "stddef.h", "stdint.h", "string.h"),
    "kernels/cpu/kernel_table.h",
    "kernels/op_numbers.h",
}


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^">]+)[">]', path.read_text(), re.M)


def test_isa_files_include_only_plain_headers_and_inc_files():
    """An inline function of a header, compiled for AVX-512, may be the copy the linker keeps."""
    pending = list((ROOT / "csrc/kernels/cpu/isa").rglob("*.*"))
    assert len(pending) >= 3
    seen = set()
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in includes(path):
            if name.endswith(".inc"):
                pending.append(ROOT / "csrc" / name)
            else:
                assert name in ALLOWED, f"{path.relative_to(ROOT)} includes {name}"
    table, numbers = "kernels/cpu/kernel_table.h", "kernels/op_numbers.h"
    rows = "kernels/activations.inc"  # of a table: no code
    assert set(includes(ROOT / "csrc" / table)) == {"stdint.h", numbers, rows}
    assert set(includes(ROOT / "csrc" / numbers)) == {"stdint.h", rows}


def test_isa_objects_define_no_weak_symbols():
    objects = list((ROOT / "build").glob("*/csrc/CMakeFiles/llmserve_isa_*.dir/**/*.o"))
    if not objects:
        pytest.skip("no object files here: built by pip, not in place")
    for path in objects:
        symbols = subprocess.run(["nm", "-C", path], capture_output=True, text=True, check=True)
        weak = re.findall(r"^\S+ [WVu] .*$", symbols.stdout, re.M)
        assert not weak, f"{path.name}: {weak}"
