// GLM-4.5, 4.6 and 4.7 with experts: half of each head rotated, the first layers dense, the router
// of DeepSeek-V3. GLM-4.5 Team 2025. Solar Open: whole heads rotated and experts in every layer.
// Upstage 2026.
#include "models/architectures.h"
#include "models/expert_config.h"

namespace llmserve {

void configure_glm4_moe(const JsonNode& json, ModelConfig& config) {
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 8;
  if (json["rms_norm_eps"].is_null()) config.norm.numbers.eps = 1e-5f;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 131072;
  if (config.intermediate_size == 0) config.intermediate_size = 10944;
  config.attention_bias = json["attention_bias"].as_bool_or(false);
  if (json["use_qk_norm"].as_bool_or(false)) config.qk_norm = QkNorm::kHead;
  config.rope_defaults = {.can_be_partial = true, .partial_factor = 0.5};
  read_experts(json,
               {.num_experts = {"n_routed_experts", "num_local_experts"},
                .default_num_experts = 128,
                .default_top_k = 8,
                .default_width = 1408},
               config);
  read_sigmoid_router(json, config);
  read_shared_experts(json["n_shared_experts"], 1, config);
  read_first_dense_layers(json, 1, config);
  config.num_draft_layers = json["num_nextn_predict_layers"].as_int_or(1, 0, 64);
}

void configure_solar_open(const JsonNode& json, ModelConfig& config) {
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 8;
  if (json["head_dim"].is_absent()) config.head_dim = 128;
  if (json["rms_norm_eps"].is_null()) config.norm.numbers.eps = 1e-5f;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 131072;
  config.attention_bias = json["attention_bias"].as_bool_or(false);
  config.rope_defaults.theta = 1e6;
  read_experts(json,
               {.num_experts = {"n_routed_experts", "num_local_experts"},
                .default_num_experts = 128,
                .default_top_k = 8,
                .default_width = 1280},
               config);
  read_sigmoid_router(json, config);
  read_shared_experts(json["n_shared_experts"], 1, config);
  set_expert_layers([](int64_t) { return true; }, config);
}

}  // namespace llmserve
