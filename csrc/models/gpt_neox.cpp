// GPT-NeoX, Pythia and kin: LayerNorm, a plain MLP beside attention, a part of each head rotated, a
// fused qkv head by head. Black et al. 2022.
#include "models/architectures.h"

namespace llmserve {

void configure_gpt_neox(const JsonNode& json, ModelConfig& config) {
  TensorNames& names = config.names;
  names.embedding = "gpt_neox.embed_in";
  names.final_norm = "gpt_neox.final_layer_norm";
  names.lm_head = "embed_out";
  names.layers = "gpt_neox.layers.";
  names.qkv = "attention.query_key_value";
  names.attention_output = "attention.dense";
  names.gate = "";
  names.up = "mlp.dense_h_to_4h";
  names.down = "mlp.dense_4h_to_h";
  config.norm = read_layer_norm(json["layer_norm_eps"]);
  config.is_parallel = json["use_parallel_residual"].as_bool_or(true);
  config.is_qkv_by_group = true;
  config.num_kv_heads = config.num_heads;
  config.head_dim = 0;  // follows from the width
  config.attention_bias = json["attention_bias"].as_bool_or(true);
  config.output_bias = config.attention_bias;
  config.mlp_bias = true;
  config.activation = read_activation(json["hidden_act"], Activation::kGelu);
  config.rope_defaults = {.can_be_partial = true, .partial_factor = 0.25};
  if (config.intermediate_size == 0) config.intermediate_size = 24576;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 2048;
}

}  // namespace llmserve
