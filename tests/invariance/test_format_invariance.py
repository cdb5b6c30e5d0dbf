"""H1 for every format of weights: the bits of a request alone, in any company."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from checkpoints import checkpoint
from gguf_files import in_format, write_gguf
from llmserve import _core
from test_family_invariance import assert_company_changes_no_bit

QUANTIZATIONS = [name for name, _ in _core.supported_quantizations()]
# No converter writes F64.
GGUF_TYPES = [
    name
    for name, _ in _core.supported_quant_formats()
    if name in gguf.GGMLQuantizationType.__members__ and name != "F64"
]


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_the_company_changes_no_bit_of_a_quantized_model(name: str) -> None:
    path = checkpoint("llama", hidden_size=128, intermediate_size=256)  # whole groups
    assert_company_changes_no_bit(path, quantization=name)


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_the_company_changes_no_bit_of_a_gguf_file(kind: str, tmp_path: Path) -> None:
    source = checkpoint("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    assert_company_changes_no_bit(write_gguf(tmp_path / "model.gguf", source, in_format(kind)))
