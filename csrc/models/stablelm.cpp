// StableLM 2 and kin: Llama's layout with LayerNorm, a part of each head rotated, optionally a
// parallel block and a norm for each head. Bellagente et al. 2024.
#include "models/architectures.h"

namespace llmserve {

void configure_stablelm(const JsonNode& json, ModelConfig& config) {
  config.norm = read_layer_norm(json["layer_norm_eps"]);
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 32;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 4096;
  config.attention_bias = json["use_qkv_bias"].as_bool_or(false);
  config.rope_defaults = {.can_be_partial = true, .partial_factor = 0.25};
  config.is_parallel = json["use_parallel_residual"].as_bool_or(false);
  if (config.is_parallel) config.names.mlp_norm = "";
  if (json["qk_layernorm"].as_bool_or(false)) {
    config.qk_norm = QkNorm::kEachHead;
    config.names.q_norm = "self_attn.q_layernorm.norms.{}";
    config.names.k_norm = "self_attn.k_layernorm.norms.{}";
  }
}

}  // namespace llmserve
