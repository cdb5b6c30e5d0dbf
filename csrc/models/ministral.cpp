// Ministral 8B: Mistral's layout with layers of both kinds, windowed and full.
#include "models/architectures.h"
#include "models/layer_types.h"

namespace llmserve {

void configure_ministral(const JsonNode& json, ModelConfig& config) {
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 8;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 131072;
  const int32_t window = read_window(json, 4096);
  set_windows(json, window, [](int64_t) { return true; }, config);
}

}  // namespace llmserve
