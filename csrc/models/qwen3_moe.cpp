// Qwen3 with experts: Qwen3's attention, and experts in most layers or in all. Yang et al. 2025.
#include "models/architectures.h"
#include "models/expert_config.h"
#include "models/layer_types.h"

namespace llmserve {

void configure_qwen3_moe(const JsonNode& json, ModelConfig& config) {
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 4;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 32768;
  if (config.intermediate_size == 0) config.intermediate_size = 6144;
  config.attention_bias = json["attention_bias"].as_bool_or(false);
  config.output_bias = config.attention_bias;
  config.qk_norm = QkNorm::kHead;
  if (json["use_sliding_window"].as_bool_or(false)) {
    const int32_t window = read_window(json, 4096);
    for (LayerTraits& layer : config.layers) layer.window = window;
  }
  read_experts(json, {.default_num_experts = 128, .default_top_k = 8, .default_width = 768},
               config);
  config.experts.router.normalises = json["norm_topk_prob"].as_bool_or(false);
  if (json["has_stacked_experts"].as_bool_or(false)) {  // within Qwen3-VL
    config.experts.router.normalises = true;
    const int64_t rows = json["stacked_expert_rows"].as_int_or(0, 0, int64_t{1} << 31);
    config.experts.is_transposed = rows != 2 * config.experts.intermediate_size;
    config.experts.names.gate_up = "mlp.experts.gate_up_proj";
    config.experts.names.down = "mlp.experts.down_proj";
  }
  read_qwen_expert_layers(json, config);
}

}  // namespace llmserve
