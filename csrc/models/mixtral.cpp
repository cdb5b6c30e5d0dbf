// Mixtral: Mistral's layout with experts in place of the MLP. Jiang et al. 2024.
#include "models/architectures.h"
#include "models/expert_config.h"
#include "models/layer_types.h"

namespace llmserve {

void configure_mixtral(const JsonNode& json, ModelConfig& config) {
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 8;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 131072;
  if (json["rms_norm_eps"].is_null()) config.norm.numbers.eps = 1e-5f;
  config.rope_defaults.theta = 1e6;
  const int32_t window = read_window(json, 0);
  for (LayerTraits& layer : config.layers) layer.window = window;
  read_experts(json,
               {.num_experts = {"num_local_experts", "num_experts"},
                .width = {"intermediate_size"},
                .default_num_experts = 8,
                .default_top_k = 2,
                .default_width = 14336},
               config);
  ExpertNames& names = config.experts.names;
  names.router = "block_sparse_moe.gate";
  names.gate = "block_sparse_moe.experts.{}.w1";
  names.up = "block_sparse_moe.experts.{}.w3";
  names.down = "block_sparse_moe.experts.{}.w2";
  config.experts.router.normalises = true;
  set_expert_layers([](int64_t) { return true; }, config);
}

}  // namespace llmserve
