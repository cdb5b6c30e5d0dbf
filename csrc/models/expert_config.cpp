#include "models/expert_config.h"

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "models/config_fields.h"
#include "models/layer_kinds.h"

namespace llmserve {
namespace {

// Far above any model; ids of experts are 32 bits.
constexpr int64_t kMaxExperts = 1 << 16;
constexpr int64_t kMaxWidth = int64_t{1} << 20;
constexpr int64_t kMaxLayers = 4096;

// A number, or a list of one for each layer, all alike.
int64_t read_size(const JsonNode& node, int64_t fallback, int64_t max) {
  if (!node.is_array())
    return fallback == 0 ? node.as_int(1, max) : node.as_int_or(fallback, 1, max);
  const std::vector<JsonNode> list = node.as_array();
  if (list.empty()) node.fail("expected a number for each layer, got none");
  const int64_t first = list[0].as_int(1, max);
  for (const JsonNode& each : list)
    if (each.as_int(1, max) != first)
      throw NotSupported(concat(node.where(), ": layers that differ (", first, " and ",
                                each.as_int(1, max), ") are not supported"));
  return first;
}

}  // namespace

void read_experts(const JsonNode& json, const ExpertFields& fields, ModelConfig& config) {
  ExpertSpec& experts = config.experts;
  experts.num_experts =
      read_size(first_of(json, fields.num_experts), fields.default_num_experts, kMaxExperts);
  const JsonNode top_k = first_of(json, fields.top_k);
  experts.top_k = read_size(top_k, fields.default_top_k, kMaxExperts);
  if (experts.top_k > experts.num_experts)
    top_k.fail(concat("expected at most the ", experts.num_experts, " experts that there are, got ",
                      experts.top_k));
  experts.intermediate_size =
      read_size(first_of(json, fields.width), fields.default_width, kMaxWidth);
  if (config.intermediate_size == 0) config.intermediate_size = experts.intermediate_size;
}

void read_sigmoid_router(const JsonNode& json, ModelConfig& config) {
  ExpertSpec& experts = config.experts;
  RouterNumbers& router = experts.router;
  router.score = RouterScore::kSigmoid;
  const JsonNode num_groups = json["n_group"];
  router.num_groups = static_cast<int32_t>(num_groups.as_int_or(1, 1, kMaxExperts));
  const int64_t width = experts.num_experts / router.num_groups;
  if (experts.num_experts % router.num_groups != 0)
    num_groups.fail(concat("expected a divisor of the ", experts.num_experts, " experts, got ",
                           router.num_groups));
  if (router.num_groups > 1 && width < 2)
    num_groups.fail(
        concat("expected groups of at least 2 experts, by which groups are compared, "
               "got ",
               router.num_groups, " groups of ", experts.num_experts));
  router.group_top = width < 2 ? 1 : 2;
  const JsonNode top_groups = json["topk_group"];
  router.top_groups = static_cast<int32_t>(top_groups.as_int_or(1, 1, router.num_groups));
  if (experts.top_k > router.top_groups * width)
    top_groups.fail(concat("expected groups with at least the ", experts.top_k,
                           " experts of a token, got ", router.top_groups, " of ", width));
  router.normalises = json["norm_topk_prob"].as_bool_or(true);
  router.sum_eps = 1e-20f;
  router.scale = static_cast<float>(json["routed_scaling_factor"].as_number_or(1.0, -1e6, 1e6));
  experts.names.choice_bias = "mlp.gate.e_score_correction_bias";
}

void read_shared_experts(const JsonNode& field, int64_t fallback, ModelConfig& config) {
  const int64_t count = field.as_int_or(fallback, 0, kMaxExperts);
  const int64_t width = count * config.experts.intermediate_size;
  if (width > kMaxWidth)
    field.fail(concat("expected shared experts of at most ", kMaxWidth, " elements, got ", count,
                      " of ", config.experts.intermediate_size));
  config.experts.shared_size = width;
}

void set_expert_layers(const std::function<bool(int64_t)>& has_experts, ModelConfig& config) {
  for (size_t i = 0; i < config.layers.size(); ++i)
    config.layers[i].feed_forward = has_experts(static_cast<int64_t>(i)) ? &kExperts : &kGatedMlp;
}

void read_first_dense_layers(const JsonNode& json, int64_t fallback, ModelConfig& config) {
  const int64_t first = json["first_k_dense_replace"].as_int_or(fallback, 0, kMaxLayers);
  set_expert_layers([&](int64_t i) { return i >= first; }, config);
}

void read_mlp_layer_types(const JsonNode& json, int64_t fallback, ModelConfig& config) {
  const JsonNode types = json["mlp_layer_types"];
  if (types.is_null()) return read_first_dense_layers(json, fallback, config);
  const std::vector<JsonNode> list = types.as_array();
  if (static_cast<int64_t>(list.size()) != config.num_layers)
    types.fail(
        concat("expected num_hidden_layers ", config.num_layers, " entries, got ", list.size()));
  for (const JsonNode& type : list)
    if (type.as_string() != "dense" && type.as_string() != "sparse")
      type.fail(concat("expected dense or sparse, got ", type.describe()));
  set_expert_layers([&](int64_t i) { return list[static_cast<size_t>(i)].as_string() == "sparse"; },
                    config);
}

void read_qwen_expert_layers(const JsonNode& json, ModelConfig& config) {
  const int64_t step = json["decoder_sparse_step"].as_int_or(1, 1, kMaxLayers);
  std::vector<int64_t> dense;
  if (const JsonNode list = json["mlp_only_layers"]; !list.is_null())
    for (const JsonNode& idx : list.as_array()) dense.push_back(idx.as_int(0, kMaxLayers));
  set_expert_layers(
      [&](int64_t i) { return (i + 1) % step == 0 && std::ranges::find(dense, i) == dense.end(); },
      config);
}

void expect_stacked_experts(ExpertSpec& experts) {
  const bool has_choice_bias = !experts.names.choice_bias.empty();
  const bool has_bias = !experts.names.down_bias.empty();
  const bool has_shared_weight = !experts.names.shared_weight.empty();
  experts.names = {.gate = "mlp.experts.gate_proj.weight",
                   .up = "mlp.experts.up_proj.weight",
                   .down = "mlp.experts.down_proj.weight"};
  if (has_choice_bias) experts.names.choice_bias = "mlp.gate.choice.bias";
  if (has_shared_weight) experts.names.shared_weight = "mlp.shared_expert_gate";
  if (has_bias) {
    experts.names.gate_bias = "mlp.experts.gate_proj.bias";
    experts.names.up_bias = "mlp.experts.up_proj.bias";
    experts.names.down_bias = "mlp.experts.down_proj.bias";
  }
  experts.is_transposed = experts.is_interleaved = experts.is_choice_bias_row = false;
  experts.is_shared_weight_vector = has_shared_weight;
}

}  // namespace llmserve
