"""What a killed run leaves behind, and whether another one may go on from it."""

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from llmserve.errors import InvalidArgument

WORK_FOLDER = ".quantize"
_STATE = "state.json"


@dataclass(slots=True)
class LayerRecord:
    """Of a layer that is done: errors by linear layer, notes, seconds, largest keys and values."""

    index: int
    errors: dict[str, float]
    notes: list[str]
    seconds: float
    keys: float = 0.0
    values: float = 0.0


@dataclass(slots=True)
class Progress:
    """How far a run came. `key` tells runs apart that would write other bytes."""

    key: str
    layers: list[LayerRecord] = field(default_factory=list)
    schemes: dict[str, str] = field(default_factory=dict)  # of mixed precision, by module


class WorkFolder:
    """OUT/.quantize: the progress, the hidden states, and the layer that is being run."""

    def __init__(self, out: Path) -> None:
        self.path = out / WORK_FOLDER

    def begin(self, key: str, *, resume: bool, overwrite: bool) -> Progress:
        """The progress of the same run if there is one, and otherwise a new one in an empty folder.
        Raises InvalidArgument where OUT has something else."""
        out = self.path.parent
        progress = self._read()
        if progress is not None and progress.key == key and resume:
            return progress
        if out.exists() and any(out.iterdir()):
            if progress is not None and not overwrite:
                raise InvalidArgument(
                    f"{out} has the beginning of a run with other settings or of another model; "
                    f"pass the same ones to go on, --overwrite to begin anew, or another folder"
                )
            if not overwrite:
                raise InvalidArgument(f"{out} is not empty; pass --overwrite, or another folder")
            if progress is None and not is_quantized(out):
                raise InvalidArgument(
                    f"{out} is no folder of a quantized model (config.json has no "
                    f"quantization_config), and is not overwritten; pass another, or remove it "
                    f"yourself"
                )
            shutil.rmtree(out)
        self.path.mkdir(parents=True, exist_ok=True)
        progress = Progress(key)
        self.write(progress)
        return progress

    def write(self, progress: Progress) -> None:
        """Whole or not at all."""
        partial = self.path / (_STATE + ".partial")
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(asdict(progress), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.path / _STATE)

    def remove(self) -> None:
        """Once all is done."""
        shutil.rmtree(self.path)

    def _read(self) -> Progress | None:
        try:
            stored = json.loads((self.path / _STATE).read_text(encoding="utf-8"))
            layers = [LayerRecord(**record) for record in stored["layers"]]
            return Progress(stored["key"], layers, stored["schemes"])
        except (OSError, ValueError, TypeError, KeyError):
            return None  # none, or none that can be read


def is_quantized(folder: Path) -> bool:
    """Whether it holds a model in a quantized format, as a run writes it."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "quantization_config" in config


def run_key(settings: object, folder: Path, text: object) -> str:
    """A digest of settings, of the model's files by name, size and time, and of the tokens."""
    files = sorted(
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.iterdir()
        if path.is_file()
    )
    return hashlib.sha256(repr((settings, files, text)).encode()).hexdigest()
