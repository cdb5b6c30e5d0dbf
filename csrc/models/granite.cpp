// Granite 3 (dense): Llama's layout with factors on embeddings, scores, residuals and logits. IBM
// Granite Team 2024.
#include "models/architectures.h"

namespace llmserve {

void configure_granite(const JsonNode& json, ModelConfig& config) {
  const auto factor = [&](const char* key) {
    return static_cast<float>(json[key].as_number_or(1.0, 1e-6, 1e6));
  };
  config.embedding_scale = factor("embedding_multiplier");
  config.attention_scale = factor("attention_multiplier");
  config.residual_scale = factor("residual_multiplier");
  config.logit_scale = 1.0f / factor("logits_scaling");
  config.attention_bias = json["attention_bias"].as_bool_or(false);
  config.output_bias = config.attention_bias;
  config.mlp_bias = json["mlp_bias"].as_bool_or(false);
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 2048;
}

}  // namespace llmserve
