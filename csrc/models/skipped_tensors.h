// Tensors that checkpoints carry and no model needs. All others that no layer asks for are refused:
// with one layer less than the file's a model still answers, and wrongly.
#pragma once

#include <string_view>

#include "models/model_config.h"

namespace llmserve {

// `name` as in the checkpoint.
bool is_skipped_tensor(const ModelConfig& config, std::string_view name);

}  // namespace llmserve
