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


def gguf_generation_fields(path: Path) -> JsonObject:
    """The fields of a generation_config.json that the file implies. Raises CorruptFile."""
    sampling = _core.read_gguf_metadata(str(path), "general.sampling.")
    fields = {field: sampling[key] for key, field in _SAMPLING.items() if key in sampling}
    vocabulary = GgufVocabulary(path)
    ends = vocabulary.end_ids if vocabulary.exists else []
    return {**fields, "eos_token_id": ends} if ends else fields
