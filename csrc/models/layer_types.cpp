#include "models/layer_types.h"

#include <limits>

#include "core/error.h"

namespace llmserve {
namespace {

constexpr int64_t kMaxWindow = std::numeric_limits<int32_t>::max();

}  // namespace

void set_windows(const JsonNode& json, int32_t window,
                 const std::function<bool(int64_t)>& is_sliding, ModelConfig& config) {
  const JsonNode types = json["layer_types"];
  if (types.is_null()) {
    for (int64_t i = 0; i < config.num_layers; ++i)
      if (is_sliding(i)) config.layers[static_cast<size_t>(i)].window = window;
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
      list[i].fail(
          "sliding_attention needs a sliding_window (and, where the family has it, "
          "use_sliding_window true)");
    config.layers[i].window = window;
  }
}

int32_t read_window(const JsonNode& json, int32_t fallback) {
  const JsonNode node = json["sliding_window"];
  return node.is_absent() ? fallback : static_cast<int32_t>(node.as_int_or(0, 1, kMaxWindow));
}

void read_qwen_windows(const JsonNode& json, ModelConfig& config) {
  int32_t window = 0;
  if (json["use_sliding_window"].as_bool_or(false))
    window = static_cast<int32_t>(json["sliding_window"].as_int_or(4096, 1, kMaxWindow));
  const int64_t first = json["max_window_layers"].as_int_or(28, 0, kMaxWindow);
  set_windows(json, window, [&](int64_t i) { return i >= first; }, config);
}

}  // namespace llmserve
