// Which layers see a sliding window, as the Qwen families and their kin write it.
#pragma once

#include "io/json.h"
#include "models/model_config.h"

namespace llmserve {

// From layer_types, or else max_window_layers, where use_sliding_window turns sliding_window on.
// Throws CorruptFile, naming the field.
void read_layer_windows(const JsonNode& json, ModelConfig& config);

}  // namespace llmserve
