"""The package's files, and what they take in a wheel."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import llmserve

PACKAGE = Path(llmserve.__file__).parent
CUDA_LIBRARY = PACKAGE / "lib" / "libllmserve_cuda.so"


def packaged_files() -> list[Path]:
    """Without the testing bindings, which a plain wheel has not got."""
    files = (file for file in PACKAGE.rglob("*") if "__pycache__" not in file.parts)
    return [f for f in files if f.is_file() and not f.name.startswith("_core_testing.")]


def wheel_bytes(files: list[Path]) -> int:
    """A wheel is a ZIP file, which compresses each by itself."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            archive.write(file, file.relative_to(PACKAGE))
    return len(buffer.getvalue())
