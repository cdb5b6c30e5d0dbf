// Ministral 8B: Mistral's layout with layers of both kinds, windowed and full. Ministral 3:
// Mistral's layout with queries that grow with their positions, as in Llama 4. Mistral AI 2024,
// 2025.
#include "core/error.h"
#include "models/architectures.h"
#include "models/layer_types.h"

namespace llmserve {

void configure_ministral(const JsonNode& json, ModelConfig& config) {
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 8;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 131072;
  const int32_t window = read_window(json, 4096);
  set_windows(json, window, [](int64_t) { return true; }, config);
}

void configure_ministral3(const JsonNode& json, ModelConfig& config) {
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 8;
  if (json["head_dim"].is_absent()) config.head_dim = 128;
  if (json["rms_norm_eps"].is_null()) config.norm.numbers.eps = 1e-5f;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 262144;
  const int32_t window = read_window(json, 0);
  for (LayerTraits& layer : config.layers) layer.window = window;
  config.rope_defaults = {.theta = 1e6, .scales_queries = true};
  const JsonNode rope = first_of(json, {"rope_parameters", "rope_scaling"});
  const JsonNode type = first_of(rope, {"rope_type", "type"});
  if (type.as_string() != "yarn")  // what has no original length has no such growth
    throw NotSupported(concat(type.where(), ": RoPE type ", type.describe(),
                              " is not supported by Ministral 3 (yarn)"));
}

}  // namespace llmserve
