// Mistral 7B and kin: Llama's layout, without biases, every layer behind one sliding window. Jiang
// et al. 2023.
#include <algorithm>
#include <limits>

#include "models/architectures.h"

namespace llmserve {

void configure_mistral(const JsonNode& json, ModelConfig& config) {
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 8;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 131072;
  // transformers takes an absent field for 4096 and null for no window.
  const JsonNode window = json["sliding_window"];
  const int64_t tokens =
      window.is_absent() ? 4096 : window.as_int_or(0, 1, std::numeric_limits<int32_t>::max());
  std::fill(config.windows.begin(), config.windows.end(), static_cast<int32_t>(tokens));
}

}  // namespace llmserve
