// From config.json, in the spellings of transformers 4 and 5, to a ModelConfig. Other formats write
// their metadata in those spellings first.
#pragma once

#include "io/json.h"
#include "models/model_config.h"

namespace llmserve {

// Reads and validates. `max_model_len` 0 takes max_position_embeddings. Throws CorruptFile (a field
// that is absent or out of range, by name), NotSupported (architecture, activation, RoPE type:
// names what is), InvalidArgument (max_model_len too long, with the longest).
ModelConfig read_model_config(const JsonDocument& document, int64_t max_model_len = 0);

}  // namespace llmserve
