"""From a model's folder to a quantized one: what is written, resumed, refused."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import checkpoint
from llmserve import InvalidArgument, NotSupported, cli, demo_model_path
from llmserve.errors import ResourceExhausted
from llmserve.quantization import QuantizeOptions, output_folder, quantize
from llmserve.quantization.calibrator import Calibrator
from llmserve.quantization.mixed_precision import GroupCost, allocate
from llmserve.quantization.number_formats import bf16_to_f32, unpack_words
from llmserve.quantization.pipeline import Pipeline
from llmserve.quantization.schemes import SCHEMES, find_scheme
from llmserve.quantization.tensor_files import TensorFolder

FEW = {"num_samples": 6, "max_length": 96}


def written(folder: Path) -> dict[str, Any]:
    """name -> (dtype, shape, bytes) of all shards."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                begin, end = (8 + size + offset for offset in entry["data_offsets"])
                tensors[name] = (entry["dtype"], entry["shape"], data[begin:end])
    return tensors


def run(out: Path, model: Path | None = None, **options: Any) -> Any:
    return quantize(model or demo_model_path(), out, use_tqdm=False, **{"report": False, **options})


def int4_values(tensors: dict[str, Any], name: str) -> np.ndarray:
    """By the format's description alone: fields of 4 bits, less 8, times bf16 scales of 128."""
    _, shape, packed = tensors[f"{name}.weight_packed"]
    n, k = np.frombuffer(tensors[f"{name}.weight_shape"][2], np.int64)
    words = np.frombuffer(packed, np.int32).reshape(shape)
    _, scale_shape, scales = tensors[f"{name}.weight_scale"]
    scale = bf16_to_f32(np.frombuffer(scales, np.uint16)).reshape(scale_shape)
    assert scale.shape == (n, k // 128)
    return (unpack_words(words, 4, k) - 8) * np.repeat(scale, 128, 1)


def test_int4_is_packed_as_compressed_tensors_has_it_and_the_rest_is_as_it_was(
    tmp_path: Path,
) -> None:
    model = demo_model_path()
    result = run(tmp_path / "out", scheme="int4", method="rtn")
    tensors = written(tmp_path / "out")
    source = TensorFolder(model)
    name = "model.layers.2.mlp.down_proj"
    weight = source.floats(f"{name}.weight")
    values = int4_values(tensors, name)
    error = np.square(values - weight).sum() / np.square(weight).sum()
    assert error == pytest.approx(result.errors[name], rel=1e-3)
    assert error < 0.02
    for other in ("model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"):
        assert tensors[other][2] == source.raw(other).data.tobytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    quantization = config["quantization_config"]
    assert quantization["format"] == "pack-quantized"
    assert quantization["ignore"] == ["lm_head"]
    weights = quantization["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"], weights["symmetric"]) == (4, 128, True)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in tensors.values())
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        model / "tokenizer.json"
    ).read_bytes()
    assert not (tmp_path / "out" / ".quantize").exists()
    assert result.bits_per_weight == pytest.approx(4.125, abs=0.02)


@pytest.mark.parametrize("scheme", [scheme.name for scheme in SCHEMES])
def test_every_scheme_writes_what_its_config_says(scheme: str, tmp_path: Path) -> None:
    result = run(tmp_path / "out", scheme=scheme, method="rtn")
    tensors = written(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    dtypes = {
        "pack-quantized": {"weight_packed": "I32", "weight_scale": "BF16", "weight_shape": "I64"},
        "int-quantized": {"weight": "I8", "weight_scale": "BF16"},
        "float-quantized": {"weight": "F8_E4M3", "weight_scale": "BF16"},
        "nvfp4-pack-quantized": {
            "weight_packed": "U8", "weight_scale": "F8_E4M3", "weight_global_scale": "F32"
        },
        "mxfp4-pack-quantized": {"weight_packed": "U8", "weight_scale": "U8"},
    }[config["format"]]  # fmt: skip
    if scheme == "int4-asym":
        dtypes["weight_zero_point"] = "I32"
    name = "model.layers.0.self_attn.k_proj"
    got = {key.rpartition(".")[2]: value[0] for key, value in tensors.items() if name in key}
    assert got == dtypes
    limits = {4: 0.02, 8: 0.001, 3: 0.08}
    bits = next(iter(config["config_groups"].values()))["weights"]["num_bits"]
    assert max(result.errors.values()) < limits[bits]


def test_calibration_loses_less_and_is_told(tmp_path: Path) -> None:
    model = demo_model_path()
    source = TensorFolder(model)
    results = {
        method: run(tmp_path / method, scheme="int4", method=method, **FEW)
        for method in ("gptq", "awq")
    }
    assert results["gptq"].num_tokens == results["awq"].num_tokens == 6 * 96
    # The errors of outputs, whose inputs are nearly the same: AWQ rounds to nearest.
    means = {name: np.mean(list(result.errors.values())) for name, result in results.items()}
    assert means["gptq"] < means["awq"] < 0.01
    norm = "model.layers.0.input_layernorm.weight"
    assert written(tmp_path / "gptq")[norm][2] == source.raw(norm).data.tobytes()
    assert written(tmp_path / "awq")[norm][2] != source.raw(norm).data.tobytes()


class Killed(Exception):
    pass


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_a_killed_run_goes_on_and_ends_in_the_same_bytes(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"scheme": "int4", "method": method, **FEW}
    run(tmp_path / "whole", **options)
    write = output_folder.write_tensors
    left = 3

    def die(*arguments: Any) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        return write(*arguments)

    monkeypatch.setattr(output_folder, "write_tensors", die)
    with pytest.raises(Killed):
        run(tmp_path / "cut", **options)
    monkeypatch.undo()
    seen: list[int] = []
    collect = Calibrator.collect

    def count(self: Calibrator, plan: Any, **wanted: Any) -> Any:
        seen.append(plan.index)
        return collect(self, plan, **wanted)

    monkeypatch.setattr(Calibrator, "collect", count)
    result = run(tmp_path / "cut", **options)
    assert seen == ([3, 4] if method == "gptq" else [])
    assert written(tmp_path / "cut") == written(tmp_path / "whole")
    assert len(result.errors) == 35


def test_a_full_disk_is_told_and_the_run_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write = output_folder.write_tensors

    def fill(path: Path, tensors: Any) -> int:
        if "00003" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, tensors)

    monkeypatch.setattr(output_folder, "write_tensors", fill)
    with pytest.raises(ResourceExhausted, match=r"out: the disk is full, .* to go on"):
        run(out, scheme="int8", method="rtn")
    monkeypatch.undo()
    run(out, scheme="int8", method="rtn")
    assert len(list(out.glob("*.safetensors"))) == 6


def test_threads_change_no_byte(tmp_path: Path) -> None:
    for threads in (1, 2):
        run(tmp_path / str(threads), scheme="int4", method="gptq", num_threads=threads, **FEW)
    assert written(tmp_path / "1") == written(tmp_path / "2")


def test_static_activations_and_kv_scales_come_from_the_text(tmp_path: Path) -> None:
    run(tmp_path / "out", scheme="fp8", activations="static", kv_cache="fp8", **FEW)
    tensors = written(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] is False
    assert config["kv_cache_scheme"]["num_bits"] == 8
    for key in ("k_scale", "v_scale"):
        dtype, shape, data = tensors[f"model.layers.3.self_attn.{key}"]
        assert (dtype, shape) == ("F32", [1])
        assert 0.0001 < np.frombuffer(data, np.float32)[0] < 1
    q, k = (tensors[f"model.layers.0.self_attn.{name}_proj.input_scale"][2] for name in ("q", "k"))
    assert q == k  # one product reads both


@pytest.mark.parametrize("target", ["bits", "size"])
def test_bits_go_where_they_take_away_most_and_keep_to_the_target(
    target: str, tmp_path: Path
) -> None:
    whole = {"target_bits": 5.0} if target == "bits" else {"target_size": 3_000_000}
    result = run(tmp_path / "out", scheme="int4", method="rtn", **whole, **FEW)
    counts = {name: list(result.schemes.values()).count(name) for name in ("int4", "int8")}
    assert counts["int4"] > 5
    assert counts["int8"] > 2
    if target == "bits":
        assert 4.8 < result.bits_per_weight <= 5.01
    else:
        assert 2_900_000 < result.bytes_after <= 3_000_000 + 20_000  # shapes of packed tensors
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    groups = config["config_groups"].values()
    assert {group["weights"]["num_bits"] for group in groups} == {4, 8}
    targets = [name for group in groups for name in group["targets"]]
    assert sorted(targets) == sorted(result.schemes)
    for i in range(5):  # what engines fuse has one scheme
        kinds = {result.schemes[f"model.layers.{i}.self_attn.{n}_proj"] for n in "qkv"}
        assert len(kinds) == 1


def test_a_greedy_choice_takes_the_best_error_a_bit_first() -> None:
    lowest = find_scheme("int4")
    groups = [
        GroupCost(("a",), ((10, 128),), 1.0),
        GroupCost(("b", "c"), ((10, 128), (10, 128)), 1.5),
        GroupCost(("d",), ((10, 128),), 0.01),
    ]
    low = sum(group.num_bits(lowest) for group in groups)
    one = groups[0].num_bits(find_scheme("int8")) - groups[0].num_bits(lowest)
    chosen = allocate(groups, lowest, low + one)
    assert {n: s and s.name for n, s in chosen.items()} == {
        "a": "int8", "b": "int4", "c": "int4", "d": "int4"
    }  # fmt: skip
    everything = allocate(groups, lowest, 16 * 40 * 128)
    assert set(everything.values()) == {None}
    with pytest.raises(InvalidArgument, match=r"take 4\.125"):
        allocate(groups, lowest, low - 1)


def test_ignored_layers_stay_as_they_are(tmp_path: Path) -> None:
    ignore = ("lm_head", "re:.*layers\\.0\\..*", "down_proj")
    run(tmp_path / "out", scheme="int8", method="rtn", ignore=ignore)
    tensors = written(tmp_path / "out")
    source = TensorFolder(demo_model_path())
    kept = [name for name in tensors if name.endswith("proj.weight")]
    assert len(kept) == 7 + 4
    assert all(tensors[name][2] == source.raw(name).data.tobytes() for name in kept)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {name.removesuffix(".weight") for name in kept} < set(config["ignore"])


def test_fused_and_offset_norms_are_folded(tmp_path: Path) -> None:
    """Families whose norms add 1, whose matrices are fused, or whose blocks are parallel."""
    from llmserve.tokenization.tokenizer import Tokenizer

    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a fox. " * 200)
    tokenizer = demo_model_path() / "tokenizer.json"
    assert Tokenizer.from_directory(demo_model_path()) is not None
    import shutil

    for family in ("gemma2", "phi3", "gpt_neox"):
        model = tmp_path / family
        shutil.copytree(checkpoint(family, vocab_size=2048), model)
        shutil.copy(tokenizer, model)
        result = run(
            tmp_path / f"{family}-out", model, scheme="w8a8", method="smoothquant+gptq",
            calibration=text, **FEW,
        )  # fmt: skip
        assert result.errors
        assert max(result.errors.values()) < 0.01


def test_models_of_more_than_text_are_refused(tmp_path: Path) -> None:
    model = checkpoint("llava:llama", vocab_size=2048)
    with pytest.raises(NotSupported, match="LlavaForConditionalGeneration takes more than text"):
        run(tmp_path / "out", model, scheme="int8", method="rtn")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "int5"}, "scheme must be one of int4, .* got 'int5'"),
        ({"method": "magic"}, "method must be one of"),
        ({"scheme": "int4", "method": "smoothquant"}, "smoothquant is for schemes that round"),
        ({"scheme": "fp8", "group_size": 32}, "groups of its own"),
        ({"group_size": 24}, "group_size must be 0"),
        ({"activations": "static"}, "static ones are of w8a8"),
        ({"target_bits": 4.0}, r"all of them in int4 take 4\.125"),
        ({"target_bits": 9.0, "scheme": "int8"}, "and are for int3, int4"),
        ({"target_bits": 5.0, "target_size": 9}, "pass one of them"),
        ({"num_samples": 0}, "num_samples must be"),
        ({"alpha": 2}, "alpha must be 0 to 1"),
        ({"kv_cache": "int3"}, "kv_cache must be one of auto, fp8"),
        ({"ignore": "lm_head"}, "ignore must be a list"),
        ({"ignore": ("*",), "method": "rtn"}, "nothing is left to quantize"),
        ({"group_size": 512}, "do not go in groups of 512"),
        ({"calibration": "/nowhere.txt"}, "expected UTF-8 text"),
        ({"calibration": "a.txt", "eval_text": "./a.txt"}, "eval_text is the text that calibrates"),
        ({"ignore": ("re:[",)}, "ignore: 're:\\[' is no regular expression"),
        ({"target_size": 1000}, "stays as it is .* takes"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises((InvalidArgument, NotSupported), match=message):
        run(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_methods_that_calibrate_ask_for_a_text(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"far less by gptq.* pass --calibration FILE"):
        run(tmp_path / "out", checkpoint("llama"), group_size=16)
    assert run(tmp_path / "out", checkpoint("llama"), scheme="int8").method == "rtn"
    with pytest.raises(InvalidArgument, match="pass --calibration FILE"):
        run(tmp_path / "out", checkpoint("llama"), method="gptq", group_size=32)


def test_a_folder_with_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(InvalidArgument, match="is not empty"):
        run(tmp_path, scheme="int8", method="rtn")
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="is no folder of a quantized model"):
            run(tmp_path, scheme="int8", method="rtn", overwrite=True)
        (tmp_path / "config.json").write_text("{}")  # another model's
    assert (tmp_path / "mine.txt").read_text() == "mine"
    with pytest.raises(InvalidArgument, match="the model's own folder"):
        run(demo_model_path())


def test_the_bytes_are_said_before_and_kept_to(tmp_path: Path) -> None:
    said: list[str] = []
    pipeline = Pipeline(
        demo_model_path(), tmp_path / "out", QuantizeOptions(**FEW),
        say=said.append, bar=lambda *_: None,
    )  # fmt: skip
    result = pipeline.run()
    assert "takes at most" in said[0]
    assert result.planned_bytes == pipeline.planned_bytes()
    assert result.peak_bytes <= result.planned_bytes
    assert {field.name for field in dataclasses.fields(result)} >= {"peak_bytes", "errors"}


JSONL = [
    '{"text": "Once upon a time there was a fox."}',
    '{"messages": [{"role": "user", "content": "Tell me a story."}]}',
    '{"prompt": "The fox", "completion": " was red."}',
    "",
]


def test_jsonl_documents_are_read_each_in_its_way(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(JSONL))
    result = run(tmp_path / "out", scheme="int4", method="gptq", calibration=path)
    assert 20 < result.num_tokens < 80
    path.write_text('{"texts": 1}')
    with pytest.raises(InvalidArgument, match="line 1: expected an object with text"):
        run(tmp_path / "other", scheme="int4", method="gptq", calibration=path)


def test_the_command_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert cli.main(["quantize", out, "--scheme", "int8", "--method", "rtn", "--no-report"]) == 0
    captured = capsys.readouterr()
    assert "int8 by rtn: 35 linear layers of 5 layers" in captured.err
    assert "8.06 bits a weight" in captured.out
    assert cli.main(["quantize", out, "--scheme", "int8", "--method", "rtn", "--no-report"]) == 2
    assert "is not empty" in capsys.readouterr().err
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert cli.main(["quantize", str(model), "--overwrite"]) == 2
    assert "model is a model's folder; pass the folder to write" in capsys.readouterr().err
    words = [
        "quantize", out, "--scheme", "int8", "--method", "rtn", "--no-report", "--overwrite",
        "--json",
    ]  # fmt: skip
    assert cli.main(words) == 0
    assert json.loads(capsys.readouterr().out)["bits_per_weight"] == pytest.approx(8.06, abs=0.01)
