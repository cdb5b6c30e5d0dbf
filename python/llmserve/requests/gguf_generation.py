"""What a GGUF file's metadata says beside the model's shape, which the engine reads."""

from pathlib import Path

from llmserve import _core
from llmserve.checkpoint.model_files import JsonObject
from llmserve.tokenization.gguf_tokenizer import GgufVocabulary

# general.sampling.*, as llama.cpp's converter writes a generation_config.json.
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def gguf_generation_fields(path: Path, file: _core.GgufFile | None = None) -> JsonObject:
    """The fields of a generation_config.json that a file implies. `file` is `path`, where it is
    open already. Raises CorruptFile."""
    file = _core.GgufFile(str(path)) if file is None else file
    sampling = file.metadata("general.sampling.")
    fields = {field: sampling[key] for key, field in _SAMPLING.items() if key in sampling}
    vocabulary = GgufVocabulary(path, file)
    ends = vocabulary.end_ids if vocabulary.exists else []
    return {**fields, "eos_token_id": ends} if ends else fields
