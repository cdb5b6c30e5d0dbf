"""From a model's folder to a quantized one, layer by layer."""

import fnmatch
import json
import os
import re
import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve import _core
from llmserve.checkpoint.model_files import find_checkpoint
from llmserve.common.units import human_bytes
from llmserve.errors import InvalidArgument, NotSupported
from llmserve.quantization.calibration_text import CalibrationText, default_text, read_calibration
from llmserve.quantization.calibrator import Calibrator
from llmserve.quantization.compressed_tensors import config_of, tensors_of
from llmserve.quantization.gptq import GptqOptions
from llmserve.quantization.layer_plan import LayerPlan, plan_layer
from llmserve.quantization.layer_rounding import RoundedLayer, RoundingOptions, round_layer
from llmserve.quantization.mixed_precision import NUM_SEQUENCES, GroupCost, allocate
from llmserve.quantization.number_formats import MAX_E4M3
from llmserve.quantization.options import QuantizeOptions
from llmserve.quantization.resume import LayerRecord, Progress, WorkFolder, run_key
from llmserve.quantization.schemes import Scheme, find_scheme, resolve_method
from llmserve.quantization.tensor_files import RawTensor, TensorFolder, raw, write_tensors
from llmserve.quantization.workers import Workers, single_threaded_blas
from llmserve.tokenization.tokenizer import Tokenizer

# Of a model's folder, what holds or lists weights; everything else is copied.
_WEIGHT_FILES = (
    "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth",
    "*.gguf", "*.msgpack", "*.h5", "*.onnx", "config.json",
)  # fmt: skip


# What OpenBLAS takes for each thread that calls it.
_BLAS_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class QuantizeResult:
    """What quantize() did. Bytes are of the tensors; planned_bytes is what it said it would take in
    memory beside Python itself, peak_bytes what it took. errors are relative, by linear layer:
    |dW x|^2 / |W x|^2, or of the weights alone where no text was read."""

    out: Path
    scheme: str
    method: str
    bytes_before: int
    bytes_after: int
    bits_per_weight: float
    seconds: float
    planned_bytes: int
    peak_bytes: int
    num_tokens: int
    errors: Mapping[str, float]
    schemes: Mapping[str, str]
    notes: Sequence[str]


class Pipeline:
    """One run. say() is told what people should know before and while it works; bar() makes a
    progress bar of a number of steps, or None."""

    def __init__(
        self,
        model: object,
        out: object,
        options: QuantizeOptions,
        *,
        say: Callable[[str], None],
        bar: Callable[[int, int], Any],
    ) -> None:
        self._options = options
        self._say = say
        self._make_bar = bar
        self.model = find_checkpoint(model)
        if not self.model.is_dir():
            raise NotSupported(
                f"{self.model}: quantize reads folders of safetensors; convert the model that the "
                f"file was made from"
            )
        self.out = Path(os.fspath(out))  # type: ignore[call-overload]
        if self.out.resolve() == self.model.resolve():
            raise InvalidArgument(f"out is the model's own folder, {self.out}; pass another")
        self._config = json.loads((self.model / "config.json").read_text(encoding="utf-8"))
        self._scheme = options.apply_to(find_scheme(options.scheme))
        self._text = self._read_text()
        has_text = self._text is not None
        self.method = resolve_method(options.method, self._scheme, has_text=has_text)
        self._tensors = TensorFolder(self.model)
        self._plans = self._plan_layers()
        self._schemes = self._choose_modules()
        if options.has_target:  # all that can be said before anything is measured
            shapes = (self._tensors.shape(f"{name}.weight") for name in self._schemes)
            everything = GroupCost(tuple(self._schemes), tuple((n, k) for n, k in shapes), 0.0)
            allocate([everything], self._scheme, self._max_bits())

    @property
    def options(self) -> QuantizeOptions:
        """As they were given."""
        return self._options

    @property
    def text(self) -> CalibrationText | None:
        """What calibrates, if anything."""
        return self._text

    def _read_text(self) -> CalibrationText | None:
        options = self._options
        path = Path(options.calibration) if options.calibration else default_text(self.model)
        needs = options.method not in ("auto", "rtn") or options.needs_activations(self._scheme)
        if path is None:
            if needs and options.method in ("auto", "rtn"):
                raise InvalidArgument(
                    "static activations, an fp8 KV cache and a target of bits are measured with a "
                    "text of the model's use: pass --calibration FILE"
                )
            return None
        if options.method == "rtn" and not needs:
            return None
        tokenizer = Tokenizer.from_path(self.model)
        if tokenizer is None:
            raise InvalidArgument(f"{self.model} has no tokenizer, and calibration reads text")
        return read_calibration(
            path,
            tokenizer,
            num_samples=options.num_samples,
            max_length=options.max_length,
            seed=options.seed,
        )

    def _plan_layers(self) -> list[LayerPlan]:
        runner = _core.LayerRunner(str(self.model), max_tokens=1, max_sequences=1)
        shapes = {name: self._tensors.shape(name) for name in self._tensors}
        count = int(runner.config["num_layers"])
        plans = [plan_layer(i, runner.layer_names(i), shapes) for i in range(count)]
        if runner.layer_names(0)["is_transposed"]:
            raise NotSupported(
                f"{self.model}: {runner.config['architecture']} stores weights as [in, out], which "
                f"compressed-tensors' Linear does not have"
            )
        if not any(plan.names() for plan in plans):
            raise NotSupported(f"{self.model}: no linear layer was found to quantize")
        return plans

    def _is_ignored(self, name: str) -> bool:
        for pattern in self._options.ignore:
            if pattern.startswith("re:"):
                if re.match(pattern[3:], name):
                    return True
            elif name == pattern or fnmatch.fnmatch(name, pattern) or name.endswith("." + pattern):
                return True
        return False

    def _choose_modules(self) -> dict[str, Scheme]:
        """The scheme of each module that is quantized, by name."""
        schemes = {}
        for plan in self._plans:
            for name in plan.names():
                if self._is_ignored(name):
                    continue
                self._scheme.grid.check_fits(
                    f"{name}.weight", self._tensors.shape(f"{name}.weight")[1]
                )
                schemes[name] = self._scheme
        head = "lm_head.weight"
        is_tied = bool(self._config.get("tie_word_embeddings"))
        if not self._is_ignored("lm_head") and head in self._tensors and not is_tied:
            self._scheme.grid.check_fits(head, self._tensors.shape(head)[1])
            schemes["lm_head"] = self._scheme
        if not schemes:
            raise InvalidArgument("--ignore names every linear layer; nothing is left to quantize")
        return schemes

    # What it takes

    def planned_bytes(self) -> int:
        """The most that a run has in memory: a layer as floats and as it is run, what is summed up
        of its inputs, and the copies that rounding makes of as many groups as there are threads."""
        stored = 2 if self._tensors.stored_dtype == "bfloat16" else 4
        most = 0
        for plan in self._plans:
            shapes = [self._tensors.shape(f"{name}.weight") for name in plan.names()]
            weights = sum(n * k for n, k in shapes)
            # Floats, their float16-sized codes and scales, and what is written.
            layer = weights * (4 + 2 + 1)
            moments = 0
            work = []
            for group in plan.groups:
                rows = sum(self._tensors.shape(weight)[0] for weight in group.weights)
                k = self._tensors.shape(group.weights[0])[1]
                moments += 4 * k * k
                # Rounding holds the weight some six times; a factor takes four matrices of K x K.
                factor = 16 * k * k if "gptq" in self.method else 0
                work.append(24 * rows * k + factor)
            for name in plan.others:
                if ".experts." not in name:
                    moments += 4 * self._tensors.shape(f"{name}.weight")[1] ** 2
            run = weights * (stored + 4)
            uses_text = self._text is not None
            has_moments = uses_text and self._rounding().has_moments
            at_once = sum(sorted(work)[-self._options.threads() :])
            total = layer + (moments if has_moments else 0)
            most = max(most, total + max(at_once, run if uses_text else 0))
        most += most // 4  # pages of files, and what allocators keep; measured up to a seventh
        most += _BLAS_BYTES * (self._options.threads() + 1)
        if self._text is not None:
            hidden = int(self._config["hidden_size"])
            wide = max(int(self._config.get("intermediate_size") or 0), hidden)
            most += 2048 * (6 * hidden + 3 * wide) * 4  # a batch's activations
        return most

    def _rounding(self) -> RoundingOptions:
        options = self._options
        return RoundingOptions(
            method=self.method,
            scale_dtype=self._stored_dtype(),
            alpha=options.alpha,
            gptq=GptqOptions(options.damp, options.act_order),
            observer=options.observer,
            percentile=options.percentile,
        )

    def _stored_dtype(self) -> str:
        """What scales are stored as: the type of the model's matrices."""
        name = self._plans[0].names()[0]
        return self._tensors.dtype(f"{name}.weight")

    # The run

    def run(self) -> QuantizeResult:
        """Does it, or goes on where a run like it stopped."""
        begin = time.monotonic()
        options = self._options
        planned = self.planned_bytes()
        self._say(self._announcement(planned))
        work = WorkFolder(self.out)
        tokens = None if self._text is None else self._text.sequences
        key = run_key((options.key(), self.method), self.model, tokens)
        progress = work.begin(key, resume=options.resume, overwrite=options.overwrite)
        num_done = len(progress.layers)
        if num_done:
            self._say(f"going on after layer {num_done - 1} of {len(self._plans)}")
        rss_before = _rss_bytes()
        peak_before = _peak_bytes()
        if self._options.has_target:
            self._choose_bits(progress, work)
        self._quantize_layers(progress, work)
        self._write_rest(progress)
        work.remove()
        peak = _peak_bytes()
        peak_bytes = max(peak - rss_before, 0) if peak > peak_before else 0
        return self._result(progress, time.monotonic() - begin, planned, peak_bytes)

    def _announcement(self, planned: int) -> str:
        counts = f"{len(self._schemes)} linear layers of {len(self._plans)} layers"
        text = ""
        if self._text is not None:
            text = (
                f", calibrated with {self._text.num_tokens} tokens in "
                f"{len(self._text.sequences)} sequences of {self._text.source}"
            )
        disk = ""
        if self._text is not None:
            hidden = 2 * 4 * self._text.num_tokens * int(self._config["hidden_size"])
            disk = f" and {human_bytes(hidden)} of {self.out} while it works"
        return (
            f"{self._scheme.name} by {self.method}: {counts}{text}; takes at most "
            f"{human_bytes(planned)} of memory beside the program{disk}"
        )

    def _choose_bits(self, progress: Progress, work: WorkFolder) -> None:
        """More bits for the layers that need them, once: a run that goes on keeps the choice."""
        if not progress.schemes:
            groups = self._measure_sensitivity(work)
            chosen = allocate(groups, self._scheme, self._max_bits())
            progress.schemes = {
                name: "" if scheme is None else scheme.name for name, scheme in chosen.items()
            }
            work.write(progress)
        for name, scheme_name in progress.schemes.items():
            if not scheme_name:
                del self._schemes[name]
            elif scheme_name != self._scheme.name:
                self._schemes[name] = find_scheme(scheme_name)
        counts = Counter(scheme or "as it was" for scheme in progress.schemes.values())
        self._say("bits by need: " + ", ".join(f"{n} x {name}" for name, n in counts.items()))

    def _max_bits(self) -> float:
        """Of the linear layers that are chosen among."""
        shapes = [self._tensors.shape(f"{name}.weight") for name in self._schemes]
        if self._options.target_bits is not None:
            return self._options.target_bits * sum(n * k for n, k in shapes)
        assert self._options.target_size is not None
        names = {f"{name}.weight" for name in self._schemes}
        rest = sum(self._tensors.num_bytes(name) for name in self._tensors if name not in names)
        return 8 * (self._options.target_size - rest)

    def _measure_sensitivity(self, work: WorkFolder) -> list[GroupCost]:
        assert self._text is not None
        few = CalibrationText(self._text.sequences[:NUM_SEQUENCES], self._text.source)
        folder = work.path / "sensitivity"
        folder.mkdir(exist_ok=True)
        costs = []
        rounding = RoundingOptions("rtn", self._stored_dtype())
        with (
            _Bar(self._make_bar) as bar,
            Workers(self._options.threads()) as workers,
            single_threaded_blas(),
        ):
            calibrator = Calibrator(
                self.model, folder, few, workers=workers, next_layer=0, on_batch=bar.advance
            )
            num_variants = sum(len(self._units(plan)) for plan in self._plans)
            bar.begin(num_variants + len(self._plans) * calibrator.num_batches, 0)
            for plan in self._plans:
                floats = self._floats(plan)
                variants = {}
                for unit, names in self._units(plan).items():
                    schemes = {name: self._schemes[name] for name in names}
                    rounded = round_layer(plan, floats, {}, {}, schemes, rounding, workers)
                    weights = {f"{n}.weight": w.values() for n, w in rounded.weights.items()}
                    variants[unit] = floats | weights
                errors = calibrator.sensitivities(plan, variants)
                for unit, names in self._units(plan).items():
                    shapes = tuple(self._tensors.shape(f"{name}.weight") for name in names)
                    costs.append(GroupCost(names, shapes, errors[unit]))  # type: ignore[arg-type]
                if plan.index < len(self._plans) - 1:
                    calibrator.advance(plan, None)
            calibrator.close()
        shutil.rmtree(folder)
        return costs

    def _units(self, plan: LayerPlan) -> dict[str, tuple[str, ...]]:
        """What gets the same bits: layers that engines fuse, and all others of a layer."""
        units = {group.role: group.names for group in plan.groups} | {"others": plan.others}
        named = {
            unit: tuple(name for name in names if name in self._schemes)
            for unit, names in units.items()
        }
        return {unit: names for unit, names in named.items() if names}

    def _floats(self, plan: LayerPlan) -> dict[str, Any]:
        names = [name for name in self._tensors if name.startswith(plan.prefix)]
        return {name: self._tensors.floats(name) for name in names if self._is_float(name)}

    def _quantize_layers(self, progress: Progress, work: WorkFolder) -> None:
        num_done = len(progress.layers)
        if num_done == len(self._plans):
            return
        with (
            _Bar(self._make_bar) as bar,
            Workers(self._options.threads()) as workers,
            single_threaded_blas(),
        ):
            calibrator = None
            if self._text is not None:
                calibrator = Calibrator(
                    self.model,
                    work.path,
                    self._text,
                    workers=workers,
                    next_layer=num_done,
                    on_batch=bar.advance,
                )
            passes = 0 if calibrator is None else 2 * calibrator.num_batches
            per_layer = passes + 1
            bar.begin(len(self._plans) * per_layer, num_done * per_layer)
            try:
                for plan in self._plans[num_done:]:
                    progress.layers.append(self._quantize_layer(plan, calibrator, workers))
                    work.write(progress)
                    bar.advance()
            finally:
                if calibrator is not None:
                    calibrator.close()

    def _quantize_layer(
        self, plan: LayerPlan, calibrator: Calibrator | None, workers: Workers
    ) -> LayerRecord:
        begin = time.monotonic()
        names = [name for name in self._tensors if name.startswith(plan.prefix)]
        floats = self._floats(plan)
        dtypes = {name: self._tensors.dtype(name) for name in floats}
        schemes = {name: self._schemes[name] for name in plan.names() if name in self._schemes}
        stats, keys, values = {}, 0.0, 0.0  # type: ignore[var-annotated]
        rounding = self._rounding()
        if calibrator is not None:
            stats, keys, values = calibrator.collect(
                plan,
                has_moments=rounding.has_moments,
                has_histogram=self._options.has_static_activations,
            )
        rounded = round_layer(plan, floats, dtypes, stats, schemes, rounding, workers)
        stats.clear()
        rounded.notes += [
            f"{name}: a tensor of {len(self._tensors.shape(name))} dimensions, which stays as it is"
            for name in names
            if len(self._tensors.shape(name)) > 2
        ]
        self._write_layer(plan, names, floats, rounded, (keys, values))
        if calibrator is not None:
            for name, weight in rounded.weights.items():
                floats[f"{name}.weight"] = weight.values()
            is_last = plan.index == len(self._plans) - 1
            if not is_last:
                calibrator.advance(plan, floats)
        return LayerRecord(
            plan.index, rounded.errors, rounded.notes, time.monotonic() - begin, keys, values
        )

    def _is_float(self, name: str) -> bool:
        return self._tensors.dtype(name) in ("float32", "bfloat16", "float16")

    def _write_layer(
        self,
        plan: LayerPlan,
        names: Sequence[str],
        floats: Mapping[str, Any],
        rounded: RoundedLayer,
        largest_kv: tuple[float, float],
    ) -> None:
        out: dict[str, RawTensor] = {}
        for name in names:
            module = name.removesuffix(".weight")
            if module in rounded.weights:
                out |= tensors_of(
                    module,
                    rounded.weights[module],
                    self._schemes[module].format,
                    self._stored_dtype(),
                    rounded.input_scales.get(module),
                )
            elif name in floats:  # a norm or a bias may have been divided
                out[name] = raw(floats[name], self._tensors.dtype(name))
            else:
                out[name] = self._tensors.raw(name)
        if self._options.kv_cache == "fp8":
            attention = _attention_module(plan)
            for key, largest in zip(("k_scale", "v_scale"), largest_kv, strict=True):
                scale = max(largest, 1e-6) / MAX_E4M3
                import numpy as np

                out[f"{attention}.{key}"] = raw(np.array([scale], np.float32), "float32")
        write_tensors(self.out / self._shard(plan.index), out)

    def _shard(self, index: int) -> str:
        count = len(self._plans) + 1
        return f"model-{index + 1:05d}-of-{count:05d}.safetensors"

    def _write_rest(self, progress: Progress) -> None:
        """What no layer has, the index, config.json, and the files that are copied."""
        prefixes = tuple(plan.prefix for plan in self._plans)
        rest: dict[str, RawTensor] = {}
        for name in self._tensors:
            if name.startswith(prefixes):
                continue
            if name == "lm_head.weight" and "lm_head" in self._schemes:
                rest |= self._round_head()
                continue
            rest[name] = self._tensors.raw(name)
        write_tensors(self.out / self._shard(len(self._plans)), rest)
        for path in self.model.iterdir():
            is_copied = path.is_file() and not any(path.match(p) for p in _WEIGHT_FILES)
            if is_copied:
                shutil.copyfile(path, self.out / path.name)
        self._write_index()
        config = dict(self._config)
        config["quantization_config"] = self._quantization_config()
        text = json.dumps(config, indent=2) + "\n"
        (self.out / "config.json").write_text(text, encoding="utf-8")

    def _round_head(self) -> dict[str, RawTensor]:
        from llmserve.quantization.weight_grid import round_to, scales_of

        scheme = self._schemes["lm_head"]
        weight = self._tensors.floats("lm_head.weight")
        dtype = self._stored_dtype()
        rounded = round_to(weight, scheme.grid, scales_of(weight, scheme.grid, dtype))
        return tensors_of("lm_head", rounded, scheme.format, dtype)

    def _write_index(self) -> None:
        weight_map = {}
        total = 0
        for index in range(len(self._plans) + 1):
            shard = self._shard(index)
            for name, num_bytes in _tensor_bytes(self.out / shard).items():
                weight_map[name] = shard
                total += num_bytes
        index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index_json, indent=2) + "\n"
        (self.out / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def _quantization_config(self) -> dict[str, Any]:
        by_scheme: dict[str, tuple[Scheme, list[str]]] = {}
        for name, scheme in self._schemes.items():
            by_scheme.setdefault(scheme.name, (scheme, []))[1].append(name)
        named = list(by_scheme.values())
        if len(named) == 1:
            named = [(named[0][0], ["Linear"])]
        ignore = [name for plan in self._plans for name in (*plan.names(), *plan.kept)]
        ignore = [name for name in ignore if name not in self._schemes]
        if "lm_head" not in self._schemes:
            ignore.append("lm_head")
        return config_of(named, ignore, has_fp8_kv=self._options.kv_cache == "fp8")

    def _result(
        self, progress: Progress, seconds: float, planned: int, peak: int
    ) -> QuantizeResult:
        before = sum(self._tensors.num_bytes(name) for name in self._tensors)
        after = 0
        quantized = 0
        for index in range(len(self._plans) + 1):
            for name, num_bytes in _tensor_bytes(self.out / self._shard(index)).items():
                after += num_bytes
                module = name.rpartition(".")[0]
                quantized += num_bytes if module in self._schemes and "bias" not in name else 0
        shapes = [self._tensors.shape(f"{name}.weight") for name in self._schemes]
        return QuantizeResult(
            out=self.out,
            scheme=self._scheme.name,
            method=self.method,
            bytes_before=before,
            bytes_after=after,
            bits_per_weight=8 * quantized / sum(n * k for n, k in shapes),
            seconds=sum(record.seconds for record in progress.layers) or seconds,
            planned_bytes=planned,
            peak_bytes=peak,
            num_tokens=0 if self._text is None else self._text.num_tokens,
            errors={k: v for record in progress.layers for k, v in record.errors.items()},
            schemes={name: scheme.name for name, scheme in self._schemes.items()},
            notes=[note for record in progress.layers for note in record.notes],
        )


class _Bar:
    """A progress bar that is there once the number of steps is known."""

    def __init__(self, make: Callable[[int, int], Any]) -> None:
        self._make = make
        self._bar: Any = None

    def begin(self, total: int, done: int) -> None:
        self._bar = self._make(total, done)

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.update(1)

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


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


def _peak_bytes() -> int:
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def _rss_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return _peak_bytes()
    return pages * os.sysconf("SC_PAGE_SIZE")
