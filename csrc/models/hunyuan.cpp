// Hunyuan: Llama's layout with a norm on every query and key head, behind the rotation; with
// experts beside one that all tokens have. Tencent 2025.
#include "models/architectures.h"
#include "models/expert_config.h"

namespace llmserve {

void configure_hunyuan_v1_dense(const JsonNode& json, ModelConfig& config) {
  config.qk_norm = QkNorm::kHead;
  config.has_qk_norm_after_rope = true;
  config.names.q_norm = "self_attn.query_layernorm";
  config.names.k_norm = "self_attn.key_layernorm";
  config.attention_bias = json["attention_bias"].as_bool_or(false);
  config.output_bias = config.attention_bias;
  config.rope_defaults.can_be_stretched = true;
  if (json["rms_norm_eps"].is_null()) config.norm.numbers.eps = 1e-5f;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 2048;
}

void configure_hunyuan_v1_moe(const JsonNode& json, ModelConfig& config) {
  configure_hunyuan_v1_dense(json, config);
  read_experts(json,
               {.num_experts = {"num_experts", "num_local_experts"},
                .top_k = {"moe_topk", "num_experts_per_tok"},
                .width = {"intermediate_size"},
                .default_num_experts = 1,
                .default_top_k = 1,
                .default_width = 11008},
               config);
  ExpertSpec& experts = config.experts;
  experts.router.normalises = true;
  experts.shared_size = experts.intermediate_size;
  experts.names.router = "mlp.gate.wg";
  experts.names.shared_gate = "mlp.shared_mlp.gate_proj";
  experts.names.shared_up = "mlp.shared_mlp.up_proj";
  experts.names.shared_down = "mlp.shared_mlp.down_proj";
  set_expert_layers([](int64_t) { return true; }, config);
}

}  // namespace llmserve
