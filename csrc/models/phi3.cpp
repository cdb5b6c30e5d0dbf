// Phi-3, 3.5 and 4 (dense, text): Llama's layout with q, k, v and gate, up fused, and longrope.
// Abdin et al. 2024.
#include "core/error.h"
#include "models/architectures.h"
#include "models/layer_types.h"

namespace llmserve {

namespace {

// The family's "yarn" is a longrope with other factors, which no released model has.
void refuse_other_ropes(const JsonNode& json) {
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (json[key].is_null()) continue;
    const JsonNode type = first_of(json[key], {"rope_type", "type"});
    if (type.is_null() || type.as_string() == "default" || type.as_string() == "longrope" ||
        type.as_string() == "su")
      continue;
    throw NotSupported(concat(type.where(), ": RoPE type ", type.describe(),
                              " is not supported by Phi-3 (default, longrope)"));
  }
}

}  // namespace

void configure_phi3(const JsonNode& json, ModelConfig& config) {
  config.names.qkv = "self_attn.qkv_proj";
  config.names.gate_up = "mlp.gate_up_proj";
  if (json["rms_norm_eps"].is_null()) config.norm.numbers.eps = 1e-5f;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 4096;
  config.rope_defaults.can_be_partial = true;
  refuse_other_ropes(json);
  const int32_t window = read_window(json, 0);
  for (LayerTraits& layer : config.layers) layer.window = window;
}

}  // namespace llmserve
