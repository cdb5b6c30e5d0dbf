// Mistral 7B and kin: Llama's layout, without biases, every layer behind one sliding window. Jiang
// et al. 2023.
#include "models/architectures.h"
#include "models/layer_types.h"

namespace llmserve {

void configure_mistral(const JsonNode& json, ModelConfig& config) {
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 8;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 131072;
  // transformers takes an absent field for 4096 and null for no window.
  const int32_t window = read_window(json, 4096);
  for (LayerTraits& layer : config.layers) layer.window = window;
}

}  // namespace llmserve
