// dots.llm1: norms on every query and key head, the first layers dense, the router of DeepSeek-V3.
// Huo et al. 2025.
#include "models/architectures.h"
#include "models/expert_config.h"
#include "models/layer_types.h"

namespace llmserve {

void configure_dots1(const JsonNode& json, ModelConfig& config) {
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 32;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 2048;
  if (config.intermediate_size == 0) config.intermediate_size = 10944;
  config.attention_bias = json["attention_bias"].as_bool_or(false);
  config.output_bias = config.attention_bias;
  config.qk_norm = QkNorm::kHead;
  const int64_t first = json["max_window_layers"].as_int_or(62, 0, 1 << 20);
  set_windows(json, read_window(json, 4096), [&](int64_t i) { return i >= first; }, config);
  read_experts(json,
               {.num_experts = {"n_routed_experts", "num_local_experts"}, .default_width = 1408},
               config);
  read_sigmoid_router(json, config);
  config.experts.router.normalises = json["norm_topk_prob"].as_bool_or(false);
  read_shared_experts(json["n_shared_experts"], 0, config);
  read_first_dense_layers(json, 0, config);
}

}  // namespace llmserve
