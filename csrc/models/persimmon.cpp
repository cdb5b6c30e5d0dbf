// Persimmon: LayerNorm, also on every query and key head, a plain MLP with the square of a ReLU, a
// fused qkv head by head, a part of each head rotated. Adept 2023.
#include "models/architectures.h"

namespace llmserve {

void configure_persimmon(const JsonNode& json, ModelConfig& config) {
  TensorNames& names = config.names;
  names.final_norm = "model.final_layernorm";
  names.qkv = "self_attn.query_key_value";
  names.q_norm = "self_attn.q_layernorm";
  names.k_norm = "self_attn.k_layernorm";
  names.attention_output = "self_attn.dense";
  names.gate = "";
  names.up = "mlp.dense_h_to_4h";
  names.down = "mlp.dense_4h_to_h";
  config.norm = read_layer_norm(json["layer_norm_eps"]);
  if (json["qk_layernorm"].as_bool_or(true)) {
    config.qk_norm = QkNorm::kHead;
    config.qk_norm_bias = true;
  }
  config.is_qkv_by_group = true;
  config.num_kv_heads = config.num_heads;
  config.head_dim = 0;  // follows from the width
  config.attention_bias = config.output_bias = config.mlp_bias = true;
  config.activation = read_activation(json["hidden_act"], Activation::kRelu2);
  config.rope_defaults = {.can_be_partial = true, .partial_factor = 0.5};
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 16384;
}

}  // namespace llmserve
