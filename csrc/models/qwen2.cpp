// Qwen2 and Qwen2.5: Llama's layout with biases on q, k and v; later layers may have a sliding
// window. Yang et al. 2024.
#include "models/architectures.h"
#include "models/layer_types.h"

namespace llmserve {

void configure_qwen2(const JsonNode& json, ModelConfig& config) {
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 32;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 32768;
  config.attention_bias = true;
  read_qwen_windows(json, config);
}

}  // namespace llmserve
