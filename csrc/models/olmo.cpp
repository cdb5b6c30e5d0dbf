// OLMo 1: LayerNorms without weights before attention and MLP. Groeneveld et al. 2024.
// OLMo 2 and 3: norms after attention and MLP instead of before, and over all queries and all keys;
// since OLMo 3 windows on most layers, whose rotary embedding is not stretched. OLMo Team 2024;
// Olmo Team 2025. FlexOlmo: OLMo 2 with experts in every layer. Shi et al. 2025.
#include "core/error.h"
#include "models/architectures.h"
#include "models/expert_config.h"
#include "models/layer_types.h"

namespace llmserve {

void configure_olmo(const JsonNode& json, ModelConfig& config) {
  config.norm = {.kind = NormKind::kLayer, .numbers = {.eps = 1e-5f}, .has_weight = false};
  config.attention_bias = json["attention_bias"].as_bool_or(false);
  config.output_bias = config.attention_bias;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 2048;
  if (!json["clip_qkv"].is_null())
    throw NotSupported(concat(json["clip_qkv"].where(), ": ", json["clip_qkv"].describe(),
                              " is not supported, only null"));
}

void configure_olmo2(const JsonNode& json, ModelConfig& config) {
  config.names.attention_norm = "";
  config.names.attention_post_norm = "post_attention_layernorm";
  config.names.mlp_norm = "";
  config.names.mlp_post_norm = "post_feedforward_layernorm";
  config.qk_norm = QkNorm::kProjection;
  config.attention_bias = json["attention_bias"].as_bool_or(false);
  config.output_bias = config.attention_bias;
  if (json["rms_norm_eps"].is_null()) config.norm.numbers.eps = 1e-5f;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 2048;
}

void configure_olmo3(const JsonNode& json, ModelConfig& config) {
  configure_olmo2(json, config);
  config.rope_defaults = {.theta = 5e5, .sliding_theta = 5e5};
  set_windows(json, read_window(json, 4096), [](int64_t i) { return (i + 1) % 4 != 0; }, config);
}

void configure_flex_olmo(const JsonNode& json, ModelConfig& config) {
  configure_olmo2(json, config);
  if (json["rms_norm_eps"].is_null()) config.norm.numbers.eps = 1e-6f;
  if (json["max_position_embeddings"].is_null()) config.max_position_embeddings = 4096;
  config.rope_defaults.theta = 5e5;
  read_experts(json,
               {.width = {"intermediate_size"},
                .default_num_experts = 7,
                .default_top_k = 5,
                .default_width = 11008},
               config);
  config.experts.router.normalises = json["norm_topk_prob"].as_bool_or(false);
  set_expert_layers([](int64_t) { return true; }, config);
}

}  // namespace llmserve
