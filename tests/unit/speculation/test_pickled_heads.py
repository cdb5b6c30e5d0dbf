"""Heads in files of torch.save are read where they lie, and nothing that they say is run."""

from __future__ import annotations

import collections
import io
import os
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from checkpoints import checkpoint  # noqa: E402
from heads import random_head  # noqa: E402
from llmserve import (  # noqa: E402
    LLM,
    CorruptFile,
    LLMServeError,
    NotSupported,
    SamplingParams,
    _core_testing,
)

IDS = [5, 17, 200, 33, 8, 91]
NAMES = {"eagle": "pytorch_model.bin", "eagle3": "pytorch_model.bin", "medusa": "medusa_lm_head.pt"}


def pickled(
    method: str, folder: Path, write: Callable[[dict[str, Any], Path], None] = torch.save
) -> Path:
    """A head of `random_head`, as its authors' scripts save theirs. Returns the file."""
    from safetensors.torch import load_file

    random_head(method, checkpoint("llama"), folder)
    (file,) = folder.glob("*.safetensors")
    state = load_file(file)
    file.unlink()
    write(state, folder / NAMES[method])
    return folder / NAMES[method]


def logits(method: str, folder: Path) -> np.ndarray:
    found: np.ndarray = _core_testing.DraftHead(str(checkpoint("llama")), method, str(folder)).read(
        IDS
    )
    return found


@pytest.mark.parametrize("method", NAMES)
def test_it_is_the_head_that_safetensors_hold(tmp_path: Path, method: str) -> None:
    random_head(method, checkpoint("llama"), tmp_path / "safetensors")
    pickled(method, tmp_path / "pickled")
    expected = logits(method, tmp_path / "safetensors")
    np.testing.assert_array_equal(logits(method, tmp_path / "pickled"), expected)
    config = {"model": str(tmp_path / "pickled"), "adaptive": False}
    with LLM(
        str(checkpoint("llama")), speculative_config=config, max_model_len=64, num_threads=1
    ) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8), use_tqdm=False)
        assert llm.get_metrics().num_draft_tokens > 0


@pytest.mark.parametrize(
    "change",
    [
        lambda state: collections.OrderedDict(state),
        lambda state: {name: torch.nn.Parameter(t) for name, t in state.items()},
        # One storage of all: tensors are parts of it.
        lambda state: {
            name: part.view(state[name].shape)
            for name, part in zip(
                state,
                torch.cat([t.flatten() for t in state.values()]).split(
                    [t.numel() for t in state.values()]
                ),
                strict=True,
            )
        },
    ],
    ids=["state_dict", "parameters", "one storage"],
)
def test_what_torch_writes_of_the_same_tensors(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    random_head("medusa", checkpoint("llama"), tmp_path / "safetensors")
    pickled("medusa", tmp_path / "pickled", lambda state, file: torch.save(change(state), file))
    np.testing.assert_array_equal(
        logits("medusa", tmp_path / "pickled"), logits("medusa", tmp_path / "safetensors")
    )


def test_a_state_dict_of_a_module(tmp_path: Path) -> None:
    """It has an attribute with the versions of its modules."""

    def write(state: dict[str, Any], file: Path) -> None:
        with_versions = torch.nn.Linear(2, 2).state_dict()
        with_versions.clear()
        with_versions.update(state)
        assert with_versions._metadata
        torch.save(with_versions, file, pickle_protocol=4)

    random_head("medusa", checkpoint("llama"), tmp_path / "safetensors")
    pickled("medusa", tmp_path / "pickled", write)
    np.testing.assert_array_equal(
        logits("medusa", tmp_path / "pickled"), logits("medusa", tmp_path / "safetensors")
    )


class Attack:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def test_what_asks_for_a_call_is_refused_and_not_called(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def write(state: dict[str, Any], file: Path) -> None:
        torch.save({**state, "attack": Attack(mark)}, file)

    pickled("medusa", tmp_path / "head", write)
    with pytest.raises(NotSupported, match=r"medusa_lm_head.pt: asks for a call of \w+ system"):
        logits("medusa", tmp_path / "head")
    with pytest.raises(NotSupported, match="asks for a call"):
        LLM(str(checkpoint("llama")), speculative_config={"model": str(tmp_path / "head")})
    assert not mark.exists()


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda state, file: torch.save({"model": state}, file), "is not a tensor by its name"),
        (lambda state, file: torch.save(list(state.values()), file), "holds no dictionary"),
        (
            lambda state, file: torch.save(
                {n: t.mT if t.ndim == 2 else t for n, t in state.items()}, file
            ),
            "does not lie row by row",
        ),
        (
            lambda state, file: torch.save(state, file, _use_new_zipfile_serialization=False),
            "no zip file",
        ),
        (lambda state, file: file.write_bytes(pickle.dumps({"a": 1})), "no zip file"),
        (lambda state, file: file.write_bytes(b""), "no zip file"),
    ],
)
def test_what_else_there_may_be_is_told(
    tmp_path: Path, write: Callable[[dict[str, Any], Path], None], message: str
) -> None:
    pickled("medusa", tmp_path, write)
    with pytest.raises((CorruptFile, NotSupported), match=message):
        logits("medusa", tmp_path)


def rewrite(file: Path, change: Callable[[str, bytes], bytes], method: int = 0) -> None:
    """The zip file with other records."""
    with zipfile.ZipFile(file) as old:
        records = [(name, old.read(name)) for name in old.namelist()]
    with zipfile.ZipFile(file, "w", method) as new:
        for name, data in records:
            new.writestr(name, change(name, data))


def test_values_that_are_not_there_are_told(tmp_path: Path) -> None:
    file = pickled("medusa", tmp_path)
    whole = file.read_bytes()
    rewrite(file, lambda name, data: data, zipfile.ZIP_DEFLATED)
    with pytest.raises(NotSupported, match="records are compressed"):
        logits("medusa", tmp_path)
    file.write_bytes(whole)
    rewrite(file, lambda name, data: data[:8] if "/data/" in name else data)
    with pytest.raises(CorruptFile, match="leaves the record of its values"):
        logits("medusa", tmp_path)
    file.write_bytes(whole)
    rewrite(file, lambda name, data: b"big" if name.endswith("byteorder") else data)
    with pytest.raises(NotSupported, match="big-endian"):
        logits("medusa", tmp_path)


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n%s" + text("cpu") + b"K\x01tQ"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n(%s" + b"K\x00%s%s" + b"tR"
ONES = b"(" + b"K\x01" * 6000 + b"t"


@pytest.mark.parametrize(
    ("description", "message"),
    [
        (REBUILD % (STORAGE % text("0"), ONES, ONES), "a tensor of too many dimensions"),
        (STORAGE % text("0" * 900), "a record of a long name"),
        (text("a" * 900) + text("b") + b"\x93", "refers to a"),
        (text("a" * 5000), "a text of 5000 bytes"),
        (b"}(" + (text("a") + b"Nq\x00") + b"h\x00h\x00" * 70_000 + b"u", "too many tensors"),
    ],
)
def test_a_few_bytes_that_would_copy_much_are_refused(
    tmp_path: Path, description: bytes, message: str
) -> None:
    file = pickled("medusa", tmp_path)
    data = b"\x80\x02" + description + b"."
    rewrite(file, lambda name, old: data if name.endswith("data.pkl") else old)
    with pytest.raises((CorruptFile, NotSupported), match=message):
        logits("medusa", tmp_path)


def test_damage_is_told_whatever_it_is(tmp_path: Path) -> None:
    """Bytes of the description and of the directory, changed at random, and files cut short."""
    file = pickled("medusa", tmp_path)
    whole = file.read_bytes()
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        description = archive.read(name)
    begin = whole.index(description)
    rng = random.Random(4)
    num_told = 0
    for i in range(150):
        damaged = bytearray(whole)
        if i % 5 == 0:
            del damaged[rng.randrange(len(whole)) :]
        elif i % 5 == 1:
            at = len(whole) - 1 - rng.randrange(1500)
            damaged[at] = rng.randrange(256)
        else:
            for _ in range(rng.randrange(1, 4)):
                damaged[begin + rng.randrange(len(description))] = rng.randrange(256)
        file.write_bytes(damaged)
        try:
            logits("medusa", tmp_path)
        except LLMServeError:
            num_told += 1
    assert num_told > 75
