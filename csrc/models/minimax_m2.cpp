// MiniMax-M2: norms over all queries and all keys, a part of each head rotated, experts in every
// layer by sigmoids with a bias. MiniMax 2025.
#include "models/architectures.h"
#include "models/expert_config.h"

namespace llmserve {

void configure_minimax_m2(const JsonNode& json, ModelConfig& config) {
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 8;
  if (json["head_dim"].is_absent()) config.head_dim = 128;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 196608;
  config.qk_norm = QkNorm::kProjection;
  config.rope_defaults = {.theta = 5e6, .can_be_partial = true};
  if (const JsonNode width = json["rotary_dim"]; !width.is_null() && config.head_dim > 0)
    // A quarter more than the width, which the product is truncated to.
    config.rope_defaults.partial_factor =
        (static_cast<double>(width.as_int(1, config.head_dim)) + 0.25) /
        static_cast<double>(config.head_dim);
  if (config.rope_defaults.partial_factor > 1.0) config.rope_defaults.partial_factor = 1.0;
  read_experts(json,
               {.num_experts = {"num_local_experts", "num_experts"},
                .width = {"intermediate_size"},
                .default_num_experts = 256,
                .default_top_k = 8,
                .default_width = 1536},
               config);
  ExpertSpec& experts = config.experts;
  experts.router.score = RouterScore::kSigmoid;
  experts.router.normalises = true;
  experts.names.choice_bias = "block_sparse_moe.e_score_correction_bias";
  experts.names.router = "block_sparse_moe.gate";
  experts.names.gate = "block_sparse_moe.experts.{}.w1";
  experts.names.up = "block_sparse_moe.experts.{}.w3";
  experts.names.down = "block_sparse_moe.experts.{}.w2";
  config.num_draft_layers = json["num_mtp_modules"].as_int_or(0, 0, 64);
  set_expert_layers([](int64_t) { return true; }, config);
}

}  // namespace llmserve
