// StarCoder2: LayerNorm, a plain MLP, biases everywhere, every layer behind one sliding window.
// Lozhkov et al. 2024.
#include "models/architectures.h"
#include "models/layer_types.h"

namespace llmserve {

void configure_starcoder2(const JsonNode& json, ModelConfig& config) {
  config.names.gate = "";
  config.names.up = "mlp.c_fc";
  config.names.down = "mlp.c_proj";
  config.norm = read_layer_norm(json["norm_epsilon"]);
  config.attention_bias = json["use_bias"].as_bool_or(true);
  config.output_bias = config.mlp_bias = config.attention_bias;
  config.activation = read_activation(json["hidden_act"], Activation::kGeluTanh);
  config.tie_word_embeddings = json["tie_word_embeddings"].as_bool_or(true);
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 2;
  if (config.intermediate_size == 0) config.intermediate_size = 12288;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 4096;
  const int32_t window = read_window(json, 0);
  for (LayerTraits& layer : config.layers) layer.window = window;
}

}  // namespace llmserve
