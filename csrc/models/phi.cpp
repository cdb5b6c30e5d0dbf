// Phi-1, Phi-1.5 and Phi-2: a plain MLP beside attention behind one LayerNorm, biases everywhere,
// on the head, too, a part of each head rotated. Gunasekar et al. 2023.
#include "models/architectures.h"

namespace llmserve {

void configure_phi(const JsonNode& json, ModelConfig& config) {
  config.names.final_norm = "model.final_layernorm";
  config.names.attention_output = "self_attn.dense";
  config.names.mlp_norm = "";
  config.names.gate = "";
  config.names.up = "mlp.fc1";
  config.names.down = "mlp.fc2";
  config.norm = read_layer_norm(json["layer_norm_eps"]);
  config.is_parallel = true;
  config.attention_bias = config.output_bias = config.mlp_bias = config.lm_head_bias = true;
  config.activation = read_activation(json["hidden_act"], Activation::kGeluTanh);
  config.rope_defaults = {.can_be_partial = true, .partial_factor = 0.5};
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 2048;
  if (json["qk_layernorm"].as_bool_or(false)) {
    config.qk_norm = QkNorm::kHead;
    config.qk_norm_bias = true;
    config.names.q_norm = "self_attn.q_layernorm";
    config.names.k_norm = "self_attn.k_layernorm";
  }
}

}  // namespace llmserve
