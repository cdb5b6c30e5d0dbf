#include "models/layer_windows.h"

#include <limits>

#include "core/error.h"

namespace llmserve {

void read_layer_windows(const JsonNode& json, ModelConfig& config) {
  constexpr int64_t kMaxWindow = std::numeric_limits<int32_t>::max();
  int32_t window = 0;
  if (json["use_sliding_window"].as_bool_or(false))
    window = static_cast<int32_t>(json["sliding_window"].as_int_or(4096, 1, kMaxWindow));
  const JsonNode types = json["layer_types"];
  if (types.is_null()) {
    const int64_t first = json["max_window_layers"].as_int_or(28, 0, kMaxWindow);
    for (int64_t i = first; i < config.num_layers; ++i)
      config.windows[static_cast<size_t>(i)] = window;
    return;
  }
  const std::vector<JsonNode> list = types.as_array();
  if (static_cast<int64_t>(list.size()) != config.num_layers)
    types.fail(
        concat("expected num_hidden_layers ", config.num_layers, " entries, got ", list.size()));
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string& type = list[i].as_string();
    if (type == "full_attention") continue;
    if (type != "sliding_attention")
      list[i].fail(
          concat("expected full_attention or sliding_attention, got ", list[i].describe()));
    if (window == 0)
      list[i].fail("sliding_attention needs use_sliding_window true and a sliding_window");
    config.windows[i] = window;
  }
}

}  // namespace llmserve
