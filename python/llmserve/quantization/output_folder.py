"""The folder that is written: a shard a layer, one of the rest, the index, config.json, and copies
of the files that hold no weights."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmserve.errors import NotSupported
from llmserve.quantization.compressed_tensors import config_of, tensors_of
from llmserve.quantization.fused_experts import put_together, stored_module
from llmserve.quantization.layer_plan import LayerPlan, Tensors
from llmserve.quantization.layer_rounding import RoundedLayer
from llmserve.quantization.module_choice import HEAD
from llmserve.quantization.number_formats import MAX_E4M3
from llmserve.quantization.schemes import Scheme
from llmserve.quantization.tensor_files import RawTensor, TensorFolder, raw, write_tensors
from llmserve.quantization.weight_grid import round_to, scales_of

# Of a model's folder, what holds or lists weights; everything else is copied.
_WEIGHT_FILES = (
    "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth",
    "*.gguf", "*.msgpack", "*.h5", "*.onnx", "config.json",
)  # fmt: skip


class OutputFolder:
    """Writes a quantized model into `path`. scale_dtype is what scales are stored as."""

    def __init__(
        self,
        path: Path,
        tensors: TensorFolder,
        plans: Sequence[LayerPlan],
        scale_dtype: str,
        *,
        has_kv_scales: bool,
    ) -> None:
        self.path = path
        self._tensors = tensors
        self._plans = plans
        self._scale_dtype = scale_dtype
        self._has_kv_scales = has_kv_scales

    def write_layer(
        self,
        plan: LayerPlan,
        floats: Tensors,
        rounded: RoundedLayer,
        schemes: Mapping[str, Scheme],
        largest_kv: tuple[float, float],
    ) -> None:
        """A layer's shard: what was rounded, and what was not as `floats` has it."""
        out: dict[str, RawTensor] = {}
        for name in self.layer_tensors(plan):
            module = name.removesuffix(".weight")
            if module in rounded.weights:
                out |= tensors_of(
                    module,
                    rounded.weights[module],
                    schemes[module].format,
                    self._scale_dtype,
                    rounded.input_scales.get(module),
                )
            elif name in floats:  # a norm or a bias may have been divided
                out[name] = raw(floats[name], self._tensors.dtype(name))
            else:
                out[name] = self._tensors.raw(name)
        if self._has_kv_scales:
            attention = _attention_module(plan)
            for key, largest in zip(("k_scale", "v_scale"), largest_kv, strict=True):
                scale = max(largest, 1e-6) / MAX_E4M3
                out[f"{attention}.{key}"] = raw(np.array([scale], np.float32), "float32")
        write_tensors(self.path / self._shard(plan.index), put_together(out))

    def layer_tensors(self, plan: LayerPlan) -> list[str]:
        """The names of the checkpoint's tensors that belong to a layer."""
        return [name for name in self._tensors if name.startswith(plan.prefix)]

    def write_rest(self, schemes: Mapping[str, Scheme], config: Mapping[str, Any]) -> None:
        """What no layer has, the index, config.json, and the files that are copied."""
        prefixes = tuple(plan.prefix for plan in self._plans)
        rest: dict[str, RawTensor] = {}
        for name in self._tensors:
            if name.startswith(prefixes):
                continue
            if name == f"{HEAD}.weight" and HEAD in schemes:
                rest |= self._round_head(schemes[HEAD])
            else:
                rest[name] = self._tensors.raw(name)
        write_tensors(self.path / self._shard(len(self._plans)), rest)
        for path in self._tensors.folder.iterdir():
            is_copied = path.is_file() and not any(path.match(p) for p in _WEIGHT_FILES)
            if is_copied:
                shutil.copyfile(path, self.path / path.name)
        self._write_index()
        quantization = self._quantization_config(schemes)
        text = json.dumps({**config, "quantization_config": quantization}, indent=2) + "\n"
        (self.path / "config.json").write_text(text, encoding="utf-8")

    def tensor_bytes(self) -> dict[str, int]:
        """The bytes of all tensors that were written, by name."""
        return {
            name: num_bytes
            for index in range(len(self._plans) + 1)
            for name, num_bytes in _tensor_bytes(self.path / self._shard(index)).items()
        }

    def _shard(self, index: int) -> str:
        count = len(self._plans) + 1
        return f"model-{index + 1:05d}-of-{count:05d}.safetensors"

    def _round_head(self, scheme: Scheme) -> dict[str, RawTensor]:
        weight = self._tensors.floats(f"{HEAD}.weight")
        scales = scales_of(weight, scheme.grid, self._scale_dtype)
        rounded = round_to(weight, scheme.grid, scales)
        return tensors_of(HEAD, rounded, scheme.format, self._scale_dtype)

    def _write_index(self) -> None:
        weight_map = {}
        total = 0
        for index in range(len(self._plans) + 1):
            shard = self._shard(index)
            for name, num_bytes in _tensor_bytes(self.path / shard).items():
                weight_map[name] = shard
                total += num_bytes
        index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index_json, indent=2) + "\n"
        (self.path / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def _quantization_config(self, schemes: Mapping[str, Scheme]) -> dict[str, Any]:
        by_scheme: dict[str, tuple[Scheme, list[str]]] = {}
        for name, scheme in schemes.items():
            by_scheme.setdefault(scheme.name, (scheme, []))[1].append(stored_module(name))
        named = [(scheme, list(dict.fromkeys(names))) for scheme, names in by_scheme.values()]
        if len(named) == 1:
            named = [(named[0][0], ["Linear"])]
        ignore = [name for plan in self._plans for name in (*plan.names(), *plan.kept)]
        ignore = [stored_module(name) for name in ignore if name not in schemes]
        if HEAD not in schemes:
            ignore.append(HEAD)
        ignore = list(dict.fromkeys(ignore))
        return config_of(named, ignore, has_fp8_kv=self._has_kv_scales)


def _attention_module(plan: LayerPlan) -> str:
    """The module that the layer's keys and values belong to: "model.layers.0.self_attn"."""
    for group in plan.groups:
        if group.role == "qkv":
            return group.names[0].rpartition(".")[0]
    raise NotSupported(f"{plan.prefix}: no layer makes keys and values, for an fp8 KV cache")


def _tensor_bytes(path: Path) -> dict[str, int]:
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {
        name: entry["data_offsets"][1] - entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }
