"""From a model's folder to one GGUF file."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from llmserve.checkpoint.model_files import find_checkpoint
from llmserve.common.units import human_bytes
from llmserve.errors import InvalidArgument, NotSupported
from llmserve.quantization.gguf_model import find_mix, write_model
from llmserve.quantization.options import QuantizeOptions
from llmserve.quantization.result import QuantizeResult
from llmserve.quantization.tensor_files import TensorFolder, telling_full_disks

# What a GGUF file has no place for.
_OTHERS = ("calibration", "group_size", "target_bits", "target_size")


class GgufPipeline:
    """One run, as Pipeline is. OUT is a file *.gguf, or a folder that the file is written to."""

    def __init__(
        self, model: object, out: object, options: QuantizeOptions, *, say: Callable[[str], None]
    ) -> None:
        mix = find_mix(options.scheme)
        assert mix is not None
        self._mix = mix
        self.options = options
        self._say = say
        given = [name for name in _OTHERS if getattr(options, name) is not None]
        if given or options.method not in ("auto", "rtn") or options.kv_cache != "auto":
            what = ", ".join(given) or (
                f"method={options.method}" if options.kv_cache == "auto" else "kv_cache"
            )
            raise NotSupported(f"gguf files are rounded to nearest; leave out {what}")
        self.model = find_checkpoint(model)
        if not self.model.is_dir():
            raise NotSupported(f"{self.model}: quantize reads folders of safetensors")
        path = Path(os.fspath(out))  # type: ignore[call-overload]
        is_file = path.suffix == ".gguf"
        self.file = path if is_file else path / f"{self.model.name}-{mix}.gguf"
        if self.file.exists() and not options.overwrite:
            raise InvalidArgument(f"{self.file} exists; pass --overwrite, or another name")

    def run(self) -> QuantizeResult:
        """Writes the file."""
        begin = time.monotonic()
        tensors = TensorFolder(self.model)
        largest = max(tensors.num_bytes(name) for name in tensors)
        planned = 6 * largest  # floats of twice the bytes, and a strip of blocks
        self._say(f"{self.file}: {self._mix}, takes at most {human_bytes(planned)} of memory")
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with telling_full_disks(self.file):
            kinds = write_model(self.model, self.file, self._mix)
        after = self.file.stat().st_size
        count = sum(_count(tensors.shape(name)) for name in tensors)
        return QuantizeResult(
            out=self.file,
            scheme=f"gguf:{self._mix}",
            method="rtn",
            bytes_before=sum(tensors.num_bytes(name) for name in tensors),
            bytes_after=after,
            bits_per_weight=8 * after / count,
            seconds=time.monotonic() - begin,
            planned_bytes=planned,
            peak_bytes=0,
            num_tokens=0,
            errors={},
            schemes=kinds,
            notes=(),
        )


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
