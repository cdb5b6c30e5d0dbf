// Which layers see a sliding window.
#pragma once

#include <functional>

#include "io/json.h"
#include "models/model_config.h"

namespace llmserve {

// Sets the windows of the layers that layer_types calls sliding, or, where it is absent, of those
// for which is_sliding says so. `window` 0: there is none. Throws CorruptFile, naming the field.
void set_windows(const JsonNode& json, int32_t window,
                 const std::function<bool(int64_t layer_idx)>& is_sliding, ModelConfig& config);

// The field sliding_window; `fallback` where it is absent, 0 where it is null.
int32_t read_window(const JsonNode& json, int32_t fallback);

// As the Qwen families write it: use_sliding_window turns sliding_window on, for layer_types or
// the layers from max_window_layers on.
void read_qwen_windows(const JsonNode& json, ModelConfig& config);

}  // namespace llmserve
