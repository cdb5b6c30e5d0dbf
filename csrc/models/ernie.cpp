// ERNIE 4.5: Llama's layout with neighbouring elements rotated; with experts in some layers. Baidu
// 2025.
#include "models/architectures.h"
#include "models/expert_config.h"

namespace llmserve {

void configure_ernie4_5(const JsonNode& json, ModelConfig& config) {
  config.is_rope_interleaved = true;
  config.rope_defaults.theta = 5e5;
  config.attention_bias = json["use_bias"].as_bool_or(false);
  config.output_bias = config.mlp_bias = config.attention_bias;
  config.tie_word_embeddings = json["tie_word_embeddings"].as_bool_or(true);
  if (json["rms_norm_eps"].is_null()) config.norm.numbers.eps = 1e-5f;
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 2;
  if (json["head_dim"].is_absent()) config.head_dim = 128;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 131072;
}

void configure_ernie4_5_moe(const JsonNode& json, ModelConfig& config) {
  configure_ernie4_5(json, config);
  config.lm_head_bias = config.attention_bias;
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 4;
  if (json["head_dim"].is_absent()) config.head_dim = 0;
  if (config.intermediate_size == 0) config.intermediate_size = 12288;
  read_experts(json,
               {.num_experts = {"moe_num_experts", "num_experts"},
                .top_k = {"moe_k", "num_experts_per_tok"},
                .default_num_experts = 64,
                .default_top_k = 6,
                .default_width = 1536},
               config);
  config.num_draft_layers = json["num_nextn_predict_layers"].as_int_or(0, 0, 64);
  ExpertSpec& experts = config.experts;
  experts.router.normalises = true;
  experts.router.sum_floor = static_cast<float>(json["moe_norm_min"].as_number_or(1e-12, 0.0, 1.0));
  experts.names.choice_bias = "mlp.moe_statics.e_score_correction_bias";
  experts.is_choice_bias_row = true;
  read_shared_experts(json["moe_num_shared_experts"], 2, config);
  const int64_t interval = json["moe_layer_interval"].as_int_or(1, 1, 1 << 20);
  const int64_t first = json["moe_layer_start_index"].as_int_or(1, 0, 1 << 20);
  const int64_t last = json["moe_layer_end_index"].as_int_or(-1, -1, 1 << 20);
  set_expert_layers(
      [&](int64_t i) { return (i + 1) % interval == 0 && i >= first && (last == -1 || i <= last); },
      config);
}

}  // namespace llmserve
