"""GGUF files that quantize writes: blocks against the gguf package, models against their source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import checkpoint
from llmserve import LLM, InvalidArgument, NotSupported, SamplingParams, demo_model_path, quantize
from llmserve.quantization.gguf_blocks import BLOCKS
from llmserve.quantization.gguf_model import kind_of
from llmserve.tokenization.tokenizer import Tokenizer

# |dx|^2 / |x|^2 of normal values, a little above what these blocks lose.
MAX_ERROR = {"Q8_0": 4e-5, "Q6_K": 4.2e-4, "Q5_K": 1.7e-3, "Q4_K": 6.6e-3, "Q4_0": 9e-3}


def write(out: Path, mix: str, model: Path | None = None, **options: Any) -> Any:
    return quantize(
        model or demo_model_path(), out, scheme=f"gguf:{mix}", report=False, use_tqdm=False,
        **options,
    )  # fmt: skip


def some_rows() -> np.ndarray:
    rows = np.random.default_rng(4).standard_normal((64, 512)).astype(np.float32)
    rows[3] = 0
    rows[4, :40] = 0
    rows[5] = np.abs(rows[5]) + 2  # far from 0
    rows[6] *= 1e-3
    rows[7] *= 1e3
    return rows


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_what_the_package_reads_and_near_the_values(kind: str) -> None:
    rows = some_rows()
    number, size, make = BLOCKS[kind]
    assert gguf.GGMLQuantizationType[kind].value == number
    blocks = make(rows)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    assert (block_size, block_bytes) == (size, blocks.shape[1])
    values = gguf.quants.dequantize(blocks.reshape(64, -1), gguf.GGMLQuantizationType[kind])
    assert values.shape == rows.shape
    assert not values[3].any()
    error = np.square(values - rows).sum(1) / np.maximum(np.square(rows).sum(1), 1e-9)
    assert error.max() < MAX_ERROR[kind]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_simple_blocks_are_the_packages_own_but_for_the_rounding_of_scales(kind: str) -> None:
    rows = some_rows()[8:]
    expected = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[kind])
    got = BLOCKS[kind][2](rows).reshape(expected.shape)
    assert np.mean(got != expected) < 0.01  # which divides by the scale before it is rounded


def test_plain_files_give_the_models_own_tokens_and_its_tokenizer(tmp_path: Path) -> None:
    result = write(tmp_path / "demo.gguf", "BF16")
    params = SamplingParams(max_tokens=24, temperature=0.0)
    texts, ids = [], []
    for path in (demo_model_path(), result.out):
        with LLM(path, dtype="float32", num_gpu_blocks_override=128) as llm:
            ids.append(llm.get_tokenizer().encode("Once upon a time, 17 foxes\n\n ran!"))
            chat = [{"role": "user", "content": "Tell me a story."}]
            outputs = llm.generate("Once upon a time", params, use_tqdm=False)
            outputs += llm.chat(chat, params, use_tqdm=False)
            texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[0] == texts[1]
    assert ids[0] == ids[1]
    source, written = (Tokenizer.from_path(path) for path in (demo_model_path(), result.out))
    assert source is not None
    assert written is not None
    assert source.chat_template_source == written.chat_template_source


def test_a_mix_has_its_types_where_llama_cpp_has_them(tmp_path: Path) -> None:
    result = write(tmp_path, "Q4_K_M")
    assert result.out == tmp_path / "model-Q4_K_M.gguf"
    reader = gguf.GGUFReader(result.out)
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types == result.schemes
    assert types["token_embd.weight"] == "Q6_K"  # tied: the head
    assert types["blk.0.attn_q.weight"] == "Q4_K"
    assert types["blk.4.ffn_down.weight"] == types["blk.4.attn_v.weight"] == "Q6_K"
    assert types["blk.1.ffn_down.weight"] == "Q4_K"
    assert types["blk.1.attn_norm.weight"] == "F32"
    with LLM(result.out, num_gpu_blocks_override=128) as llm:
        (output,) = llm.generate(
            "Once upon", SamplingParams(max_tokens=2, temperature=0.0), use_tqdm=False
        )
    assert output.outputs[0].text.startswith(" a")


def test_more_bits_go_to_first_and_last_layers_and_every_third_between() -> None:
    kinds = [
        kind_of(f"blk.{i}.ffn_down.weight", (8, 256), "Q4_K_M", 32, is_tied=False)
        for i in range(32)
    ]
    more = [i for i, kind in enumerate(kinds) if kind == "Q6_K"]
    assert more == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert kind_of("output.weight", (8, 256), "Q4_K_M", 32, is_tied=False) == "Q6_K"
    assert kind_of("token_embd.weight", (8, 256), "Q4_K_M", 32, is_tied=False) == "Q4_K"
    assert kind_of("blk.9.attn_q.weight", (8, 96), "Q4_K_M", 32, is_tied=False) == "Q8_0"
    assert kind_of("blk.9.attn_q.weight", (8, 40), "Q4_K_M", 32, is_tied=False) == "F16"


def test_what_gguf_has_no_place_for_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", "Q8_0")
    with pytest.raises(InvalidArgument, match="exists; pass --overwrite"):
        write(tmp_path / "a.gguf", "Q8_0")
    with pytest.raises(InvalidArgument, match=r"expected one of F16, .* got 'q9'"):
        write(tmp_path / "b.gguf", "q9")
    with pytest.raises(NotSupported, match="leave out group_size"):
        write(tmp_path / "b.gguf", "Q8_0", group_size=32)
    with pytest.raises(NotSupported, match="leave out method=gptq"):
        write(tmp_path / "b.gguf", "Q8_0", method="gptq")
    with pytest.raises(NotSupported, match="gguf is written of LlamaForCausalLM"):
        write(tmp_path / "b.gguf", "Q8_0", checkpoint("gemma2"))
    with pytest.raises(NotSupported, match="way to cut words has a name there"):
        write(tmp_path / "b.gguf", "Q8_0", checkpoint("llama"))
    assert not (tmp_path / "b.gguf").exists()
