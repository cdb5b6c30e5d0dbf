// EXAONE 4: norms after attention and MLP instead of before, and on every query and key head. Where
// there is a window, most layers have it, and the full ones no rotary embedding. LG AI Research
// 2025. K-EXAONE: the same attention, norms before, and experts with the router of DeepSeek-V3. LG
// AI Research 2026.
#include <limits>

#include "models/architectures.h"
#include "models/expert_config.h"
#include "models/layer_types.h"

namespace llmserve {
namespace {

void read_attention(const JsonNode& json, ModelConfig& config) {
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

}  // namespace

void configure_exaone4(const JsonNode& json, ModelConfig& config) {
  config.names.attention_norm = "";
  config.names.attention_post_norm = "post_attention_layernorm";
  config.names.mlp_norm = "";
  config.names.mlp_post_norm = "post_feedforward_layernorm";
  read_attention(json, config);
}

void configure_exaone_moe(const JsonNode& json, ModelConfig& config) {
  read_attention(json, config);
  if (config.intermediate_size == 0) config.intermediate_size = 16384;
  read_experts(json, {.default_num_experts = 64, .default_top_k = 8, .default_width = 1024},
               config);
  read_sigmoid_router(json, config);
  if (json["routed_scaling_factor"].is_null()) config.experts.router.scale = 2.5f;
  config.experts.names.choice_bias = "mlp.e_score_correction_bias";
  read_shared_experts(json["num_shared_experts"], 1, config);
  read_mlp_layer_types(json, 1, config);
  config.num_draft_layers = json["num_nextn_predict_layers"].as_int_or(1, 0, 64);
}

}  // namespace llmserve
