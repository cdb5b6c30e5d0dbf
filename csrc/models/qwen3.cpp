// Qwen3 (dense): Llama's layout with an RMS norm on every query and key head. Yang et al. 2025.
#include "models/architectures.h"
#include "models/layer_types.h"

namespace llmserve {

void configure_qwen3(const JsonNode& json, ModelConfig& config) {
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 32;
  if (json["head_dim"].is_absent()) config.head_dim = 128;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 32768;
  config.attention_bias = json["attention_bias"].as_bool_or(false);
  config.output_bias = config.attention_bias;
  config.qk_norm = QkNorm::kHead;
  read_qwen_windows(json, config);
}

}  // namespace llmserve
