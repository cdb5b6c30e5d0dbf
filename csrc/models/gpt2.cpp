// GPT-2: learned positions, LayerNorm, a plain MLP, weights stored [in, out]. Radford et al. 2019.
// StarCoder: the same with weights stored [out, in], and one KV head for all queries. Li et al.
// 2023.
#include "models/architectures.h"

namespace llmserve {
namespace {

void configure_common(const JsonNode& json, ModelConfig& config) {
  TensorNames& names = config.names;
  names.embedding = "transformer.wte";
  names.positions = "transformer.wpe";
  names.final_norm = "transformer.ln_f";
  names.layers = "transformer.h.";
  names.attention_norm = "ln_1";
  names.mlp_norm = "ln_2";
  names.qkv = "attn.c_attn";
  names.attention_output = "attn.c_proj";
  names.gate = "";
  names.up = "mlp.c_fc";
  names.down = "mlp.c_proj";
  config.norm = read_layer_norm(json["layer_norm_epsilon"]);
  config.attention_bias = config.output_bias = config.mlp_bias = true;
  config.has_rope = false;
  config.head_dim = 0;  // follows from the width
  config.activation = read_activation(json["activation_function"], Activation::kGeluTanh);
  config.tie_word_embeddings = json["tie_word_embeddings"].as_bool_or(true);
  if (config.intermediate_size == 0) config.intermediate_size = 4 * config.hidden_size;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 1024;
  if (!json["scale_attn_weights"].as_bool_or(true)) config.attention_scale = 1.0f;
  require(json["add_cross_attention"], false);
}

}  // namespace

void configure_gpt2(const JsonNode& json, ModelConfig& config) {
  configure_common(json, config);
  config.has_transposed_weights = true;
  config.num_kv_heads = config.num_heads;
  require(json["scale_attn_by_inverse_layer_idx"], false);
}

void configure_gpt_bigcode(const JsonNode& json, ModelConfig& config) {
  configure_common(json, config);
  config.num_kv_heads = json["multi_query"].as_bool_or(true) ? 1 : config.num_heads;
  config.is_qkv_by_group = true;
}

}  // namespace llmserve
