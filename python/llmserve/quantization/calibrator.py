"""Runs layers over the calibration tokens: once to see what their linear layers read, and once more
with rounded weights, for the next layer."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from llmserve import _core
from llmserve.quantization.activation_stats import InputStats
from llmserve.quantization.calibration_text import CalibrationText
from llmserve.quantization.fused_experts import put_together
from llmserve.quantization.hidden_states import HiddenStates
from llmserve.quantization.layer_plan import LayerPlan, Tensors
from llmserve.quantization.number_formats import Floats
from llmserve.quantization.tensor_files import raw, write_tensors
from llmserve.quantization.workers import Workers

# Rows of a product: many times what keeps a CPU's arithmetic busy, and some MiB of activations.
_BATCH_TOKENS = 2048


class Calibrator:
    """Owns the runner and the hidden states before layer `next_layer`, in one of two files; the
    other takes what that layer leaves, so that a kill between costs one layer's work."""

    def __init__(
        self,
        model: Path,
        work: Path,
        text: CalibrationText,
        *,
        workers: Workers,
        next_layer: int,
        on_batch: Callable[[], None],
    ) -> None:
        self._text = text
        self._workers = workers
        self._on_batch = on_batch
        longest = max(len(sequence) for sequence in text.sequences)
        self._batches = _batches(text.sequences, max(_BATCH_TOKENS, longest))
        self._runner = _core.LayerRunner(
            str(model),
            max_tokens=max(_BATCH_TOKENS, longest),
            max_sequences=max(len(batch) for batch in self._batches),
            num_threads=workers.num_threads,
        )
        self.hidden_size = int(self._runner.config["hidden_size"])
        self._files = [
            HiddenStates(work / f"hidden-{i}.bin", text.num_tokens, self.hidden_size)
            for i in range(2)
        ]
        self._layer_folder = work / "layer"
        self._layer_folder.mkdir(exist_ok=True)
        shutil.copyfile(model / "config.json", self._layer_folder / "config.json")
        self._next = next_layer
        if next_layer == 0:
            self._embed()

    @property
    def num_batches(self) -> int:
        """Of a pass over the text."""
        return len(self._batches)

    @property
    def fixed_bytes(self) -> int:
        """Of the runner, without weights."""
        return self._runner.fixed_bytes

    def collect(
        self, plan: LayerPlan, *, has_moments: bool, has_histogram: bool
    ) -> tuple[dict[str, InputStats], float, float]:
        """What the groups of the next layer read, by role, and other layers, by name; and the
        largest keys and values. An expert that no token is given has no stats."""
        roles = {weight: group.role for group in plan.groups for weight in group.weights}
        # Of other kinds of layers each weight is a role of its own.
        roles |= {f"{name}.weight": name for name in plan.others}
        # One of several matrices of a tensor goes by its module's name.
        roles |= {name.removesuffix(".weight"): role for name, role in roles.items()}
        stats: dict[str, InputStats] = {}
        seen: dict[str, list[Floats]] = {}

        def see(names: Sequence[str], x: Floats) -> None:
            wanted = dict.fromkeys(roles[name] for name in names if name in roles)
            if wanted:
                rows = np.array(x)
                for role in wanted:
                    seen.setdefault(role, []).append(rows)

        self._runner.load(plan.index)
        keys = values = 0.0
        for lengths, _, rows in self._rows():
            batch_keys, batch_values = self._runner.forward(lengths, rows, see)
            keys, values = max(keys, batch_keys), max(values, batch_values)
            # After the step: NumPy's threads and the engine's would wait for each other.
            for role, parts in seen.items():
                if role not in stats:
                    stats[role] = InputStats.make(
                        parts[0].shape[1], has_moments=has_moments, has_histogram=has_histogram
                    )
                stats[role].add(np.concatenate(parts), self._workers)
            seen.clear()
            self._on_batch()
        self._runner.unload()
        for each in stats.values():
            each.finish()
        return stats, keys, values

    def sensitivities(self, plan: LayerPlan, variants: Mapping[str, Tensors]) -> dict[str, float]:
        """By name of the variant, what the next layer's output changes with its weights: the mean
        over tokens of |dh|^2 / |h|^2."""
        outputs = []
        self._runner.load(plan.index)
        for lengths, _, rows in self._rows():
            self._runner.forward(lengths, rows)
            outputs.append(rows)
        errors = {}
        for name, tensors in variants.items():
            self._runner.load(plan.index, self._write_layer(tensors))
            total = 0.0
            batches = zip(self._rows(), outputs, strict=True)
            for (lengths, _, rows), expected in batches:
                self._runner.forward(lengths, rows)
                change = np.square(rows - expected).sum(-1)
                total += float((change / np.square(expected).sum(-1)).sum())
            errors[name] = total / self._text.num_tokens
            self._on_batch()
        self._runner.unload()
        return errors

    def advance(self, plan: LayerPlan, tensors: Tensors | None) -> None:
        """The next layer's outputs become the hidden states, with `tensors` as its weights, or, for
        None, with the model's own."""
        self._runner.load(plan.index, "" if tensors is None else self._write_layer(tensors))
        target = self._files[(self._next + 1) % 2]
        for lengths, begin, rows in self._rows():
            self._runner.forward(lengths, rows)
            target.write(begin, rows)
            self._on_batch()
        target.sync()
        self._runner.unload()
        self._next += 1

    def _write_layer(self, tensors: Tensors) -> str:
        """A folder with a layer of these weights."""
        write_tensors(
            self._layer_folder / "model.safetensors",
            put_together({name: raw(values, "float32") for name, values in tensors.items()}),
        )
        return str(self._layer_folder)

    def close(self) -> None:
        """Lets go of the files."""
        for file in self._files:
            file.close()

    def _embed(self) -> None:
        begin = 0
        for batch in self._batches:
            tokens = [token for sequence in batch for token in sequence]
            rows = np.empty((len(tokens), self.hidden_size), np.float32)
            self._runner.embed(tokens, [len(sequence) for sequence in batch], rows)
            self._files[0].write(begin, rows)
            begin += len(tokens)
        self._files[0].sync()

    def _rows(self) -> Iterator[tuple[list[int], int, Floats]]:
        """(lengths, first row, hidden states) of each batch, read as it is asked for."""
        begin = 0
        for batch in self._batches:
            lengths = [len(sequence) for sequence in batch]
            end = begin + sum(lengths)
            yield lengths, begin, self._files[self._next % 2].read(begin, end)
            begin = end


def _batches(sequences: Sequence[tuple[int, ...]], max_tokens: int) -> list[list[tuple[int, ...]]]:
    batches: list[list[tuple[int, ...]]] = [[]]
    num_tokens = 0
    for sequence in sequences:
        if num_tokens + len(sequence) > max_tokens and batches[-1]:
            batches.append([])
            num_tokens = 0
        batches[-1].append(sequence)
        num_tokens += len(sequence)
    return batches
