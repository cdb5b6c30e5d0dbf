"""What rounding each group of layers alone changes of its decoder layer's output."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llmserve.quantization.calibration_text import CalibrationText
from llmserve.quantization.calibrator import Calibrator
from llmserve.quantization.layer_plan import LayerPlan
from llmserve.quantization.layer_rounding import RoundingOptions, round_layer
from llmserve.quantization.mixed_precision import NUM_SEQUENCES, GroupCost
from llmserve.quantization.progress_bar import ProgressBar
from llmserve.quantization.schemes import Scheme
from llmserve.quantization.tensor_files import TensorFolder
from llmserve.quantization.workers import Workers, single_threaded_blas


def measure_sensitivity(
    model: Path,
    work: Path,
    text: CalibrationText,
    tensors: TensorFolder,
    plans: Sequence[LayerPlan],
    schemes: Mapping[str, Scheme],
    *,
    scale_dtype: str,
    num_threads: int,
    make_bar: Callable[[int, int], object],
) -> list[GroupCost]:
    """The cost of each unit of each layer, over a few sequences of the text. `work` is a folder for
    hidden states."""
    few = CalibrationText(text.sequences[:NUM_SEQUENCES], text.source)
    folder = work / "sensitivity"
    folder.mkdir(exist_ok=True)
    costs = []
    rounding = RoundingOptions("rtn", scale_dtype)
    with ProgressBar(make_bar) as bar, Workers(num_threads) as workers, single_threaded_blas():
        calibrator = Calibrator(
            model, folder, few, workers=workers, next_layer=0, on_batch=bar.advance
        )
        num_variants = sum(len(_units(plan, schemes)) for plan in plans)
        bar.begin(num_variants + len(plans) * calibrator.num_batches, 0)
        for plan in plans:
            floats = tensors.floats_below(plan.prefix)
            units = _units(plan, schemes)
            variants = {}
            for unit, names in units.items():
                own = {name: schemes[name] for name in names}
                rounded = round_layer(plan, floats, {}, {}, own, rounding, workers)
                weights = {f"{n}.weight": w.values() for n, w in rounded.weights.items()}
                variants[unit] = floats | weights
            errors = calibrator.sensitivities(plan, variants)
            for unit, names in units.items():
                shapes = tuple(tensors.shape(f"{name}.weight") for name in names)
                costs.append(GroupCost(names, shapes, errors[unit]))  # type: ignore[arg-type]
            if plan.index < len(plans) - 1:
                calibrator.advance(plan, None)
        calibrator.close()
    shutil.rmtree(folder)
    return costs


def _units(plan: LayerPlan, schemes: Mapping[str, Scheme]) -> dict[str, tuple[str, ...]]:
    """What gets the same bits: layers that engines fuse, what all experts have in the same place,
    and all others of a layer."""
    units: dict[str, tuple[str, ...]] = {group.role: group.names for group in plan.shared_groups}
    for group in plan.expert_groups:
        unit = "experts." + group.role.rpartition(".")[2]
        units[unit] = units.get(unit, ()) + group.names
    units["others"] = plan.others
    named = {
        unit: tuple(name for name in names if name in schemes) for unit, names in units.items()
    }
    return {unit: names for unit, names in named.items() if names}
