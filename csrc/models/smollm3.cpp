// SmolLM3: Llama's layout with layers that have no rotary embedding. Bakouch et al. 2025; NoPE:
// Kazemnejad et al. 2023.
#include <limits>

#include "core/error.h"
#include "models/architectures.h"
#include "models/layer_types.h"

namespace llmserve {
namespace {

// no_rope_layers has a 1 where a layer is rotated; without it every interval-th layer is not.
void read_rope_layers(const JsonNode& json, ModelConfig& config) {
  const JsonNode flags = json["no_rope_layers"];
  if (flags.is_null()) {
    const int64_t interval =
        json["no_rope_layer_interval"].as_int_or(4, 1, std::numeric_limits<int32_t>::max());
    for (int64_t i = interval - 1; i < config.num_layers; i += interval)
      config.layers[static_cast<size_t>(i)].rope = -1;
    return;
  }
  const std::vector<JsonNode> list = flags.as_array();
  if (static_cast<int64_t>(list.size()) < config.num_layers)
    flags.fail(concat("expected at least num_hidden_layers ", config.num_layers, " entries, got ",
                      list.size()));
  for (size_t i = 0; i < config.layers.size(); ++i)
    if (list[i].as_int(0, 1) == 0) config.layers[i].rope = -1;
}

}  // namespace

void configure_smollm3(const JsonNode& json, ModelConfig& config) {
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 4;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 32768;
  config.rope_defaults.theta = 2e6;
  config.tie_word_embeddings = json["tie_word_embeddings"].as_bool_or(true);
  config.attention_bias = json["attention_bias"].as_bool_or(false);
  config.output_bias = config.attention_bias;
  config.mlp_bias = json["mlp_bias"].as_bool_or(false);
  read_rope_layers(json, config);
  const int32_t window = json["use_sliding_window"].as_bool_or(false) ? read_window(json, 0) : 0;
  const auto is_not_rotated = [&](int64_t i) {
    return config.layers[static_cast<size_t>(i)].rope < 0;
  };
  set_windows(json, window, is_not_rotated, config);
}

}  // namespace llmserve
