// GPT-Neo: GPT-2's layout with weights stored [out, in], scores that are not scaled, and windows on
// some layers. Black et al. 2021. TinyStories: Eldan & Li 2023.
#include <limits>
#include <string>
#include <vector>

#include "core/error.h"
#include "models/architectures.h"

namespace llmserve {
namespace {

// Layers of a model whose config says of none what it sees: every second one has a window.
constexpr int64_t kNumAlternating = 24;

// Pairs of a pattern and how often it is repeated: [[["global", "local"], 12]].
std::vector<JsonNode> expand(const JsonNode& types, int64_t num_layers) {
  std::vector<JsonNode> layers;
  for (const JsonNode& pair : types.as_array()) {
    const std::vector<JsonNode> items = pair.as_array();
    if (items.size() != 2) pair.fail("expected a list of kinds of layers and a number");
    const std::vector<JsonNode> pattern = items[0].as_array();
    const int64_t count = items[1].as_int(0, num_layers);
    for (int64_t i = 0; i < count; ++i) {
      layers.insert(layers.end(), pattern.begin(), pattern.end());
      if (static_cast<int64_t>(layers.size()) > num_layers)
        types.fail(concat("expected num_layers ", num_layers, " layers, got more"));
    }
  }
  return layers;
}

// attention_layers says it of each layer and goes before attention_types, as in transformers.
void read_windows(const JsonNode& json, ModelConfig& config) {
  const auto window = static_cast<int32_t>(
      json["window_size"].as_int_or(256, 1, std::numeric_limits<int32_t>::max()));
  const JsonNode list = json["attention_layers"];
  const JsonNode types = json["attention_types"];
  if (list.is_null() && types.is_null() && config.num_layers == kNumAlternating) {
    for (size_t i = 1; i < config.layers.size(); i += 2) config.layers[i].window = window;
    return;
  }
  const std::vector<JsonNode> kinds =
      list.is_null() ? expand(types, config.num_layers) : list.as_array();
  if (kinds.size() != config.layers.size())
    (list.is_null() ? types : list)
        .fail(concat("expected num_layers ", config.num_layers, " layers, got ", kinds.size()));
  for (size_t i = 0; i < kinds.size(); ++i) {
    const std::string& kind = kinds[i].as_string();
    if (kind == "local")
      config.layers[i].window = window;
    else if (kind != "global")
      kinds[i].fail(concat("expected global or local, got ", kinds[i].describe()));
  }
}

}  // namespace

void configure_gpt_neo(const JsonNode& json, ModelConfig& config) {
  TensorNames& names = config.names;
  names.embedding = "transformer.wte";
  names.positions = "transformer.wpe";
  names.final_norm = "transformer.ln_f";
  names.layers = "transformer.h.";
  names.attention_norm = "ln_1";
  names.mlp_norm = "ln_2";
  names.q = "attn.attention.q_proj";
  names.k = "attn.attention.k_proj";
  names.v = "attn.attention.v_proj";
  names.attention_output = "attn.attention.out_proj";
  names.gate = "";
  names.up = "mlp.c_fc";
  names.down = "mlp.c_proj";
  config.norm = read_layer_norm(json["layer_norm_epsilon"]);
  config.output_bias = config.mlp_bias = true;
  config.has_rope = false;
  config.num_kv_heads = config.num_heads;
  config.head_dim = 0;  // follows from the width
  config.attention_scale = 1.0f;
  config.activation = read_activation(json["activation_function"], Activation::kGeluTanh);
  config.tie_word_embeddings = json["tie_word_embeddings"].as_bool_or(true);
  if (config.intermediate_size == 0) config.intermediate_size = 4 * config.hidden_size;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 2048;
  read_windows(json, config);
}

}  // namespace llmserve
