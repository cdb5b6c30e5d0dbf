// Tensors that checkpoints carry and no model needs. All others that no layer asks for are refused:
// with one layer less than the file's a model still answers, and wrongly.
#pragma once

#include <string_view>

namespace llmserve {

// `architecture` as in ModelConfig, `name` as in the checkpoint.
bool is_skipped_tensor(std::string_view architecture, std::string_view name);

}  // namespace llmserve
