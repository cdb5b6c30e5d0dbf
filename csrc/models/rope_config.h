// The rotary embeddings of a config, in the spellings of transformers 4 and 5.
#pragma once

#include "io/json.h"
#include "models/model_config.h"

namespace llmserve {

// Fills in config.ropes from rope_parameters or rope_scaling and the fields beside them, with
// config.rope_defaults for what is absent. Needs the dimensions. Throws CorruptFile, NotSupported,
// naming the field.
void read_ropes(const JsonNode& json, ModelConfig& config);

}  // namespace llmserve
