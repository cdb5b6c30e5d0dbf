// Qwen2 with experts: Qwen2's attention, and experts beside one that all tokens have, weighed by a
// sigmoid. Yang et al. 2024, section 2.2.2.
#include "models/architectures.h"
#include "models/expert_config.h"
#include "models/layer_types.h"

namespace llmserve {

void configure_qwen2_moe(const JsonNode& json, ModelConfig& config) {
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 16;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 32768;
  if (config.intermediate_size == 0) config.intermediate_size = 5632;
  config.attention_bias = json["qkv_bias"].as_bool_or(true);
  if (json["use_sliding_window"].as_bool_or(false)) {
    // Without layer_types every other of the layers before max_window_layers has the window.
    const int64_t end = json["max_window_layers"].as_int_or(28, 0, 1 << 20);
    set_windows(
        json, read_window(json, 4096), [&](int64_t i) { return i % 2 == 0 && i < end; }, config);
  }
  read_experts(json, {.default_num_experts = 60, .default_top_k = 4, .default_width = 1408},
               config);
  ExpertSpec& experts = config.experts;
  experts.router.normalises = json["norm_topk_prob"].as_bool_or(false);
  experts.shared_size = json["shared_expert_intermediate_size"].as_int_or(5632, 1, 1 << 20);
  experts.names.shared_gate = "mlp.shared_expert.gate_proj";
  experts.names.shared_up = "mlp.shared_expert.up_proj";
  experts.names.shared_down = "mlp.shared_expert.down_proj";
  experts.names.shared_weight = "mlp.shared_expert_gate";
  read_qwen_expert_layers(json, config);
}

}  // namespace llmserve
