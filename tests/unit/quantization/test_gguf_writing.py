"""GGUF files that quantize writes: blocks against the gguf package, models against their source."""

from __future__ import annotations

import json
import shutil
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
from llmserve.tokenization.tokenizer_files import read_tokenizer

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
    with pytest.raises(NotSupported, match="and of SentencePiece; this one is neither"):
        write(tmp_path / "b.gguf", "Q8_0", checkpoint("llama"))
    assert not (tmp_path / "b.gguf").exists()


CORPUS = [
    "Once upon a time there was a fox. It isn't 12345 or 3.14, we'll see: naïve café.",
    "  two  spaces,\n\nnew lines\tand tabs 中文字符 русский текст",
    "the quick brown fox jumps over the lazy dog — and the dog sleeps on",
]
TEXTS = [
    *CORPUS, "", " ", " a  b   c    d", "<tool>fox</tool> 😀 ⅷ", "<s> there</s> x", "x" * 40,
]  # fmt: skip


def sentencepiece_model(folder: Path, **options: Any) -> Path:
    """A Llama with a vocabulary trained by the sentencepiece package, in bfloat16."""
    import io

    import sentencepiece

    data = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20), model_writer=data, vocab_size=400, model_type="bpe",
        byte_fallback=True, character_coverage=0.98, normalization_rule_name="identity",
        remove_extra_whitespaces=False, user_defined_symbols=["<tool>", "  "], minloglevel=2,
        **options,
    )  # fmt: skip
    shutil.copytree(checkpoint("llama", vocab_size=404, dtype="bfloat16"), folder)
    for path in folder.glob("*token*"):
        path.unlink()
    (folder / "tokenizer.model").write_bytes(data.getvalue())
    return folder


def first_tokens(path: Path, prompt: str) -> list[int]:
    with LLM(path, dtype="float32", num_gpu_blocks_override=32) as llm:
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("form", ["tokenizer.model", "tokenizer.json"])
def test_sentencepiece_vocabularies_give_the_same_ids(form: str, tmp_path: Path) -> None:
    model = sentencepiece_model(tmp_path / "model")
    source = Tokenizer.from_path(model)
    assert source is not None
    if form == "tokenizer.json":
        document = read_tokenizer(model / "tokenizer.model").to_str()
        (model / "tokenizer.json").write_text(document, encoding="utf-8")
        (model / "tokenizer.model").unlink()
    result = write(tmp_path / "a.gguf", "BF16", model)
    written = Tokenizer.from_path(result.out)
    assert written is not None
    for text in TEXTS:
        assert written.encode(text) == source.encode(text), text
        assert written.decode(source.encode(text)) == source.decode(source.encode(text)), text
    fields = gguf.GGUFReader(result.out).fields
    names = {key: fields[f"tokenizer.ggml.{key}"].contents() for key in ("model", "pre")}
    assert names == {"model": "llama", "pre": "default"}
    types = fields["tokenizer.ggml.token_type"].contents()
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = {token: gguf.TokenType(kind).name for token, kind in zip(tokens, types, strict=True)}
    assert kinds["<0x0A>"] == "BYTE"
    assert kinds["<unk>"] == "UNKNOWN"
    assert kinds["<s>"] == kinds["</s>"] == "CONTROL"
    assert kinds["<tool>"] == kinds["▁▁"] == "USER_DEFINED"
    assert kinds["[PAD401]"] == "UNUSED"
    assert fields["tokenizer.ggml.add_bos_token"].contents() is True
    assert first_tokens(result.out, "Once upon") == first_tokens(model, "Once upon")


def test_pairs_that_are_no_order_of_pieces_are_refused(tmp_path: Path) -> None:
    model = sentencepiece_model(tmp_path / "model")
    document = json.loads(read_tokenizer(model / "tokenizer.model").to_str())
    merges = document["model"]["merges"]
    document["model"]["merges"] = [merges[1], merges[0], *merges[2:]]
    (model / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    write(tmp_path / "a.gguf", "F16", model)  # another order, which scores can have
    document["model"]["merges"] = merges[1:]
    (model / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(NotSupported, match="no order of its pieces"):
        write(tmp_path / "b.gguf", "F16", model)


def test_llama_3_s_frequencies_are_a_tensor(tmp_path: Path) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    }  # fmt: skip
    model = tmp_path / "model"
    shutil.copytree(
        checkpoint("llama", vocab_size=2048, dtype="bfloat16", rope_parameters=rope, head_dim=16),
        model,
    )
    shutil.copy(demo_model_path() / "tokenizer.json", model)
    result = write(tmp_path / "a.gguf", "BF16", model)
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(result.out).tensors}
    config = transformers.AutoConfig.from_pretrained(model)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500.0 ** (-np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(plain / tensors["rope_freqs.weight"], scaled.numpy(), rtol=1e-6)
    assert tensors["rope_freqs.weight"].max() == 4
    prompt = "Once upon a time there was a fox, and it asked the owl for the way to the river."
    assert first_tokens(result.out, prompt) == first_tokens(model, prompt)
