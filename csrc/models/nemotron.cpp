// Nemotron 3 and 4, Minitron: LayerNorm whose weight is stored minus one, a plain MLP with the
// square of a ReLU, a part of each head rotated. Parmar et al. 2024.
#include "models/architectures.h"

namespace llmserve {

void configure_nemotron(const JsonNode& json, ModelConfig& config) {
  config.names.gate = "";
  config.norm = read_layer_norm(json["norm_eps"]);
  config.norm.numbers.weight_offset = 1.0f;
  config.attention_bias = json["attention_bias"].as_bool_or(false);
  config.output_bias = config.attention_bias;
  config.mlp_bias = json["mlp_bias"].as_bool_or(false);
  config.activation = read_activation(json["hidden_act"], Activation::kRelu2);
  config.rope_defaults = {.can_be_partial = true, .partial_factor = 0.5};
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 4096;
}

}  // namespace llmserve
