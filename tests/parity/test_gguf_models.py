"""A GGUF file gives what the same model's safetensors give, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import checkpoint, copy_checkpoint, tokenizer
from gguf_files import (
    ARCHITECTURES,
    OVERRIDES,
    Quantize,
    add_bpe,
    in_format,
    quantized,
    split_heads,
    write_gguf,
)
from llmserve import LLM, CorruptFile, NotSupported, SamplingParams, _core, _core_testing, cli
from model_runner import PagedRunner
from safetensors.numpy import load_file, save_file
from ticks import tick, ticks

# What each family's files are to the reader, where that is not what they were written from.
READ_AS = {
    "glm4_moe_lite": "DeepseekV3ForCausalLM",
    "mistral": "LlamaForCausalLM",
    "solar_open": "Glm4MoeForCausalLM",
}
SPLIT_LATENTS = [family for family, arch in ARCHITECTURES.items() if arch == "deepseek2"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, OVERRIDES.get(family, {})) for family in ARCHITECTURES},
    "deepseek_v2-greedy": (
        "deepseek_v2",
        {
            **OVERRIDES["deepseek_v2"],
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "exaone4-no-window": (
        "exaone4",
        {"sliding_window": None, "num_hidden_layers": 4, "layer_types": ["full_attention"]},
    ),
    "exaone4-pattern": ("exaone4", {"layer_types": ["full_attention", "sliding_attention"]}),
    "falcon-new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gemma3_text-pattern": (
        "gemma3_text",
        {"query_pre_attn_scalar": 16, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "gpt_bigcode-untied": ("gpt_bigcode", {"tie_word_embeddings": False}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "stablelm-qk-norm": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
}
PROMPTS = [[5, 9, 200, 31, 7], [1, 2, 3], list(range(40, 100))]
PARAMS = SamplingParams(temperature=0, max_tokens=8, logprobs=3, detokenize=False, ignore_eos=True)
# Rows of every block format's length, and biases where the family has them.
WIDE = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=1)


def answers(path: Path, **arguments: Any) -> list[Any]:
    arguments = {"num_gpu_blocks_override": 128, "num_threads": 1, **arguments}
    with LLM(path, **arguments) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [
        (
            list(out.outputs[0].token_ids),
            [{i: lp.logprob for i, lp in step.items()} for step in out.outputs[0].logprobs],
        )
        for out in outputs
    ]


def dequantized_copy(source: Path, to: Path, quantize: Quantize) -> Path:
    """The checkpoint with the values that the gguf package reads back."""
    copy_checkpoint(source, to)
    tensors = {}
    is_gpt2 = architecture(source) == "GPT2LMHeadModel"
    is_gpt_oss = architecture(source) == "GptOssForCausalLM"
    config = json.loads((source / "config.json").read_text())
    for name, array in load_file(source / "model.safetensors").items():
        is_transposed = is_gpt2 and ".h." in name and array.ndim == 2
        is_transposed |= is_gpt_oss and array.ndim == 3
        if ".kv_b_proj." in name and config["model_type"] in SPLIT_LATENTS:
            tensors[name] = dequantized_heads(array, config, quantize)
            continue
        data, qtype = quantize(name, array.swapaxes(-1, -2) if is_transposed else array)
        values = data if qtype is None else gguf.quants.dequantize(data, qtype)
        tensors[name] = np.ascontiguousarray(values.swapaxes(-1, -2) if is_transposed else values)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def dequantized_heads(kv_b: np.ndarray, config: dict[str, Any], quantize: Quantize) -> np.ndarray:
    """What a file has as two tensors, of which one is the other way round."""

    def rounded(array: np.ndarray) -> np.ndarray:
        data, qtype = quantize("kv_b", array)
        return data if qtype is None else gguf.quants.dequantize(data, qtype)

    keys, values = split_heads(kv_b, config)
    keys = rounded(np.ascontiguousarray(keys.swapaxes(1, 2))).swapaxes(1, 2)
    return np.concatenate([keys, rounded(values)], axis=1).reshape(kv_b.shape)


def architecture(path: Path) -> str:
    return str(_core.inspect_checkpoint(str(path))["config"]["architecture"])


@pytest.mark.parametrize("case", CASES)
def test_f32_file_gives_the_tokens_and_logprobs_of_the_safetensors(
    case: str, tmp_path: Path
) -> None:
    family, overrides = CASES[case]
    source = checkpoint(family, **overrides)
    path = write_gguf(tmp_path / "model.gguf", source)
    assert answers(path) == answers(source)
    assert architecture(path) == READ_AS.get(family, architecture(source))
    tick(architecture(source), "cpu/gguf-f32")


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_q8_0_file_gives_what_its_dequantized_weights_give(family: str, tmp_path: Path) -> None:
    wide = {**OVERRIDES.get(family, {}), "hidden_size": 64, "intermediate_size": 96}
    source = checkpoint(family, **wide)
    path = write_gguf(tmp_path / "model.gguf", source, quantized("Q8_0"))
    stored = {t["dtype"] for t in _core.inspect_checkpoint(str(path))["tensors"]}
    assert stored == {"Q8_0", "float32"}
    expected = dequantized_copy(source, tmp_path / "copy", quantized("Q8_0"))
    got = answers(path, dtype="float32", quantization="none")
    assert got == answers(expected, dtype="float32")
    tick(architecture(source), "cpu/gguf-q8_0")


@pytest.mark.parametrize("what", ["cpu/gguf-f32", "cpu/gguf-q8_0"])
def test_every_tick_of_gguf_has_its_test(what: str) -> None:
    shown = {architecture(checkpoint(family)) for family in ARCHITECTURES}
    assert {name for name, all_of in ticks().items() if what in all_of} == shown


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_latents_of_older_files_are_split_when_they_are_read(family: str, tmp_path: Path) -> None:
    source = checkpoint(family, **OVERRIDES[family])
    path = write_gguf(tmp_path / "model.gguf", source, has_whole_kv_b=True)
    assert answers(path) == answers(source)


def test_factor_of_yarn_is_read_as_its_converter_wrote_it(tmp_path: Path) -> None:
    source = checkpoint("youtu", **OVERRIDES["youtu"])
    config = _core.inspect_checkpoint(str(write_gguf(tmp_path / "model.gguf", source)))["config"]
    (rope,) = config["ropes"]
    assert (rope["mscale"], rope["mscale_all_dim"]) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_gating_func", 3, "expert_gating_func: 3 is not supported"),
        ("expert_weights_norm", True, "expert_weights_norm: true beside a softmax"),
    ],
)
def test_experts_of_deepseek2_that_no_family_has_are_refused(
    key: str, value: Any, message: str, tmp_path: Path
) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        kind = gguf.GGUFValueType.BOOL if value is True else gguf.GGUFValueType.UINT32
        writer.kv_data[0][f"deepseek2.{key}"] = gguf.GGUFValue(value, kind)

    path = write_gguf(tmp_path / "model.gguf", checkpoint("deepseek_v2"), extra=extra)
    with pytest.raises(NotSupported, match=message):
        LLM(path)


def test_windows_for_other_layers_than_there_are_are_refused(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_array("gemma2.attention.sliding_window_pattern", [True, False, True])

    path = write_gguf(
        tmp_path / "model.gguf", checkpoint("gemma2", **OVERRIDES["gemma2"]), extra=extra
    )
    with pytest.raises(CorruptFile, match=r"pattern: expected an entry for each of 2 layers, .* 3"):
        LLM(path)


def test_llama3_frequencies_come_from_their_tensor(tmp_path: Path) -> None:
    rope = dict(
        rope_type="llama3",
        rope_theta=10000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )
    source = checkpoint("llama", rope_parameters=rope)
    config = (source / "config.json").read_text()
    ((scaled, _),) = _core_testing.rope_frequencies(config)
    ((plain, _),) = _core_testing.rope_frequencies(config.replace('"llama3"', '"default"'))
    factors = (np.array(plain) / np.array(scaled)).astype(np.float32)
    assert factors.max() > 2
    path = write_gguf(tmp_path / "model.gguf", source, tensors={"rope_freqs.weight": factors})
    for (ours, logprobs), (expected, expected_logprobs) in zip(
        answers(path), answers(source), strict=True
    ):
        assert ours == expected
        for step, expected_step in zip(logprobs, expected_logprobs, strict=True):
            # The quotient is rounded once more than the frequency.
            assert step == pytest.approx(expected_step, abs=1e-4)


@pytest.mark.parametrize(
    "metadata",
    [
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope.scaling.factor": 4.0},  # linear, as llama.cpp takes it
        {"rope.scale_linear": 4.0},  # of old files
    ],
)
def test_linear_scaling_is_found_however_it_is_written(
    metadata: dict[str, Any], tmp_path: Path
) -> None:
    rope = dict(rope_type="linear", rope_theta=10000.0, factor=4.0)
    source = checkpoint("llama", rope_parameters=rope)
    path = write_gguf(tmp_path / "model.gguf", source, extra=with_metadata(metadata))
    assert answers(path) == answers(source)


@pytest.mark.parametrize(
    "metadata", [{"rope.scaling.factor": 0.0}, {"rope.scaling.type": "none"}, {}]
)
def test_no_scaling_is_none(metadata: dict[str, Any], tmp_path: Path) -> None:
    source = checkpoint("llama")
    path = write_gguf(tmp_path / "model.gguf", source, extra=with_metadata(metadata))
    assert answers(path) == answers(source)


def with_metadata(metadata: dict[str, Any]) -> Callable[[gguf.GGUFWriter], None]:
    """Adds metadata of llama's, or takes it out where the value is None."""

    def extra(writer: gguf.GGUFWriter) -> None:
        for name, value in metadata.items():
            key = f"llama.{name}"
            writer.kv_data[0].pop(key, None)
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            elif value is not None:
                writer.add_array(key, value)

    return extra


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({"expert_count": 8}, NotSupported, "llama.expert_count: experts are not supported"),
        ({"attention.causal": False}, NotSupported, "llama.attention.causal: attention to later"),
        ({"context_length": None}, CorruptFile, "llama.context_length: is absent"),
        (
            {"attention.layer_norm_rms_epsilon": None},
            CorruptFile,
            "llama.attention.layer_norm_rms_epsilon: is absent",
        ),
        (
            {"attention.head_count": [4]},
            CorruptFile,
            "llama.attention.head_count: expected an entry for each of 2 layers, got 1",
        ),
        (
            {"block_count": 1},
            NotSupported,
            r'tensor "model\.layers\.1.+" and \d+ others: no layer of this model uses them',
        ),
    ],
)
def test_metadata_of_another_model_is_refused(
    metadata: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "model.gguf", checkpoint("llama"), extra=with_metadata(metadata))
    with pytest.raises(error, match=message):
        LLM.plan(path)
    with pytest.raises(error, match=message):
        LLM(path)


@pytest.mark.parametrize(
    "name", ["blk.1.attn_q.bias", "blk.0.attn_q_norm.weight", "output.bias", "foo.bar"]
)
def test_a_tensor_that_nothing_uses_is_refused(name: str, tmp_path: Path) -> None:
    extra = {name: np.ones(64, np.float32)}
    path = write_gguf(tmp_path / "model.gguf", checkpoint("llama"), tensors=extra)
    with pytest.raises(NotSupported, match="no layer of this model uses it"):
        LLM(path)


def test_rotary_factors_beside_a_scale_are_refused(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "model.gguf",
        checkpoint("llama"),
        extra=with_metadata({"rope.scaling.factor": 4.0}),
        tensors={"rope_freqs.weight": np.ones(8, np.float32)},
    )
    with pytest.raises(NotSupported, match=r"rope.scaling.factor: a factor beside the tensor"):
        LLM(path)


ON_INTEGERS = [name for name, *_ in _core_testing.kept_formats()]


@pytest.mark.parametrize("kind", ["F16", "BF16", *ON_INTEGERS])
def test_quantized_file_gives_what_its_dequantized_weights_give(kind: str, tmp_path: Path) -> None:
    source = checkpoint("qwen2", **WIDE)
    path = write_gguf(tmp_path / "model.gguf", source, in_format(kind))
    expected = dequantized_copy(source, tmp_path / "copy", in_format(kind))
    got = answers(path, dtype="float32", quantization="none")
    assert got == answers(expected, dtype="float32")


# A scale is rounded to f16 where it is a product (2^-11), activations to 1 in 127 of a group's
# largest: 0.29 of a step is 0.2% of the largest and below 1% of a typical activation. A layer and
# the head carry it to the logits, of which the worst of 40 * 320 is five deviations.
BLOCKS_TOLERANCE = 0.15


def blocks_file(kind: str, path: Path) -> Path:
    return write_gguf(path, checkpoint("llama", **WIDE), in_format(kind))


@pytest.mark.parametrize("kind", ON_INTEGERS)
def test_blocks_run_as_they_are_close_to_their_values(kind: str, tmp_path: Path) -> None:
    """And with the bits of ref, whose attention alone differs in its last bits."""
    path = blocks_file(kind, tmp_path / "model.gguf")
    tokens = list(range(5, 45))
    values, *got = (
        PagedRunner(path, device=device, dtype="float32", quantization=quantization).run(tokens)
        for device, quantization in (("cpu", "none"), ("cpu", ""), ("ref", ""))
    )
    assert np.abs(got[0] - values).max() < BLOCKS_TOLERANCE * np.abs(values).std() * 3
    # An activation now and then is rounded the other way; the typical logit does not feel it.
    assert np.median(np.abs(got[0] - got[1])) < 0.1 * np.median(np.abs(got[0] - values))
    assert not np.array_equal(got[0], values)


@pytest.mark.parametrize(
    "kind", ["Q8_0", "Q4_0", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4", "TQ1_0"]
)
def test_plan_of_blocks_that_run_as_they_are_is_exact_and_small(kind: str, tmp_path: Path) -> None:
    path = blocks_file(kind, tmp_path / "model.gguf")
    arguments: dict[str, Any] = {"num_gpu_blocks_override": 32, "max_model_len": 64}
    plan = LLM.plan(path, **arguments)
    assert plan.integers
    assert plan.weight_bytes < LLM.plan(path, quantization="none", **arguments).weight_bytes
    with LLM(path, **arguments) as llm:
        use = llm._open_engine().memory_use
    assert (plan.weight_bytes, plan.workspace_bytes) == (use.weight_bytes, use.workspace_bytes)


def test_mixed_blocks_run_side_by_side(tmp_path: Path) -> None:
    """As Q4_K_M has them: values in another format than queries and keys."""
    kinds = {"v_proj": "Q6_K", "q_proj": "Q4_K", "k_proj": "Q4_K", "up_proj": "Q2_K"}

    def quantize(name: str, array: np.ndarray) -> tuple[np.ndarray, Any]:
        kind = next((kind for part, kind in kinds.items() if part in name), "Q8_0")
        return in_format(kind)(name, array)

    path = write_gguf(tmp_path / "model.gguf", checkpoint("qwen2", **WIDE), quantize)
    assert LLM.plan(path).integers == ("Q4_K", "Q6_K", "Q8_0", "Q2_K")
    tokens = list(range(5, 45))
    values, got = (
        PagedRunner(path, device="cpu", dtype="float32", quantization=name).run(tokens)
        for name in ("none", "")
    )
    assert np.abs(got - values).max() < BLOCKS_TOLERANCE * np.abs(values).std() * 3


def test_blocks_with_a_scale_that_is_not_finite_are_refused(tmp_path: Path) -> None:
    def quantize(name: str, array: np.ndarray) -> tuple[np.ndarray, Any]:
        data, qtype = quantized("Q8_0")(name, array)
        if "down_proj" in name:
            data = data.copy()
            data[7, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
        return data, qtype

    path = write_gguf(tmp_path / "model.gguf", checkpoint("llama", **WIDE), quantize)
    with pytest.raises(CorruptFile, match=r"down_proj.weight\": element 1792 of .* is "):
        LLM(path, num_gpu_blocks_override=32)


@pytest.mark.parametrize("kind", ["Q6_K", "MXFP4"])
def test_the_embedding_of_blocks_stays_in_the_file(kind: str, tmp_path: Path) -> None:
    source = checkpoint("llama", **WIDE)
    path = write_gguf(tmp_path / "model.gguf", source, in_format(kind))
    (num_bytes,) = (
        tensor["num_bytes"]
        for tensor in _core.inspect_checkpoint(str(path))["tensors"]
        if tensor["name"] == "model.embed_tokens.weight"
    )
    for quantization in (None, "none", "int8"):
        plan = LLM.plan(path, num_gpu_blocks_override=32, quantization=quantization)
        assert plan.weights[0].name == "embedding"
        assert plan.weights[0].num_bytes == plan.mapped_bytes == num_bytes
        assert plan.weights[1].num_bytes > 0


def test_powers_of_two_that_make_values_infinite_are_refused(tmp_path: Path) -> None:
    def quantize(name: str, array: np.ndarray) -> tuple[np.ndarray, Any]:
        data, qtype = quantized("MXFP4")(name, array)
        if "down_proj" in name:
            data = data.copy()
            data[5, :17] = [253, *[0x11] * 16]  # values of 0.5 and 2^126
            data[7, :17] = [253, 0x11, 0x71, *[0x11] * 14]  # and one of 6
        return data, qtype

    path = write_gguf(tmp_path / "model.gguf", checkpoint("llama", **WIDE), quantize)
    with pytest.raises(CorruptFile, match=r"down_proj.weight\": element 1809 of .* is "):
        LLM(path, num_gpu_blocks_override=32)


def test_an_embedding_with_a_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    def quantize(name: str, array: np.ndarray) -> tuple[np.ndarray, Any]:
        data, qtype = quantized("Q8_0")(name, array)
        if "embed_tokens" in name:
            data = data.copy()
            for row, half in ((310, np.inf), (7, np.nan), (300, np.inf)):
                data[row, 34:36] = np.frombuffer(np.float16(half).tobytes(), np.uint8)
        return data, qtype

    path = write_gguf(tmp_path / "model.gguf", checkpoint("llama", **WIDE), quantize)
    with pytest.raises(CorruptFile, match=r"embed_tokens.weight\": element 1824 of .* is NaN"):
        LLM(path, num_gpu_blocks_override=32, num_threads=2)


def test_threads_and_device_do_not_change_what_is_loaded(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", checkpoint("llama", **WIDE), quantized("Q8_0"))
    assert answers(path, num_threads=1) == answers(path, num_threads=3)


def test_auto_dtype_of_a_quantized_file_is_bfloat16(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", checkpoint("llama", **WIDE), quantized("Q4_0"))
    assert LLM.plan(path).dtype == "bfloat16"
    types = {t["name"]: t["dtype"] for t in _core.inspect_checkpoint(str(path))["tensors"]}
    assert types["model.layers.0.mlp.up_proj.weight"] == "Q4_0"
    assert types["model.norm.weight"] == "float32"


def test_plan_of_a_quantized_file_is_what_the_engine_takes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", checkpoint("qwen3", **WIDE), quantized("Q5_1"))
    plan = LLM.plan(path, num_gpu_blocks_override=32, max_model_len=64)
    with LLM(path, num_gpu_blocks_override=32, max_model_len=64) as llm:
        use = llm._open_engine().memory_use
    assert plan.weight_bytes == use.weight_bytes
    assert plan.kv_cache_bytes == use.kv_cache_bytes


def test_tied_embeddings_are_told_by_the_missing_output(tmp_path: Path) -> None:
    source = checkpoint("llama", tie_word_embeddings=True)
    path = write_gguf(tmp_path / "model.gguf", source)
    assert _core.inspect_checkpoint(str(path))["config"]["tie_word_embeddings"]
    assert answers(path) == answers(source)


def test_biases_are_told_by_their_tensors(tmp_path: Path) -> None:
    source = checkpoint("llama", attention_bias=True, mlp_bias=True)
    assert answers(write_gguf(tmp_path / "model.gguf", source)) == answers(source)


def test_folder_with_one_gguf_file_is_a_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", checkpoint("llama"))
    assert answers(tmp_path) == answers(path)


def with_tokenizer(writer: gguf.GGUFWriter) -> None:
    """That of every tiny checkpoint."""
    add_bpe(writer, tokenizer().backend_tokenizer, "gpt-2")
    writer.add_chat_template(tokenizer().chat_template)
    writer.add_float32("general.sampling.temp", 0.5)


def test_one_file_is_all_that_a_text_or_a_chat_needs(tmp_path: Path) -> None:
    source = checkpoint("llama")
    path = write_gguf(tmp_path / "model.gguf", source, extra=with_tokenizer)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    messages = [{"role": "user", "content": "What is 12 + 30?"}]
    said = []
    for model in (source, path):
        with LLM(model, num_gpu_blocks_override=64, num_threads=1) as llm:
            text = llm.generate("Once upon a time", greedy, use_tqdm=False)[0]
            chat = llm.chat(messages, greedy, use_tqdm=False)[0]
            said.append([(out.prompt_token_ids, out.outputs[0].text) for out in (text, chat)])
            temperature = llm.get_default_sampling_params().temperature
    assert said[0] == said[1]
    assert temperature == 0.5


def test_inspect_shows_the_tokenizer_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_gguf(tmp_path / "model.gguf", checkpoint("llama"), extra=with_tokenizer)
    assert cli.main(["inspect", str(path), "--tensors"]) == 0
    shown = capsys.readouterr().out
    assert "LlamaForCausalLM, gguf" in shown
    assert "BPE, decoder ByteLevel, 320 tokens" in shown
    assert "temperature=0.5" in shown
    assert "ends at        '</s>'" in shown


def test_split_file_is_loaded_by_its_first_part(tmp_path: Path) -> None:
    source = checkpoint("llama")
    whole = write_gguf(tmp_path / "model.gguf", source)
    split_gguf(whole, tmp_path / "parts")
    first = tmp_path / "parts" / "model-00001-of-00002.gguf"
    assert answers(first) == answers(tmp_path / "parts") == answers(source)


def split_gguf(whole: Path, to: Path) -> None:
    to.mkdir()
    reader = gguf.GGUFReader(whole)
    half = len(reader.tensors) // 2
    for idx, tensors in enumerate((reader.tensors[:half], reader.tensors[half:])):
        writer = gguf.GGUFWriter(to / f"model-{idx + 1:05}-of-00002.gguf", "llama")
        for field in reader.fields.values():
            if (
                idx == 0
                and "." in field.name
                and not field.name.startswith(("GGUF", "general.arc"))
            ):
                writer.add_key_value(field.name, field.contents(), field.types[0])
        writer.add_uint16("split.count", 2)
        writer.add_uint16("split.no", idx)
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
