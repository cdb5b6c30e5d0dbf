// Llama 1 to 3.x and the many models that share their layout. Touvron et al. 2023; Dubey et al.
// 2024.
#include "models/architectures.h"

namespace llmserve {

void configure_llama(const JsonNode& json, ModelConfig& config) {
  config.attention_bias = json["attention_bias"].as_bool_or(false);
  config.output_bias = config.attention_bias;
  config.mlp_bias = json["mlp_bias"].as_bool_or(false);
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 2048;
}

}  // namespace llmserve
