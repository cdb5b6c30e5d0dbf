// GLM: half of each head rotated by neighbours, gate and up fused; since GLM-4-0414 norms after
// attention and MLP, too. Team GLM 2024; Zhipu AI 2025.
#include "models/architectures.h"

namespace llmserve {

void configure_glm(const JsonNode& json, ModelConfig& config) {
  config.names.gate_up = "mlp.gate_up_proj";
  config.is_rope_interleaved = true;
  config.rope_defaults = {.can_be_partial = true, .partial_factor = 0.5};
  config.attention_bias = json["attention_bias"].as_bool_or(true);
  if (json["rms_norm_eps"].is_null()) config.norm.numbers.eps = 1.5625e-7f;
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 2;
  if (json["head_dim"].is_absent()) config.head_dim = 128;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 131072;
}

void configure_glm4(const JsonNode& json, ModelConfig& config) {
  configure_glm(json, config);
  config.names.attention_post_norm = "post_self_attn_layernorm";
  config.names.mlp_post_norm = "post_mlp_layernorm";
}

}  // namespace llmserve
