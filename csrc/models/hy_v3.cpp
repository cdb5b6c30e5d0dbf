// Hy3: norms on every query and key head, the first layer dense, experts by sigmoids with a bias
// and a scale, beside one that all tokens have. Tencent 2026.
#include "models/architectures.h"
#include "models/config_fields.h"
#include "models/expert_config.h"

namespace llmserve {

void configure_hy_v3(const JsonNode& json, ModelConfig& config) {
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 8;
  if (json["head_dim"].is_absent()) config.head_dim = 128;
  if (json["rms_norm_eps"].is_null()) config.norm.numbers.eps = 1e-5f;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 131072;
  if (config.intermediate_size == 0) config.intermediate_size = 13312;
  config.attention_bias = json["attention_bias"].as_bool_or(false);
  config.output_bias = config.attention_bias;
  require(json["mlp_bias"], false);  // which the shared expert would have, too
  config.qk_norm = QkNorm::kHead;
  config.rope_defaults.theta = 11158840.0;
  read_experts(json,
               {.num_experts = {"num_experts", "num_local_experts"},
                .default_num_experts = 192,
                .default_top_k = 8,
                .default_width = 1536},
               config);
  ExpertSpec& experts = config.experts;
  experts.router.score = RouterScore::kSigmoid;
  experts.router.normalises = true;
  experts.router.sum_eps = 1e-20f;
  experts.router.scale =
      static_cast<float>(json["router_scaling_factor"].as_number_or(2.826, -1e6, 1e6));
  experts.names.router = "mlp.router.gate";
  experts.names.choice_bias = "mlp.expert_bias";
  experts.names.shared_gate = "mlp.shared_mlp.gate_proj";
  experts.names.shared_up = "mlp.shared_mlp.up_proj";
  experts.names.shared_down = "mlp.shared_mlp.down_proj";
  read_shared_experts(json["num_shared_experts"], 1, config);
  read_mlp_layer_types(json, 1, config);
  config.num_draft_layers = json["num_nextn_predict_layers"].as_int_or(1, 0, 64);
}

}  // namespace llmserve
