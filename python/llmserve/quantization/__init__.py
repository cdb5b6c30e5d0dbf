"""Quantizes a model's linear layers and writes folders that others load, too."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmserve.checkpoint.model_files import demo_model_path, demo_text_path
from llmserve.quantization.options import QuantizeOptions

if TYPE_CHECKING:
    from llmserve.quantization.gguf_pipeline import GgufPipeline
    from llmserve.quantization.pipeline import Pipeline
    from llmserve.quantization.report import Report
    from llmserve.quantization.result import QuantizeResult

__all__ = ["QuantizeOptions", "make_pipeline", "quantize", "report_on"]


def make_pipeline(
    model: object,
    out: object,
    options: QuantizeOptions,
    *,
    say: Callable[[str], None],
    bar: Callable[[int, int], Any],
) -> "Pipeline | GgufPipeline":
    """What carries a scheme out. say() is told what people should know; bar() makes a progress bar
    of a number of steps, some of them done, or None. Raises what quantize() raises."""
    # NumPy, which the package's face leaves alone
    from llmserve.quantization.gguf_pipeline import GgufPipeline
    from llmserve.quantization.pipeline import Pipeline

    if options.scheme.lower().startswith("gguf:"):
        return GgufPipeline(model, out, options, say=say)
    return Pipeline(model, out, options, say=say, bar=bar)


def report_on(result: "QuantizeResult", model: Path, settings: QuantizeOptions) -> "Report":
    """Measures the model before and after, and writes both forms of the report into the folder. The
    text is settings.eval_text, or the demo's held-out one for the demo."""
    from llmserve.quantization.report import make_report, write_report

    text = None if settings.eval_text is None else Path(settings.eval_text)
    if text is None and model == demo_model_path():
        text = demo_text_path()
    report = make_report(result, model, text, num_threads=settings.threads())
    write_report(report)
    return report


def quantize(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    use_tqdm: bool = True,
    **options: Any,
) -> "QuantizeResult":
    """Quantizes the checkpoint `model` into the folder `out`. The options are QuantizeOptions'.

    Raises InvalidArgument, NotSupported, CorruptFile.

    >>> import tempfile
    >>> from llmserve import demo_model_path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     options = {"scheme": "int8", "report": False, "use_tqdm": False}
    ...     result = quantize(demo_model_path(), f"{folder}/int8", **options)
    >>> result.method, round(result.bits_per_weight, 1)
    ('rtn', 8.1)
    """

    def bar(total: int, done: int) -> Any:
        if not use_tqdm:
            return None
        from tqdm.auto import tqdm

        return tqdm(total=total, initial=done, unit="step", dynamic_ncols=True, desc="quantize")

    def say(text: str) -> None:
        if use_tqdm:
            from tqdm.auto import tqdm

            tqdm.write(text)

    settings = QuantizeOptions(**options)
    pipeline = make_pipeline(model, out, settings, say=say, bar=bar)
    result = pipeline.run()
    if settings.report:
        report_on(result, pipeline.model, settings)
    return result
