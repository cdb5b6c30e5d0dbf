"""The vocabulary of a draft model that has another tokenizer than its target."""

from collections.abc import Mapping
from pathlib import Path

from llmserve import _core
from llmserve.checkpoint.model_files import is_gguf
from llmserve.errors import InvalidArgument
from llmserve.tokenization.tokenizer import Tokenizer


def read_draft_vocabulary(config: Mapping[str, object] | None) -> list[_core.Vocabulary]:
    """That of speculative_config's model, a folder or GGUF file, where its tokens are mapped by
    their text; else none. Raises InvalidArgument if it has no tokenizer."""
    if not config or not config.get("use_heterogeneous_vocab"):
        return []
    path = Path(str(config["model"]))
    gguf = _core.GgufFile(str(path)) if is_gguf(path) else None
    tokenizer = Tokenizer.from_path(path, None, gguf)
    if tokenizer is None:
        raise InvalidArgument(
            f"speculative_config: use_heterogeneous_vocab maps tokens by their text, and model "
            f"{path} has no tokenizer"
        )
    return [tokenizer.to_core()]
