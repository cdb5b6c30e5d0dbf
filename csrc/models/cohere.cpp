// Command R and R7B: attention and MLP side by side behind one LayerNorm without bias, neighbouring
// elements rotated, scaled logits. R7B has windows, and no rotation on its full layers. Cohere
// 2024.
#include <limits>

#include "models/architectures.h"
#include "models/layer_types.h"

namespace llmserve {
namespace {

void configure_common(const JsonNode& json, ModelConfig& config) {
  config.norm = read_layer_norm(json["layer_norm_eps"]);
  config.norm.has_bias = false;
  config.is_parallel = true;
  config.names.mlp_norm = "";
  config.is_rope_interleaved = true;
  config.logit_scale = static_cast<float>(json["logit_scale"].as_number_or(0.0625, 1e-6, 1e6));
  config.tie_word_embeddings = json["tie_word_embeddings"].as_bool_or(true);
  config.attention_bias = json["attention_bias"].as_bool_or(false);
  config.output_bias = config.attention_bias;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 8192;
}

}  // namespace

void configure_cohere(const JsonNode& json, ModelConfig& config) {
  configure_common(json, config);
  config.rope_defaults.theta = 500000.0;
  if (json["use_qk_norm"].as_bool_or(false)) config.qk_norm = QkNorm::kEachHead;
}

void configure_cohere2(const JsonNode& json, ModelConfig& config) {
  configure_common(json, config);
  const int64_t pattern =
      json["sliding_window_pattern"].as_int_or(4, 1, std::numeric_limits<int32_t>::max());
  const auto is_sliding = [&](int64_t i) { return (i + 1) % pattern != 0; };
  set_windows(json, read_window(json, 4096), is_sliding, config);
  for (LayerTraits& layer : config.layers)
    if (layer.window == 0) layer.rope = -1;
}

}  // namespace llmserve
