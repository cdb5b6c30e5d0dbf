"""Folders and repositories that hold something else than a model which llmserve reads: each is
told for what it is."""

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from llmserve.errors import CorruptFile, NotSupported

_LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"
_MAX_POINTER_BYTES = 1024  # published pointers: about 130

# (what a name matches, what such a folder is and what to do), in the order in which they are tried.
_KINDS = (
    (
        ("openvino_model.xml", "openvino_language_model.xml", "openvino/*.xml"),
        "is a model of OpenVINO (*.xml and *.bin), which only OpenVINO runs; use the model that it "
        "was converted from, in safetensors, or a GGUF file of it",
    ),
    (
        ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"),
        "is a LoRA adapter, which is not a model by itself, and adapters are not supported yet; "
        "merge it into its base model (merge_and_unload() of peft) and use the result",
    ),
    (
        ("model_index.json",),
        "is a pipeline of diffusers, which makes images; llmserve runs models of text",
    ),
    (
        ("*.onnx", "onnx/*.onnx"),
        "is a model in ONNX; use the one that it was converted from, in safetensors, or a GGUF "
        "file of it",
    ),
    (
        ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl"),
        "has no *.safetensors; pickled weights (*.bin, *.pt) run code when they are loaded and are "
        "not read. Look for a revision or a copy of the model with safetensors",
    ),
    (
        ("tf_model.h5", "flax_model.msgpack", "*.tflite", "*.keras"),
        "is a model of TensorFlow or Flax; look for a copy of it with safetensors",
    ),
    (
        ("*.mlmodelc", "*.mlpackage", "*.mlpackage/*", "*.mlmodelc/*"),
        "is a model of Core ML; look for a copy of it with safetensors",
    ),
)


def refuse_foreign(names: Collection[str], where: str) -> None:
    """Raises NotSupported for what is known by the names of its files."""
    for patterns, what in _KINDS:
        if any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
            raise NotSupported(f"{where} {what}")


def refuse_foreign_folder(folder: Path) -> None:
    """As `refuse_foreign`, of a folder that has no weights llmserve reads. Raises NotSupported."""
    names = [entry.name for entry in folder.iterdir()]
    if not any(
        name.endswith((".safetensors", ".gguf")) and "adapter" not in name for name in names
    ):
        refuse_foreign(names, str(folder))


def is_lfs_pointer(data: bytes) -> bool:
    """Whether a file's bytes are what git has in place of a large file that was not fetched."""
    return data.startswith(_LFS_POINTER)


def lfs_error(path: Path) -> CorruptFile:
    """What is said of such a file."""
    return CorruptFile(
        f"{path}: a git-lfs pointer, not the file itself; run `git lfs install` and `git lfs pull` "
        f"in {path.parent}, or download the model by its id"
    )


def refuse_lfs_pointers(files: Iterable[Path]) -> None:
    """Raises CorruptFile for the first of files of weights that is a pointer."""
    for path in files:
        try:
            if path.stat().st_size <= _MAX_POINTER_BYTES and is_lfs_pointer(path.read_bytes()):
                raise lfs_error(path)
        except OSError as error:
            if isinstance(error, CorruptFile):
                raise
            continue  # opening it says what is wrong
