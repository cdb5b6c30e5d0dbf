"""The text that a model is calibrated with, as sequences of its tokens."""

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.checkpoint.model_files import demo_calibration_path, demo_model_path
from llmserve.errors import InvalidArgument
from llmserve.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Sequences of token ids, each seen from position 0 on, with the tokens that the model's
    tokenizer puts in front of a text, such as BOS."""

    sequences: tuple[tuple[int, ...], ...]
    source: str

    @property
    def num_tokens(self) -> int:
        """Of all sequences."""
        return sum(len(sequence) for sequence in self.sequences)


def default_text(model: Path) -> Path | None:
    """The demo's own text, which its held-out one has nothing of; no other model has one."""
    return demo_calibration_path() if model == demo_model_path() else None


def read_calibration(
    path: Path, tokenizer: Tokenizer, *, num_samples: int, max_length: int, seed: int
) -> CalibrationText:
    """At most num_samples sequences of at most max_length tokens: of a text, windows one after
    another, spread over all of it; of a JSONL file, its documents in an order that `seed` draws,
    each cut into windows. Raises InvalidArgument for a file that is neither, or has no text."""
    if path.suffix in (".jsonl", ".ndjson"):
        documents = list(_documents(path))
        random.Random(seed).shuffle(documents)
        chunks = _windows((_encode(document, tokenizer) for document in documents), max_length)
        sequences = []
        wanted = num_samples * max_length  # short documents may be more
        for chunk in chunks:
            if wanted <= 0:
                break
            sequences.append(tuple(chunk[:wanted]))
            wanted -= len(chunk)
    else:
        sequences = _spread(path, tokenizer, num_samples, max_length)
    sequences = [sequence for sequence in sequences if len(sequence) > 1]
    if not sequences:
        raise InvalidArgument(f"--calibration {path}: expected a text of two tokens or more")
    return CalibrationText(tuple(sequences), path.name)


def _spread(
    path: Path, tokenizer: Tokenizer, num_samples: int, max_length: int
) -> list[tuple[int, ...]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"--calibration {path}: expected UTF-8 text, got {error}") from error
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    front = _front(tokenizer)
    length = max_length - len(front)
    starts = list(range(0, max(len(token_ids) - length // 2, 1), length))
    if len(starts) > num_samples:
        starts = [starts[i * len(starts) // num_samples] for i in range(num_samples)]
    return [tuple(front + token_ids[start : start + length]) for start in starts]


def _front(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts before a text."""
    bare = tokenizer.encode("a", add_special_tokens=False)
    full = tokenizer.encode("a")
    return full[: full.index(bare[0])] if bare and bare[0] in full else []


def _windows(documents: Iterable[list[int]], max_length: int) -> Iterator[list[int]]:
    for token_ids in documents:
        for begin in range(0, len(token_ids), max_length):
            yield token_ids[begin : begin + max_length]


def _encode(document: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    if "messages" in document:
        return list(tokenizer.apply_chat_template(document["messages"], tokenize=True))  # type: ignore[arg-type]
    if "text" in document:
        return tokenizer.encode(document["text"])
    return tokenizer.encode(document["prompt"] + document["completion"])


def _documents(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"--calibration {path}: expected UTF-8 text, got {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
        except ValueError as error:
            raise InvalidArgument(f"--calibration {path}, line {number}: {error}") from error
        texts = [["text"], ["prompt", "completion"]]
        is_known = isinstance(document, dict) and (
            isinstance(document.get("messages"), list)
            or any(all(isinstance(document.get(key), str) for key in keys) for keys in texts)
        )
        if not is_known:
            raise InvalidArgument(
                f"--calibration {path}, line {number}: expected an object with text, with "
                f"messages, or with prompt and completion"
            )
        yield document
