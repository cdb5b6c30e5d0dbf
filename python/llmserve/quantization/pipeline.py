"""From a model's folder to a quantized one, layer by layer."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmserve import _core
from llmserve.checkpoint.model_files import find_checkpoint
from llmserve.common.units import human_bytes
from llmserve.errors import InvalidArgument, NotSupported
from llmserve.quantization.activation_stats import InputStats
from llmserve.quantization.calibration_text import CalibrationText, default_text, read_calibration
from llmserve.quantization.calibrator import Calibrator
from llmserve.quantization.fused_experts import stored_module, take_apart
from llmserve.quantization.gptq import GptqOptions
from llmserve.quantization.layer_plan import LayerPlan, plan_layer
from llmserve.quantization.layer_rounding import RoundedLayer, RoundingOptions, round_layer
from llmserve.quantization.memory_bound import (
    calibration_parts,
    peak_bytes,
    planned_bytes,
    resident_bytes,
)
from llmserve.quantization.mixed_precision import GroupCost, allocate
from llmserve.quantization.module_choice import choose_modules
from llmserve.quantization.options import QuantizeOptions
from llmserve.quantization.output_folder import OutputFolder
from llmserve.quantization.progress_bar import ProgressBar
from llmserve.quantization.result import QuantizeResult
from llmserve.quantization.resume import LayerRecord, Progress, WorkFolder, run_key
from llmserve.quantization.schemes import find_scheme, resolve_method
from llmserve.quantization.sensitivity import measure_sensitivity
from llmserve.quantization.tensor_files import TensorFolder, telling_full_disks
from llmserve.quantization.workers import Workers, single_threaded_blas
from llmserve.tokenization.tokenizer import Tokenizer


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
        if isinstance(self._config.get("text_config"), dict):
            raise NotSupported(
                f"{self.model}: {', '.join(self._config.get('architectures') or ['the model'])} "
                f"takes more than text, and quantize would write the text's layers alone; quantize "
                f"the language model that it was made from"
            )
        self._scheme = options.apply_to(find_scheme(options.scheme))
        self._text = self._read_text()
        has_text = self._text is not None
        self.method = resolve_method(options.method, self._scheme, has_text=has_text)
        self._tensors = TensorFolder(self.model)
        self._plans = self._plan_layers()
        self._schemes = choose_modules(
            self._plans,
            self._tensors,
            self._scheme,
            options.ignore,
            has_tied_head=bool(self._config.get("tie_word_embeddings")),
        )
        self._folder = OutputFolder(
            self.out,
            self._tensors,
            self._plans,
            self._stored_dtype(),
            has_kv_scales=options.kv_cache == "fp8",
        )
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
        self._sizes = runner.config
        known = [runner.layer_names(i) for i in range(int(runner.config["num_layers"]))]
        if self._scheme.grid.kind in ("int", "fp8"):  # FP4 has no layout of several matrices
            for experts in filter(None, (layer["experts"] for layer in known)):
                take_apart(self._tensors, experts)
        shapes = {name: self._tensors.shape(name) for name in self._tensors}
        plans = [plan_layer(i, layer, shapes) for i, layer in enumerate(known)]
        if known[0]["is_transposed"]:
            raise NotSupported(
                f"{self.model}: {runner.config['architecture']} stores weights as [in, out], which "
                f"compressed-tensors' Linear does not have"
            )
        if not any(plan.names() for plan in plans):
            raise NotSupported(f"{self.model}: no linear layer was found to quantize")
        return plans

    # What it takes

    def planned_bytes(self) -> int:
        """The most that a run has in memory."""
        return planned_bytes(
            self._plans,
            self._tensors,
            self._sizes,
            uses_text=self._text is not None,
            has_moments=self._rounding().has_moments,
            has_factors="gptq" in self.method,
            num_threads=self._options.threads(),
        )

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
        before = resident_bytes()
        peak_before = peak_bytes()
        with telling_full_disks(self.out):
            if self._options.has_target:
                self._choose_bits(progress, work)
            self._quantize_layers(progress, work)
            self._folder.write_rest(self._schemes, self._config)
            work.remove()
        peak = peak_bytes()
        taken = max(peak - before, 0) if peak > peak_before else 0
        return self._result(progress, time.monotonic() - begin, planned, taken)

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
            hidden = 2 * 4 * self._text.num_tokens * int(self._sizes["hidden_size"])
            disk = f" and {human_bytes(hidden)} of {self.out} while it works"
        return (
            f"{self._scheme.name} by {self.method}: {counts}{text}; takes at most "
            f"{human_bytes(planned)} of memory beside the program{disk}"
        )

    def _choose_bits(self, progress: Progress, work: WorkFolder) -> None:
        """More bits for the layers that need them, once: a run that goes on keeps the choice."""
        if not progress.schemes:
            assert self._text is not None
            groups = measure_sensitivity(
                self.model,
                work.path,
                self._text,
                self._tensors,
                self._plans,
                self._schemes,
                scale_dtype=self._stored_dtype(),
                num_threads=self._options.threads(),
                make_bar=self._make_bar,
            )
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
        if self._options.target_size <= rest:
            raise InvalidArgument(
                f"the target is {human_bytes(self._options.target_size)}, and what stays as it is "
                f"(embeddings, norms, what --ignore names) takes {human_bytes(rest)} already"
            )
        return 8 * (self._options.target_size - rest)

    def _quantize_layers(self, progress: Progress, work: WorkFolder) -> None:
        num_done = len(progress.layers)
        if num_done == len(self._plans):
            return
        with (
            ProgressBar(self._make_bar) as bar,
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
            steps = [1] * len(self._plans)
            if calibrator is not None:
                passes = [len(self._parts(plan)) + 1 for plan in self._plans]
                steps = [1 + n * calibrator.num_batches for n in passes]
            bar.begin(sum(steps), sum(steps[:num_done]))
            try:
                for plan in self._plans[num_done:]:
                    progress.layers.append(self._quantize_layer(plan, calibrator, workers))
                    work.write(progress)
                    bar.advance()
            finally:
                if calibrator is not None:
                    calibrator.close()

    def _parts(self, plan: LayerPlan) -> list[LayerPlan]:
        has_moments = self._text is not None and self._rounding().has_moments
        return calibration_parts(plan, self._tensors, has_moments=has_moments)

    def _quantize_layer(
        self, plan: LayerPlan, calibrator: Calibrator | None, workers: Workers
    ) -> LayerRecord:
        begin = time.monotonic()
        floats = self._tensors.floats_below(plan.prefix)
        dtypes = {name: self._tensors.dtype(name) for name in floats}
        schemes = {name: self._schemes[name] for name in plan.names() if name in self._schemes}
        keys = values = 0.0
        rounding = self._rounding()
        rounded = RoundedLayer()
        for part in self._parts(plan):
            own = {name: schemes[name] for name in part.names() if name in schemes}
            stats: dict[str, InputStats] = {}
            if calibrator is not None:
                stats, keys, values = calibrator.collect(
                    part,
                    has_moments=rounding.has_moments,
                    has_histogram=self._options.has_static_activations,
                )
            rounded.join(round_layer(part, floats, dtypes, stats, own, rounding, workers))
            stats.clear()
        rounded.notes += [
            f"{name}: a tensor of {len(self._tensors.shape(name))} dimensions, which stays as it is"
            for name in self._folder.layer_tensors(plan)
            if len(self._tensors.shape(name)) > 2
        ]
        self._folder.write_layer(plan, floats, rounded, self._schemes, (keys, values))
        if calibrator is not None:
            for name, weight in rounded.weights.items():
                floats[f"{name}.weight"] = weight.values()
            is_last = plan.index == len(self._plans) - 1
            if not is_last:
                calibrator.advance(plan, floats)
        return LayerRecord(
            plan.index, rounded.errors, rounded.notes, time.monotonic() - begin, keys, values
        )

    def _result(
        self, progress: Progress, seconds: float, planned: int, peak: int
    ) -> QuantizeResult:
        before = sum(self._tensors.num_bytes(name) for name in self._tensors)
        written = self._folder.tensor_bytes()
        modules = {stored_module(name) for name in self._schemes}
        quantized = sum(
            num_bytes
            for name, num_bytes in written.items()
            if name.rpartition(".")[0] in modules and "bias" not in name
        )
        shapes = [self._tensors.shape(f"{name}.weight") for name in self._schemes]
        return QuantizeResult(
            out=self.out,
            scheme=self._scheme.name,
            method=self.method,
            bytes_before=before,
            bytes_after=sum(written.values()),
            bits_per_weight=8 * quantized / sum(n * k for n, k in shapes),
            seconds=sum(record.seconds for record in progress.layers) or seconds,
            planned_bytes=planned,
            peak_bytes=peak,
            num_tokens=0 if self._text is None else self._text.num_tokens,
            errors={k: v for record in progress.layers for k, v in record.errors.items()},
            schemes={name: scheme.name for name, scheme in self._schemes.items()},
            notes=[note for record in progress.layers for note in record.notes],
        )
