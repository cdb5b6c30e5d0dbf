// Seed-OSS: Llama's layout with biases on q, k and v. ByteDance Seed 2025.
#include "models/architectures.h"

namespace llmserve {

void configure_seed_oss(const JsonNode& json, ModelConfig& config) {
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 8;
  if (json["head_dim"].is_absent()) config.head_dim = 128;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 524288;
  config.attention_bias = json["attention_bias"].as_bool_or(true);
  config.output_bias = json["attention_out_bias"].as_bool_or(false);
  config.mlp_bias = json["mlp_bias"].as_bool_or(false);
}

}  // namespace llmserve
