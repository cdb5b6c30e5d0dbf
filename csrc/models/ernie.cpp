// ERNIE 4.5 (dense): Llama's layout with neighbouring elements rotated. Baidu 2025.
#include "models/architectures.h"

namespace llmserve {

void configure_ernie4_5(const JsonNode& json, ModelConfig& config) {
  config.is_rope_interleaved = true;
  config.rope_defaults.theta = 5e5;
  config.attention_bias = json["use_bias"].as_bool_or(false);
  config.output_bias = config.mlp_bias = config.attention_bias;
  config.tie_word_embeddings = json["tie_word_embeddings"].as_bool_or(true);
  if (json["rms_norm_eps"].is_null()) config.norm.numbers.eps = 1e-5f;
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 2;
  if (json["head_dim"].is_absent()) config.head_dim = 128;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 131072;
}

}  // namespace llmserve
