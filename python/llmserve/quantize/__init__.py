"""Quantizes a model's linear layers and writes folders that others load, too."""

import os
from typing import TYPE_CHECKING, Any

from llmserve.quantize.options import QuantizeOptions

if TYPE_CHECKING:
    from llmserve.quantize.pipeline import QuantizeResult

__all__ = ["QuantizeOptions", "quantize"]


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
    ...     result = quantize(demo_model_path(), f"{folder}/int8", scheme="int8", use_tqdm=False)
    >>> result.method, round(result.bits_per_weight, 1)
    ('rtn', 8.1)
    """

    from llmserve.quantize.pipeline import Pipeline  # NumPy, which the package's face leaves alone

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
    return Pipeline(model, out, settings, say=say, bar=bar).run()
