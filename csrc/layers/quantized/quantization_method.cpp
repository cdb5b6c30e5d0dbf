#include "layers/quantized/quantization_method.h"

#include <algorithm>

namespace llmserve {
namespace {

// Of modules that are no linear layer, and of what llmserve rounds a token at a time: how much
// activations, queries, keys and values are to be scaled.
constexpr std::string_view kSpare[] = {
    ".input_scale",       ".input_zero_point", ".input_global_scale",
    ".output_scale",      ".k_scale",          ".v_scale",
    ".q_scale",           ".kv_scale",         ".prob_scale",
    ".output_zero_point", ".k_zero_point",     ".v_zero_point",
    ".q_zero_point",      ".k_global_scale",   ".v_global_scale",
    ".activation_scale"};

}  // namespace

bool QuantizationMethod::is_spare(std::string_view tensor) const {
  return std::ranges::any_of(kSpare,
                             [&](std::string_view suffix) { return tensor.ends_with(suffix); });
}

bool QuantizationMethod::is_cache_scale(std::string_view tensor) {
  return tensor.ends_with(".k_scale") || tensor.ends_with(".v_scale") ||
         tensor.ends_with(".kv_scale") || tensor.ends_with("k_proj.output_scale") ||
         tensor.ends_with("v_proj.output_scale");
}

}  // namespace llmserve
