"""Checkpoints that were quantized elsewhere: what they stand for, and what llmserve makes of them.

Each layout is written by tests/quantized_files.py beside a twin in float32 that holds the very
numbers. Expanded at load, both give the same bits.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantized_files as files
from checkpoints import VOCAB_SIZE, checkpoint
from llmserve import LLM, SamplingParams, _core
from llmserve.errors import CorruptFile, LLMServeError, NotSupported
from model_runner import PagedRunner
from quantized_files import Layout, write_pair

# Sides that differ from each other and are no powers of two, rows that are no multiple of 128.
SIZES = {"hidden_size": 96, "intermediate_size": 160, "num_key_value_heads": 2, "head_dim": 16}
# Of blocks of 64 that do not go across rows.
EVEN_SIZES = {**SIZES, "hidden_size": 128, "intermediate_size": 192}
TOKENS = np.random.default_rng(0).integers(3, VOCAB_SIZE, 24).tolist()

LAYOUTS: dict[str, Layout] = {
    "gptq-2": files.gptq(2),
    "gptq-3": files.gptq(3),
    "gptq-4": files.gptq(4),
    "gptq-8": files.gptq(8),
    "gptq-4-row": files.gptq(4, -1),
    "gptq-4-asym-v1": files.gptq(4, symmetric=False, extreme_zeros=True),
    "gptq-4-asym-v2": files.gptq(4, symmetric=False, extreme_zeros=True, v2=True),
    "gptq-3-asym": files.gptq(3, symmetric=False),
    "gptq-2-asym-v2": files.gptq(2, 16, symmetric=False, v2=True),
    "gptq-8-asym": files.gptq(8, symmetric=False),
    "gptq-4-act-order": files.gptq(4, shuffled=True),
    "gptq-4-asym-act-order": files.gptq(4, symmetric=False, shuffled=True),
    "auto-round": Layout(
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "bits": 4,
            "group_size": 32,
            "sym": False,
        },
        files.gptq(4, symmetric=False).write,
    ),
    "auto-round-awq": Layout(
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_awq",
            "bits": 4,
            "group_size": 32,
            "sym": False,
        },
        files.awq().write,
    ),
    "awq-gemm": files.awq(),
    "awq-gemv": files.awq(version="gemv"),
    **{f"ct-packed-{bits}": files.packed(bits) for bits in (2, 3, 4, 5, 6, 7, 8)},
    **{f"ct-packed-{bits}-asym": files.packed(bits, symmetric=False) for bits in (3, 4, 8)},
    **{f"ct-padded-{bits}": files.packed(bits, padded=True) for bits in (3, 5, 6, 7)},
    "ct-padded-3-asym": files.packed(3, symmetric=False, padded=True),
    "ct-packed-4-row": files.packed(4, None),
    "ct-packed-4-f32": files.packed(4, dtype="float32"),
    "ct-packed-4-act-order": files.packed(4, shuffled=True),
    "ct-w8a8": files.int_quantized(),
    "ct-w8a8-asym": files.int_quantized(symmetric=False),
    "ct-w4a8": files.int_quantized(4, 32),
    "ct-fp8-row": files.float_quantized(strategy="channel"),
    "ct-fp8-block": files.float_quantized(strategy="block", block_structure=[128, 128]),
    "ct-nvfp4": files.nvfp4(),
    "ct-mxfp4": files.mxfp4(),
    "fp8-tensor": files.fp8(scale="weight_scale"),
    "fp8-row": files.fp8(per_row=True, scale="weight_scale"),
    "fp8-block": files.fp8((128, 128)),
    "fp8-block-e8m0": files.fp8((128, 128), exponents=True),
    "modelopt-fp8": files.fp8(
        scale="weight_scale", config={"quant_method": "modelopt", "quant_algo": "FP8"}
    ),
    "modelopt-nvfp4": files.nvfp4(modelopt=True),
    "modelopt-awq": files.modelopt_awq(),
    "bnb-nf4": files.bitsandbytes_4bit(),
    "bnb-nf4-double": files.bitsandbytes_4bit(double=True),
    "bnb-fp4": files.bitsandbytes_4bit(table=files.FP4, name="fp4"),
    "bnb-int8": files.bitsandbytes_int8(),
}


EVEN = {"bnb-nf4-double", "bnb-fp4"}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(quantized, twin) by the name of the layout."""
    made: dict[str, tuple[Path, Path]] = {}

    def pair(name: str) -> tuple[Path, Path]:
        if name not in made:
            sizes = EVEN_SIZES if name in EVEN else SIZES
            source = checkpoint("qwen2", **sizes)
            made[name] = write_pair(source, tmp_path_factory.mktemp(name), LAYOUTS[name])
        return made[name]

    return pair


def logits(path: Path, **options: Any) -> np.ndarray:
    return PagedRunner(path, **{"device": "cpu", "dtype": "float32", **options}).run(TOKENS)


def drawn(path: Path, num_ranks: int, cut: str = "columns") -> list[object]:
    """Tokens and log-probabilities of a model that is cut among ranks."""
    params = SamplingParams(
        max_tokens=6, ignore_eos=True, temperature=0.8, seed=1, logprobs=2, prompt_logprobs=0
    )
    with LLM(
        path,
        tensor_parallel_size=num_ranks,
        tensor_parallel_cut=cut,
        max_model_len=64,
        num_gpu_blocks_override=16,
    ) as llm:
        (output,) = llm.generate({"prompt_token_ids": TOKENS}, params, use_tqdm=False)
        rows = output.prompt_logprobs or []
        prompt = [row[token].logprob for token, row in zip(TOKENS[1:], rows[1:], strict=True)]
        return [output.outputs[0].token_ids, output.outputs[0].logprobs, prompt]


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_change_no_bit(pairs: Any, name: str) -> None:
    quantized, _ = pairs(name)
    assert drawn(quantized, 3) == drawn(quantized, 1)


# docs/ranks.md: of weights with one scale a row each rank's part of an activation has its own.
ROW_TOLERANCE, GROUP_TOLERANCE = 5e-1, 5e-2


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_that_cut_along_k_have_whole_groups(pairs: Any, name: str) -> None:
    quantized, _ = pairs(name)
    tree = drawn(quantized, 1, "tree")
    assert drawn(quantized, 3, "tree") == tree
    one = np.array(drawn(quantized, 1)[2])
    tolerance = ROW_TOLERANCE if name.endswith("row") or "w8a8" in name else GROUP_TOLERANCE
    for got in (drawn(quantized, 2, "rows"), tree):
        np.testing.assert_allclose(np.array(got[2]), one, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", LAYOUTS)
def test_expanded_weights_are_the_numbers_that_the_file_stands_for(pairs: Any, name: str) -> None:
    quantized, twin = pairs(name)
    assert np.array_equal(logits(quantized, quantization="none"), logits(twin))


def generate(path: Path, **options: Any) -> list[int]:
    from llmserve import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    options = {"num_gpu_blocks_override": 16, "num_threads": 1, "max_model_len": 64, **options}
    with LLM(path, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": TOKENS}], params, use_tqdm=False)
    return list(outputs[0].outputs[0].token_ids)


def edit(directory: Path, change: Any) -> None:
    """Changes the tensors of a folder in place."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()},
        directory / "model.safetensors",
    )


def edit_quantization(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {**config["quantization_config"], **fields}
    path.write_text(json.dumps(config))


@pytest.fixture
def damaged(pairs: Any, tmp_path: Path) -> Any:
    """A copy of a layout's quantized folder that a test may change."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(pairs(name)[0], tmp_path / name))

    return copy


ORACLE_CASES = [name for name in LAYOUTS if name.startswith("ct-") and "padded" not in name]


@pytest.mark.parametrize("name", [name for name in ORACLE_CASES if "act-order" not in name])
def test_the_twins_of_compressed_tensors_are_what_its_library_makes(name: str) -> None:
    torch = pytest.importorskip("torch")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationScheme

    layout = LAYOUTS[name]
    rng = np.random.default_rng(1)
    tensors, values = layout.write(rng.standard_normal((96, 160)).astype(np.float32), rng)
    group = layout.config["config_groups"]["group_0"]
    scheme = QuantizationScheme(targets=["Linear"], weights=group["weights"])
    stored = {key: files.as_torch(tensor) for key, tensor in tensors.items()}
    if "weight_packed" in stored and stored["weight_packed"].dtype == torch.int32:
        stored["weight_scale"] = stored["weight_scale"].float()
    compressor = compressors.BaseCompressor.get_value_from_registry(layout.config["format"])
    made = compressor.decompress(stored, scheme)["weight"].float().numpy()
    # The library multiplies FP4 and FP8 in bfloat16.
    error = 0 if scheme.weights.type == "int" else 2**-7
    assert np.abs(made - values).max() <= error * np.abs(values).max()


@pytest.mark.parametrize("name", ["gptq-4", "ct-w8a8", "fp8-block", "bnb-nf4"])
def test_a_quantized_model_can_be_rounded_anew(pairs: Any, name: str) -> None:
    quantized, twin = pairs(name)
    again = logits(quantized, quantization="int8")
    assert np.array_equal(again, logits(twin, quantization="int8"))


@pytest.mark.parametrize(
    ("method", "file"),
    [("gptq", "quantize_config.json"), ("awq", "quant_config.json")],
)
def test_older_files_of_the_configuration_are_read(method: str, file: str, tmp_path: Path) -> None:
    layout = files.gptq() if method == "gptq" else files.awq()
    fields = {key: value for key, value in layout.config.items() if key != "quant_method"}
    if method == "awq":
        fields = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    quantized, twin = write_pair(
        checkpoint("qwen2", **SIZES), tmp_path, Layout(fields, layout.write), config_file=file
    )
    assert np.array_equal(logits(quantized, quantization="none"), logits(twin))


def test_modelopts_own_file_is_read(tmp_path: Path) -> None:
    layout = files.nvfp4(modelopt=True)
    config = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    quantized, twin = write_pair(
        checkpoint("qwen2", **SIZES),
        tmp_path,
        Layout(config, layout.write),
        config_file="hf_quant_config.json",
    )
    assert np.array_equal(logits(quantized, quantization="none"), logits(twin))


def test_modules_may_have_parameters_of_their_own(tmp_path: Path) -> None:
    source = checkpoint("qwen2", **SIZES)
    wide, narrow = files.gptq(8, 16), files.gptq(4, 32)
    dynamic = {"+:.*\\.(q|k|v)_proj": {"bits": 8, "group_size": 16}, "-:.*down_proj$": {}}
    write_pair(
        source,
        tmp_path / "a",
        wide,
        quantizes=lambda name: name.endswith(("q_proj", "k_proj", "v_proj")),
    )
    from safetensors.torch import load_file, save_file

    quantized, twin = write_pair(
        source,
        tmp_path / "b",
        Layout({**narrow.config, "dynamic": dynamic}, narrow.write),
        quantizes=lambda name: name.endswith(("o_proj", "gate_proj", "up_proj")),
    )
    for kind, folder in (("quantized", quantized), ("twin", twin)):
        tensors = load_file(folder / "model.safetensors")
        others = load_file(tmp_path / "a" / kind / "model.safetensors")
        taken = ("q_proj.", "k_proj.", "v_proj.")
        for name in [name for name in tensors if any(part in name for part in taken)]:
            if not name.endswith("bias"):
                del tensors[name]
        tensors |= {name: t for name, t in others.items() if any(part in name for part in taken)}
        save_file(tensors, folder / "model.safetensors")
    assert np.array_equal(logits(quantized, quantization="none"), logits(twin))


def test_groups_of_modules_name_them_by_patterns(tmp_path: Path) -> None:
    layout = files.packed(4)
    groups = {
        "a": {"targets": ["re:.*(q|k|v|o)_proj$"], "weights": {"num_bits": 4, "group_size": 32}},
        "b": {
            "targets": ["re:model[.]layers[.]\\d+[.]mlp[.].*"],
            "weights": {"num_bits": 4, "group_size": 32},
        },
    }
    config = {**layout.config, "config_groups": groups, "ignore": ["re:.*(?!lm_head)"]}
    quantized, twin = write_pair(
        checkpoint("qwen2", **SIZES), tmp_path, Layout(config, layout.write)
    )
    assert np.array_equal(logits(quantized, quantization="none"), logits(twin))


def test_a_fused_matrix_is_read_by_its_own_name(tmp_path: Path) -> None:
    source = checkpoint("phi3", hidden_size=96, intermediate_size=160)
    quantized, twin = write_pair(source, tmp_path, files.gptq(4, 32, shuffled=True))
    assert np.array_equal(logits(quantized, quantization="none"), logits(twin))


def test_matrices_that_are_stored_the_other_way_round_are_packed_alike(tmp_path: Path) -> None:
    source = checkpoint("gpt2", hidden_size=96, intermediate_size=160)
    layout = files.gptq(4, 32)

    def write(weight: np.ndarray, rng: np.random.Generator) -> Any:
        tensors, values = layout.write(np.ascontiguousarray(weight.T), rng)
        return tensors, values.T

    quantized, twin = write_pair(
        source,
        tmp_path,
        Layout(layout.config, write),
        quantizes=lambda name: "attn.c_" in name or "mlp.c_" in name,
    )
    assert np.array_equal(logits(quantized, quantization="none"), logits(twin))


def test_a_tied_head_may_be_quantized(tmp_path: Path) -> None:
    layout = files.gptq(4, 32)
    source = checkpoint("llama", **{**SIZES, "tie_word_embeddings": False})
    quantized, twin = write_pair(
        source,
        tmp_path,
        Layout({**layout.config, "lm_head": True}, layout.write),
        quantizes=lambda name: "proj" in name or name == "lm_head",
    )
    path = quantized / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    assert np.array_equal(logits(quantized, quantization="none"), logits(twin))


def test_a_tensor_that_nothing_uses_is_refused(damaged: Any) -> None:
    import torch

    directory = damaged("gptq-4")
    edit(
        directory, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.odd": torch.ones(2)})
    )
    with pytest.raises(NotSupported, match=r"up_proj\.odd"):
        LLM(directory, num_gpu_blocks_override=16)


def test_scales_of_keys_and_activations_are_told(damaged: Any) -> None:
    import torch

    directory = damaged("ct-w8a8")
    scale = {"model.layers.0.self_attn.k_scale": torch.tensor([4.0])}
    edit(directory, lambda tensors: tensors.update(scale))
    notes = LLM.plan(directory).notes
    assert any("scales of keys and values" in note for note in notes)
    assert any("scales of activations" in note for note in notes)
    with LLM(directory, num_gpu_blocks_override=16) as llm:
        assert "scales of keys and values" in llm._open_engine().warning


def test_the_packed_cache_tells_readings_apart(
    damaged: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = damaged("gptq-4-asym-v1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = {"packed_cache_bytes": 1 << 30}
    first = generate(directory, **options)
    edit_quantization(directory, checkpoint_format="gptq_v2")
    second = generate(directory, **options)
    assert second == generate(directory)
    assert second != first
    edit_quantization(directory, checkpoint_format="gptq")
    assert generate(directory, **options) == first


@pytest.mark.parametrize(
    "name",
    ["gptq-4-asym-act-order", "awq-gemm", "ct-w4a8", "fp8-block", "bnb-nf4-double", "bnb-int8"],
)
def test_a_plan_is_what_the_engine_takes(pairs: Any, name: str) -> None:
    options: dict[str, Any] = {"num_threads": 1, "num_gpu_blocks_override": 16, "max_model_len": 64}
    plan = LLM.plan(pairs(name)[0], **options)
    with LLM(pairs(name)[0], **options) as llm:
        use = llm._open_engine().memory_use
        assert (use.weight_bytes, use.workspace_bytes) == (plan.weight_bytes, plan.workspace_bytes)
        assert plan.quantized
        assert all(row.stored in llm.description for row in plan.quantized)


@pytest.mark.parametrize("name", ["gptq-4", "awq-gemm", "ct-packed-4", "ct-nvfp4", "fp8-block"])
def test_a_plan_of_the_configuration_alone_is_that_of_the_files(pairs: Any, name: str) -> None:
    directory = pairs(name)[0]
    options = {"dtype": "bfloat16"}
    whole = _core.inspect_checkpoint(str(directory), **options)["plan"]
    request = _core.ConfigRequest(model=str(directory / "config.json"), dtype="bfloat16")
    alone = _core.plan_memory(request).weights
    for group in ("attention", "mlp", "lm_head"):
        assert alone["group_bytes"][group] == whole["group_bytes"][group]


# What is done to a good file, and what the error says.
DAMAGES: list[tuple[str, str, Any, str]] = [
    ("gptq-4", "g_idx", lambda t: t.fill_(77), r"expected a group in \[0, 3\), got 77"),
    ("gptq-4", "g_idx", lambda t: t[:-1], r"expected int32 \[96\]"),
    ("gptq-4", "qweight", lambda t: t[:, :-1], r"expected int32 \[12, 64\]"),
    ("gptq-4", "qweight", lambda t: t.float(), "expected int32"),
    ("gptq-4", "scales", lambda t: t.fill_(float("nan")), "NaN"),
    ("gptq-4", "scales", None, "absent"),
    ("gptq-4-asym-v1", "qzeros", lambda t: t[:1], "qzeros"),
    ("awq-gemm", "qzeros", None, "absent"),
    ("awq-gemv", "qzeros", lambda t: t[:, :0], "expected room for 3 groups"),
    ("ct-packed-4", "weight_packed", lambda t: t[:, 1:], "expected rows of 12 words"),
    ("ct-packed-4", "weight_shape", lambda t: t + 1, r"expected \[64, 96\]"),
    ("ct-packed-4", "weight_scale", lambda t: t[:, :2], "expected one scale, or 3 for each"),
    ("ct-w8a8", "weight_scale", lambda t: t.fill_(float("inf")), "infinite"),
    ("ct-nvfp4", "weight_global_scale", lambda t: t.fill_(0), "NaN|infinite"),
    ("ct-nvfp4", "weight_scale", lambda t: t.float(), "uint8"),
    ("ct-mxfp4", "weight_scale", lambda t: t.fill_(255), "NaN"),
    ("fp8-block", "weight_scale_inv", lambda t: t.reshape(-1)[:0], "float32"),
    ("fp8-tensor", "weight", lambda t: t.float().fill_(float("nan")).to(t.dtype), "NaN"),
    ("bnb-nf4", "weight.absmax", lambda t: t[1:], "expected 96 of float32"),
    ("bnb-nf4-double", "weight.nested_absmax", lambda t: t[:0], "expected 1 of float32"),
    ("bnb-int8", "weight_format", lambda t: t + 3, "expected 0, rows"),
]


@pytest.mark.parametrize(("name", "suffix", "change", "message"), DAMAGES)
def test_what_does_not_fit_is_told_with_its_tensor(
    damaged: Any, name: str, suffix: str, change: Any, message: str
) -> None:
    directory = damaged(name)
    key = f"model.layers.0.self_attn.q_proj.{suffix}"

    def damage(tensors: dict[str, Any]) -> None:
        tensor = tensors.pop(key)
        if change is not None:
            tensors[key] = change(tensor)

    edit(directory, damage)
    with pytest.raises(CorruptFile, match=message) as error:
        LLM(directory, num_gpu_blocks_override=16, quantization="none")
    assert "q_proj" in str(error.value)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gptq-4", {"bits": 5}, "quantization_config.bits: 5 bits"),
    ("gptq-4", {"bits": "4"}, "quantization_config.bits: expected"),
    ("gptq-4", {"group_size": -7}, "quantization_config.group_size"),
    ("gptq-4", {"checkpoint_format": "marlin"}, "checkpoint_format.*marlin.*gptq_v2"),
    ("gptq-4", {"dynamic": {"+:(": {}}}, "dynamic.*does not end"),
    ("gptq-4", {"dynamic": {"-:(?!x).*": {}}}, "look-around"),
    ("gptq-4", {"dynamic": 7}, "dynamic"),
    ("gptq-4", {"quant_method": "hqq"}, "quantized by hqq are not supported; use"),
    ("gptq-4", {"quant_method": "torchao"}, "quantized by torchao are not supported; use"),
    ("gptq-4", {"quant_method": "x"}, "quant_method.*is not supported"),
    ("gptq-4", {"quant_method": None}, "quant_method"),
    ("gptq-4", {"quant_method": 3}, "quant_method"),
    ("awq-gemm", {"bits": 8}, "only 4"),
    ("awq-gemm", {"version": "marlin"}, "gemm, gemv"),
    ("ct-packed-4", {"format": "marlin-24"}, "marlin-24"),
    ("ct-packed-4", {"config_groups": None}, "config_groups"),
    ("ct-packed-4", {"config_groups": {"X9": ["Linear"]}}, "the scheme X9 is not known"),
    ("ct-packed-4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
    ("fp8-block", {"weight_block_size": [128]}, "weight_block_size"),
    ("fp8-block", {"fmt": "e5m2"}, "e4m3"),
    ("modelopt-nvfp4", {"quant_algo": "INT8_SQ"}, "quant_algo"),
    ("bnb-nf4", {"llm_int8_threshold": "six"}, "llm_int8_threshold"),
    ("auto-round", {"packing_format": "auto_round:marlin"}, "packing_format"),
    ("auto-round", {"extra_config": {"x": {"bits": "y"}}}, "extra_config.x.bits"),
]


@pytest.mark.parametrize(("name", "fields", "message"), REFUSED)
def test_what_the_configuration_asks_for_and_is_not_supported_is_named(
    damaged: Any, name: str, fields: dict[str, Any], message: str
) -> None:
    directory = damaged(name)
    edit_quantization(directory, **fields)
    with pytest.raises(LLMServeError, match=message) as error:
        LLM.plan(directory)
    assert isinstance(error.value, CorruptFile | NotSupported)


# What rounding activations to 8 bits a group changes in the logits here, and rounding them, or
# bitsandbytes' table, to bfloat16.
INTEGERS = 0.05
FLOATS = 0.01
# Blocks across rows, and a factor of each column: no kernel takes them. Of NF4 the rows of 64 fit.
EXPANDED = {"modelopt-awq": 14, "bnb-nf4": 12}


def rms(x: np.ndarray) -> float:
    return float(np.sqrt((x**2).mean()))


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_run_in_their_own_bits(pairs: Any, name: str) -> None:
    quantized, twin = pairs(name)
    report = _core.inspect_checkpoint(str(quantized), dtype="float32")["plan"]
    uses = report["quantized"]
    assert sum(use["num_weights"] for use in uses) == 14
    expanded = [use["num_weights"] for use in uses if use["runs"] == "expanded to float32"]
    assert sum(expanded) == EXPANDED.get(name, 0)
    expected = logits(twin)
    error = rms(logits(quantized) - expected)
    is_rounded = any("rounded to 8 bits a token" in use["runs"] for use in uses)
    assert error <= (INTEGERS if is_rounded else FLOATS) * rms(expected)
    if name not in EXPANDED:
        plain = _core.inspect_checkpoint(str(twin), dtype="float32")["plan"]
        assert report["group_bytes"]["mlp"] < 0.5 * plain["group_bytes"]["mlp"]


@pytest.mark.parametrize(
    "name", ["gptq-4-asym-act-order", "ct-packed-3-asym", "ct-nvfp4", "bnb-int8"]
)
def test_ref_gives_the_same(pairs: Any, name: str) -> None:
    quantized, _ = pairs(name)
    expected = logits(quantized, device="ref")
    assert rms(logits(quantized) - expected) <= 0.01 * rms(expected)


@pytest.mark.parametrize("name", ["gptq-4-act-order", "bnb-int8", "fp8-tensor", "ct-nvfp4"])
def test_a_sequence_has_the_same_bits_beside_another(pairs: Any, name: str) -> None:
    runner = PagedRunner(pairs(name)[0], device="cpu", dtype="float32")
    first, other = runner.add_sequence(), runner.add_sequence()
    rows = len(TOKENS)
    _, together = runner.step([(first, TOKENS), (other, TOKENS[::-1])])
    assert np.array_equal(together[:rows], logits(pairs(name)[0]))
