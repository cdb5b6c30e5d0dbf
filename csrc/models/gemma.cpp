// Gemma 1, 2 and 3 (text): GELU gates, scaled embeddings, norms that store their weight minus one;
// since Gemma 2 norms before and after, soft caps and windows on most layers; since Gemma 3 norms
// on heads and a rotary embedding of their own for windowed layers. Gemma Team 2024 (two reports),
// 2025.
#include <cmath>
#include <limits>

#include "core/error.h"
#include "models/architectures.h"
#include "models/layer_types.h"

namespace llmserve {
namespace {

void configure_common(const JsonNode& json, ModelConfig& config) {
  config.norm.numbers.weight_offset = 1.0f;
  config.embedding_scale = std::sqrt(static_cast<float>(config.hidden_size));
  config.tie_word_embeddings = json["tie_word_embeddings"].as_bool_or(true);
  config.attention_bias = json["attention_bias"].as_bool_or(false);
  config.output_bias = config.attention_bias;
  if (config.head_dim == 0) config.head_dim = 256;
  require(json["use_bidirectional_attention"], false);
}

// Old configs say "gelu" and mean its tanh form.
void read_gemma_activation(const JsonNode& json, ModelConfig& config) {
  const JsonNode newer = json["hidden_activation"];
  config.activation =
      read_activation(newer.is_null() ? json["hidden_act"] : newer, Activation::kGeluTanh);
  if (newer.is_null() && config.activation == Activation::kGelu)
    config.activation = Activation::kGeluTanh;
}

// A cap of null is none.
float read_cap(const JsonNode& node, double fallback) {
  if (node.is_absent()) return static_cast<float>(fallback);
  return static_cast<float>(node.as_number_or(0.0, 1e-3, 1e6));
}

void configure_gemma2_and_3(const JsonNode& json, ModelConfig& config) {
  configure_common(json, config);
  config.activation = read_activation(json["hidden_activation"], Activation::kGeluTanh);
  config.names.attention_post_norm = "post_attention_layernorm";
  config.names.mlp_norm = "pre_feedforward_layernorm";
  config.names.mlp_post_norm = "post_feedforward_layernorm";
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 4;
  config.attention_scale =
      1.0f /
      std::sqrt(static_cast<float>(json["query_pre_attn_scalar"].as_number_or(256, 1e-3, 1e6)));
}

}  // namespace

void configure_gemma(const JsonNode& json, ModelConfig& config) {
  configure_common(json, config);
  read_gemma_activation(json, config);
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 16;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 8192;
}

void configure_gemma2(const JsonNode& json, ModelConfig& config) {
  configure_gemma2_and_3(json, config);
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 8192;
  config.attention_soft_cap = read_cap(json["attn_logit_softcapping"], 50.0);
  config.logit_soft_cap = read_cap(json["final_logit_softcapping"], 30.0);
  set_windows(json, read_window(json, 4096), [](int64_t i) { return i % 2 == 0; }, config);
}

void configure_gemma3(const JsonNode& json, ModelConfig& config) {
  configure_gemma2_and_3(json, config);
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 131072;
  config.qk_norm = QkNorm::kHead;
  // transformers reads this field and caps nothing: a config that sets it is ambiguous.
  if (!json["attn_logit_softcapping"].is_null())
    throw NotSupported(concat(json["attn_logit_softcapping"].where(),
                              ": a cap on attention scores is not supported by Gemma 3, got ",
                              json["attn_logit_softcapping"].describe()));
  config.logit_soft_cap = read_cap(json["final_logit_softcapping"], 0.0);
  config.rope_defaults.theta = 1e6;
  config.rope_defaults.sliding_theta = 1e4;
  const int64_t pattern =
      json["sliding_window_pattern"].as_int_or(6, 1, std::numeric_limits<int32_t>::max());
  const auto is_sliding = [&](int64_t i) { return (i + 1) % pattern != 0; };
  set_windows(json, read_window(json, 4096), is_sliding, config);
}

}  // namespace llmserve
