// Experts in the metadata of GGUF files. Keys: gguf-py 0.19, constants.py.
#include <initializer_list>

#include "core/error.h"
#include "io/gguf_architecture.h"

namespace llmserve {
namespace {

using Fields = std::initializer_list<std::string_view>;

void copy_integer(GgufConfig& config, std::string_view key, Fields fields) {
  for (const std::string_view field : fields) config.copy_integer(key, field);
}

// Layers that draft further tokens are counted among the others.
void leave_out_draft_layers(GgufConfig& config) {
  const GgufValue* value = config.find("nextn_predict_layers");
  const int64_t count = value ? config.uniform_integer(*value) : 0;
  const int64_t all = config.integer("num_hidden_layers");
  if (value && (count < 0 || count >= all))
    config.file().fail(value->key, concat("expected fewer than the ", all, " layers, got ", count));
  config.set("num_nextn_predict_layers", {count});
  config.set("num_hidden_layers", {all - count});
}

}  // namespace

void add_experts(GgufConfig& config, const GgufArchitecture& architecture) {
  const GgufValue* experts = config.find("expert_count");
  if (!experts || config.uniform_integer(*experts) == 0) return;
  if (!architecture.has_experts)
    throw NotSupported(concat(config.file().file()->path().string(), ": metadata ", experts->key,
                              ": experts are not supported in files of the architecture \"",
                              architecture.name, "\""));
  copy_integer(config, "expert_count",
               {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"});
  copy_integer(config, "expert_used_count", {"num_experts_per_tok", "moe_topk", "moe_k"});
  copy_integer(config, "expert_feed_forward_length", {"moe_intermediate_size"});
  copy_integer(config, "expert_shared_feed_forward_length",
               {"shared_expert_intermediate_size", "shared_intermediate_size"});
  copy_integer(config, "expert_shared_count",
               {"n_shared_experts", "moe_num_shared_experts", "num_shared_experts"});
  copy_integer(config, "expert_group_count", {"n_group"});
  copy_integer(config, "expert_group_used_count", {"topk_group"});
  copy_integer(config, "leading_dense_block_count",
               {"first_k_dense_replace", "moe_layer_start_index"});
  copy_integer(config, "interleave_moe_layer_step", {"moe_layer_interval"});
  config.copy_number("expert_weights_scale", "routed_scaling_factor");
  if (const GgufValue* norm = config.find("expert_weights_norm"))
    config.set("norm_topk_prob", {config.file().boolean(*norm)});
  leave_out_draft_layers(config);
}

}  // namespace llmserve
