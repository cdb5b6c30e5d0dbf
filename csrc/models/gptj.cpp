// GPT-J: a plain MLP beside attention behind one LayerNorm, a bias on the head, neighbours of a
// part of each head rotated. Wang & Komatsuzaki 2021.
#include <algorithm>

#include "models/architectures.h"

namespace llmserve {
namespace {

// "rotary_dim" counts elements, where others have a part of the head.
double read_partial_factor(const JsonNode& json, const ModelConfig& config) {
  const int64_t head_dim = config.hidden_size / config.num_heads;
  const int64_t count = json["rotary_dim"].as_int_or(std::min<int64_t>(64, head_dim), 1, head_dim);
  // A quarter more than the count, which the product is truncated to.
  return (static_cast<double>(count) + 0.25) / static_cast<double>(head_dim);
}

}  // namespace

void configure_gptj(const JsonNode& json, ModelConfig& config) {
  TensorNames& names = config.names;
  names.embedding = "transformer.wte";
  names.final_norm = "transformer.ln_f";
  names.layers = "transformer.h.";
  names.attention_norm = "ln_1";
  names.mlp_norm = "";
  names.q = "attn.q_proj";
  names.k = "attn.k_proj";
  names.v = "attn.v_proj";
  names.attention_output = "attn.out_proj";
  names.gate = "";
  names.up = "mlp.fc_in";
  names.down = "mlp.fc_out";
  config.norm = read_layer_norm(json["layer_norm_epsilon"]);
  config.is_parallel = true;
  config.mlp_bias = config.lm_head_bias = true;
  config.num_kv_heads = config.num_heads;
  config.head_dim = 0;  // follows from the width
  config.is_rope_interleaved = true;
  config.rope_defaults = {.can_be_partial = true,
                          .partial_factor = read_partial_factor(json, config)};
  config.activation = read_activation(json["activation_function"], Activation::kGeluTanh);
  if (config.intermediate_size == 0) config.intermediate_size = 4 * config.hidden_size;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 2048;
}

}  // namespace llmserve
