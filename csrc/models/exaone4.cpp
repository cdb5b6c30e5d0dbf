// EXAONE 4: norms after attention and MLP instead of before, and on every query and key head. Where
// there is a window, most layers have it, and the full ones no rotary embedding. LG AI Research
// 2025.
#include <limits>

#include "models/architectures.h"
#include "models/layer_types.h"

namespace llmserve {

void configure_exaone4(const JsonNode& json, ModelConfig& config) {
  config.names.attention_norm = "";
  config.names.attention_post_norm = "post_attention_layernorm";
  config.names.mlp_norm = "";
  config.names.mlp_post_norm = "post_feedforward_layernorm";
  config.qk_norm = QkNorm::kHead;
  if (json["rms_norm_eps"].is_null()) config.norm.numbers.eps = 1e-5f;
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 32;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 2048;
  const int32_t window = read_window(json, 4096);
  // Beside layer_types, or without a window, the pattern may be text ("LLLG") or null; where it
  // counts, transformers takes numbers only.
  const auto is_sliding = [&](int64_t i) {
    if (window == 0) return false;
    const JsonNode node = json["sliding_window_pattern"];
    const int64_t pattern =
        node.is_absent() ? 4 : node.as_int(1, std::numeric_limits<int32_t>::max());
    return (i + 1) % pattern != 0;
  };
  set_windows(json, window, is_sliding, config);
  if (window == 0) return;
  for (LayerTraits& layer : config.layers)
    if (layer.window == 0) layer.rope = -1;
}

}  // namespace llmserve
