// Helium: Llama's layout with neighbouring elements rotated. Kyutai 2025.
#include "models/architectures.h"

namespace llmserve {

void configure_helium(const JsonNode& json, ModelConfig& config) {
  config.is_rope_interleaved = true;
  config.rope_defaults.theta = 100000.0;
  config.attention_bias = json["attention_bias"].as_bool_or(false);
  config.mlp_bias = json["mlp_bias"].as_bool_or(false);
  if (json["rms_norm_eps"].is_null()) config.norm.numbers.eps = 1e-8f;
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 20;
  if (json["head_dim"].is_absent()) config.head_dim = 128;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 4096;
}

}  // namespace llmserve
