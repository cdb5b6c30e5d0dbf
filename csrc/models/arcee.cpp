// AFM: Llama's layout with a plain MLP, whose activation is the square of a ReLU. Arcee AI 2025.
#include "models/architectures.h"

namespace llmserve {

void configure_arcee(const JsonNode& json, ModelConfig& config) {
  config.names.gate = "";
  config.attention_bias = json["attention_bias"].as_bool_or(false);
  config.output_bias = config.attention_bias;
  config.mlp_bias = json["mlp_bias"].as_bool_or(false);
  config.activation = read_activation(json["hidden_act"], Activation::kRelu2);
  if (json["rms_norm_eps"].is_null()) config.norm.numbers.eps = 1e-5f;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 4096;
}

}  // namespace llmserve
