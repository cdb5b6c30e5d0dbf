// From config.json, in the spellings of transformers 4 and 5, to a ModelConfig. Other formats write
// their metadata in those spellings first.
#pragma once

#include <string_view>

#include "io/json.h"
#include "models/model_config.h"

namespace llmserve {

// Reads and validates. `max_model_len` 0 takes max_position_embeddings. Throws CorruptFile (a field
// that is absent or out of range, by name), NotSupported (architecture, activation, RoPE type:
// names what is), InvalidArgument (max_model_len too long, with the longest).
ModelConfig read_model_config(const JsonDocument& document, int64_t max_model_len = 0);

// The same of an object within a document that describes a decoder of a known architecture,
// whatever architecture it names: a head that drafts.
ModelConfig read_config_as(const JsonNode& json, std::string_view architecture);

}  // namespace llmserve
