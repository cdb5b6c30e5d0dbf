"""Where a checkpoint is, and its JSON files: read with bounds, checked field by field.

The bytes are untrusted: nothing is executed, nothing outside the directory is opened, sizes are
bounded, and what does not fit is a CorruptFile that names the file and the field.
"""

import difflib
import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from llmserve import _core
from llmserve.checkpoint.draft_folders import is_pickled_head, read_draft_folder
from llmserve.checkpoint.foreign import (
    is_lfs_pointer,
    lfs_error,
    refuse_foreign_folder,
    refuse_lfs_pointers,
)
from llmserve.checkpoint.model_name import ModelName, parse_model_name
from llmserve.checkpoint.repository import is_gguf_model
from llmserve.common.arguments import INT32_MAX, describe, integer, text
from llmserve.common.units import human_bytes
from llmserve.errors import CorruptFile, InvalidArgument, LLMServeError, NotSupported

# Published files: config.json under 100 KB, tokenizer.json up to 35 MB (262,144 tokens).
MAX_CONFIG_BYTES = 16 * 2**20
MAX_TOKENIZER_BYTES = 256 * 2**20
# Of a JSON object: Python takes some 70 bytes for one, where the file takes three.
MAX_CONFIG_VALUES = 2**20

JsonObject = Mapping[str, object]
Value = TypeVar("Value")


def demo_model_path() -> Path:
    """The demo model that ships inside the package: a Llama-architecture checkpoint of about 3 M
    parameters.

    >>> (demo_model_path() / "config.json").is_file()
    True
    """
    return Path(__file__).parents[1] / "demo" / "model"


def demo_draft_path() -> Path:
    """A draft of it for speculative decoding: a tenth of its size, the same tokenizer."""
    return Path(__file__).parents[1] / "demo" / "draft"


def demo_text_path() -> Path:
    """Text that the demo model has not seen: documents of its generator's held-out seed."""
    return Path(__file__).parents[1] / "demo" / "held_out.txt"


def demo_calibration_path() -> Path:
    """Text to calibrate the demo model with: documents of its generator from another seed, of which
    neither its training nor the held-out text has any."""
    return Path(__file__).parents[1] / "demo" / "calibration.txt"


def find_checkpoint(
    model: object,
    revision: object = None,
    download_dir: object = None,
    *,
    is_overridden: bool = False,
    is_draft: bool = False,
) -> Path:
    """The checkpoint that `model` names: a folder with a config.json, a .safetensors file beside
    one, or a .gguf file, alone or the only one of a folder. What is no path is a name on the
    Hugging Face Hub (`parse_model_name`) and is downloaded; what only a path can be named is not
    asked of the Hub. is_overridden: other fields than config.json's will be read, so that it does
    not say yet whether the model runs. is_draft: it may be a head in a file of torch.save, too.

    Raises InvalidArgument, NotSupported, CorruptFile, HubError.
    """
    path = _model_path(model)
    name = _hub_name(model, path)
    if name is not None:
        check = _refuse_quantized if is_overridden else _refuse_config
        from llmserve.checkpoint.hub import download_model  # only for a model by its id

        path = download_model(
            name, *_hub_arguments(revision, download_dir), check, may_be_pickled_head=is_draft
        )
        if is_draft and path.is_dir() and not is_pickled_head(path):
            refuse_foreign_folder(path)
    elif revision is not None:
        raise InvalidArgument(
            f"revision is for models of the Hugging Face Hub, and {str(path)!r} is a path"
        )
    else:
        check_access(path)
        path = only_gguf(path) or path
        _check_checkpoint(path)
        names = ("config.json", "*.safetensors")
        files = (file for name in names for file in path.glob(name)) if path.is_dir() else [path]
        refuse_lfs_pointers(files)
    return path


def is_on_the_hub(model: object) -> bool:
    """Whether find_checkpoint takes it for a name on the Hugging Face Hub. Raises InvalidArgument
    for what is neither a name nor a path."""
    return _hub_name(model, _model_path(model)) is not None


def plain_name(model: object) -> str:
    """What a model that nobody named is called: its id on the Hub, or what its path ends with.
    Where it lies is nobody's business."""
    path = Path(os.fsdecode(model) if isinstance(model, str | bytes | os.PathLike) else "")
    return (path.resolve().name or str(path)) if path.exists() else str(path)


def find_tokenizer_folder(
    name: object, revision: object = None, download_dir: object = None
) -> Path:
    """The folder or file of a tokenizer: a path, or a model's name on the Hub, of which only the
    tokenizer is downloaded. Raises InvalidArgument, NotSupported, HubError."""
    is_path = isinstance(name, str | os.PathLike)
    if is_path and os.path.exists(name):  # type: ignore[arg-type]
        return Path(os.fsdecode(name))  # type: ignore[arg-type]
    hub_name = _hub_name(name, Path(os.fsdecode(name))) if is_path else None  # type: ignore[arg-type]
    if hub_name is not None and ("/" in hub_name.model_id or hub_name.is_address):
        from llmserve.checkpoint.hub import download_tokenizer  # as above

        return download_tokenizer(hub_name, *_hub_arguments(revision, download_dir))
    raise InvalidArgument(
        f"tokenizer must be a folder with a tokenizer, the file of one (tokenizer.json, "
        f"tekken.json, tokenizer.model, vocab.json, *.tiktoken, *.gguf) or a model's id on the "
        f"Hugging Face Hub, got {describe(name)}"
    )


def _hub_name(model: object, path: Path) -> ModelName | None:
    """The name of a model on the Hub; None for what is a path, or, mistyped, was to be one:
    nobody's paths are sent to the Hub."""
    name = parse_model_name(model) if isinstance(model, str) else None
    if name is None or name.is_address:
        return name
    return None if os.path.lexists(path) or path.is_absolute() else name


def _hub_arguments(revision: object, download_dir: object) -> tuple[str | None, Path | None]:
    return (
        None if revision is None else text("revision", revision),
        None if download_dir is None else _directory("download_dir", download_dir),
    )


def is_gguf(path: Path) -> bool:
    """Whether a checkpoint is a GGUF file, which holds all that there is to the model."""
    return path.suffix == ".gguf"


def text_source(checkpoint: Path) -> Path:
    """Where all but the weights of a checkpoint is: its folder, or the GGUF file itself."""
    return checkpoint if checkpoint.is_dir() or is_gguf(checkpoint) else checkpoint.parent


def _model_path(model: object) -> Path:
    if not isinstance(model, str | os.PathLike):
        raise InvalidArgument(
            f"model must be the path of a checkpoint directory or the id of a model on the Hugging "
            f"Face Hub, got {describe(model)}"
        )
    name = os.fsdecode(os.fspath(model))
    if not name or "\0" in name:
        raise InvalidArgument(f"model must be a path, got {describe(model)}")
    path = Path(name)
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"model must be a path in UTF-8, got {describe(model)}; rename it, or pass a link to it"
        ) from error
    return path


def check_access(path: Path) -> None:
    """Of what may not be looked at, `exists` and its like say only that it is not there.
    Raises InvalidArgument."""
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            os.stat(os.path.join(path, os.curdir))  # takes the right to open what is in it
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise InvalidArgument(f"model: {path} cannot be read: {error.strerror}") from error


def only_gguf(path: Path) -> Path | None:
    """The GGUF file of a folder without safetensors, the first of its parts if it is split."""
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    files = [file for file in sorted(path.glob("*.gguf")) if is_gguf_model(file.name)]
    if len(files) > 1:
        raise InvalidArgument(
            f"model: {path} has several GGUF files; pass the path of one: "
            f"{', '.join(file.name for file in files)}"
        )
    return files[0] if files else None


def _check_checkpoint(path: Path) -> None:
    if is_gguf(path) and path.is_file():
        return
    is_weights = path.suffix == ".safetensors" and path.is_file()
    if not path.is_dir() and not is_weights:
        found = "a file" if path.exists() else "nothing"
        raise InvalidArgument(
            f"model must be a checkpoint directory (config.json, *.safetensors, tokenizer.json), a "
            f".safetensors file in one, a .gguf file, or the id of a model on the Hugging Face Hub "
            f"such as Qwen/Qwen3-0.6B; there is {found} at {str(path)!r}{_near(path)}"
        )
    directory = path.parent if is_weights else path
    if not is_weights and not is_pickled_head(directory):
        refuse_foreign_folder(directory)
    is_mistral = os.path.lexists(directory / "params.json") and path.is_dir()
    if not os.path.lexists(directory / "config.json") and not is_mistral:
        raise InvalidArgument(
            f"{directory} has no config.json; a checkpoint directory holds config.json, "
            f"*.safetensors and tokenizer.json"
        )


def _near(path: Path) -> str:
    """A name beside a path that is not there which it may have meant."""
    try:
        names = [] if path.exists() else os.listdir(path.parent)
    except OSError:
        return ""
    found = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {str(path.parent / found[0])!r}?" if found else ""


def _refuse_quantized(directory: Path) -> None:
    """By the name of the method, if it is none that llmserve reads. What else is wrong with a
    config.json is said when the model is loaded."""
    try:
        _core.check_quantization(str(directory / "config.json"))
    except NotSupported:
        raise
    except LLMServeError:
        return


def _refuse_config(directory: Path) -> None:
    """What a config.json by itself says is not supported. What else is wrong with it is said when
    the model is loaded, and of a head when it is loaded beside its model."""
    if read_draft_folder(directory).method != "draft_model":
        return
    try:
        _core.plan_memory(_core.ConfigRequest(model=str(directory / "config.json")))
    except NotSupported:
        raise
    except LLMServeError:
        return


def _directory(name: str, value: object) -> Path:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise InvalidArgument(f"{name} must be the path of a folder, got {describe(value)}")
    return Path(os.fsdecode(value))


def config_file(model: object) -> Path | None:
    """`model` as a config.json by itself, None if it is something else. Raises InvalidArgument."""
    path = _model_path(model)
    return path if path.suffix == ".json" and os.path.isfile(path) else None


def read_bytes(directory: Path, name: str, max_bytes: int) -> bytes | None:
    """The contents of a regular file of the directory, None if it is absent.

    Raises CorruptFile for a link that leaves the directory, for anything but a regular file and
    for one above `max_bytes`.
    """
    path = directory / name
    if not os.path.lexists(path):
        return None
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as error:  # a link that leads to itself
        raise CorruptFile(f"{path}: cannot be read: {error}") from error
    if not target.is_relative_to(_link_root(directory)):
        raise CorruptFile(f"{path}: links to {target}, outside the checkpoint directory")
    try:
        status = target.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CorruptFile(f"{path}: expected a regular file")
        if status.st_size > max_bytes:
            raise CorruptFile(
                f"{path}: {human_bytes(status.st_size)}, more than the {human_bytes(max_bytes)} "
                f"allowed for such a file"
            )
        with target.open("rb") as file:
            data = file.read(status.st_size)  # room for more would be made at once
        if is_lfs_pointer(data):
            raise lfs_error(path)
        return data
    except OSError as error:
        if isinstance(error, CorruptFile):
            raise
        raise CorruptFile(f"{path}: cannot be read: {error.strerror}") from error


def _link_root(directory: Path) -> Path:
    """Where links may lead: the directory, or, for one in the cache layout of huggingface-hub
    (<repo>/snapshots/<revision>, linking to <repo>/blobs), the repository's folder."""
    resolved = directory.resolve()
    if resolved.parent.name == "snapshots" and (resolved.parent.parent / "blobs").is_dir():
        return resolved.parent.parent
    return resolved


def parse_json_object(data: bytes, path: Path, max_values: int = MAX_CONFIG_VALUES) -> JsonObject:
    """The JSON object in `data`. Raises CorruptFile that names the file and where it breaks."""
    if len(data) > max_values and data.count(b",") > max_values:
        raise CorruptFile(f"{path}: more than the {max_values} values allowed for such a file")
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise CorruptFile(f"{path}: not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise CorruptFile(f"{path}: not JSON at byte {error.pos}: {error.msg}") from error
    except (RecursionError, ValueError) as error:  # ValueError: an integer of too many digits
        raise CorruptFile(f"{path}: not JSON that can be read: {error}") from error
    if not isinstance(value, dict):
        raise CorruptFile(f"{path}: expected a JSON object, got {describe(value)}")
    return value


def read_json_object(directory: Path, name: str) -> JsonObject | None:
    """A small JSON file of the directory, None if it is absent. Raises CorruptFile."""
    data = read_bytes(directory, name, MAX_CONFIG_BYTES)
    return None if data is None else parse_json_object(data, directory / name)


def checked_field(
    path: Path, fields: JsonObject, name: str, check: Callable[[str, object], Value]
) -> Value | None:
    """A field that is absent or null is None; a bad one is the file's fault."""
    value = fields.get(name)
    if value is None:
        return None
    try:
        return check(name, value)
    except InvalidArgument as error:
        raise CorruptFile(f"{path}: {error}") from error


def token_id_tuple(name: str, value: object) -> tuple[int, ...]:
    """One token id or a list of them."""
    items = value if isinstance(value, list) else [value]
    return tuple(integer(name, item, 0, INT32_MAX) for item in items)
