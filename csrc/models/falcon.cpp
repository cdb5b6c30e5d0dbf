// Falcon 7B, 40B, 180B and Falcon 2: a plain MLP beside attention, one KV head or a few, qkv fused
// by group. Almazrouei et al. 2023.
#include "core/error.h"
#include "models/architectures.h"

namespace llmserve {
namespace {

// One norm for both branches, one for each, or (not parallel) one after another.
void read_norms(const JsonNode& json, bool is_new, ModelConfig& config) {
  const int64_t num_norms = json["num_ln_in_parallel_attn"].as_int_or(is_new ? 2 : 1, 1, 2);
  config.is_parallel = is_new || json["parallel_attn"].as_bool_or(true);
  if (!config.is_parallel) return;
  if (is_new && num_norms == 2) {
    config.names.attention_norm = "ln_attn";
    config.names.mlp_norm = "ln_mlp";
  } else if (num_norms == 2) {
    json["num_ln_in_parallel_attn"].fail("expected 1 without new_decoder_architecture, got 2");
  } else {
    config.names.mlp_norm = "";
  }
}

}  // namespace

void configure_falcon(const JsonNode& json, ModelConfig& config) {
  if (json["alibi"].as_bool_or(false))
    throw NotSupported(concat(json["alibi"].where(),
                              ": ALiBi positions (Falcon-RW) are not supported, only rotary ones"));
  TensorNames& names = config.names;
  names.embedding = "transformer.word_embeddings";
  names.final_norm = "transformer.ln_f";
  names.layers = "transformer.h.";
  names.qkv = "self_attention.query_key_value";
  names.attention_output = "self_attention.dense";
  names.gate = "";
  names.up = "mlp.dense_h_to_4h";
  names.down = "mlp.dense_4h_to_h";
  config.norm = read_layer_norm(json["layer_norm_epsilon"]);
  const bool is_new = json["new_decoder_architecture"].as_bool_or(false);
  read_norms(json, is_new, config);
  if (!is_new) config.num_kv_heads = json["multi_query"].as_bool_or(true) ? 1 : config.num_heads;
  config.head_dim = 0;  // follows from the width
  config.is_qkv_by_group = true;
  config.attention_bias = json["bias"].as_bool_or(false);
  config.output_bias = config.mlp_bias = config.attention_bias;
  config.activation = read_activation(json["activation"], Activation::kGelu);
  config.tie_word_embeddings = json["tie_word_embeddings"].as_bool_or(true);
  if (config.intermediate_size == 0) config.intermediate_size = 4 * config.hidden_size;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 2048;
}

}  // namespace llmserve
