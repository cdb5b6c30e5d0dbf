// Hunyuan, dense: Llama's layout with a norm on every query and key head, behind the rotation.
// Tencent 2025.
#include "models/architectures.h"

namespace llmserve {

void configure_hunyuan_v1_dense(const JsonNode& json, ModelConfig& config) {
  config.qk_norm = QkNorm::kHead;
  config.has_qk_norm_after_rope = true;
  config.names.q_norm = "self_attn.query_layernorm";
  config.names.k_norm = "self_attn.key_layernorm";
  config.attention_bias = json["attention_bias"].as_bool_or(false);
  config.output_bias = config.attention_bias;
  config.rope_defaults.can_be_stretched = true;
  if (json["rms_norm_eps"].is_null()) config.norm.numbers.eps = 1e-5f;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 2048;
}

}  // namespace llmserve
