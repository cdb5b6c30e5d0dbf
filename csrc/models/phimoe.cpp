// Phi-3.5-MoE: Mixtral's layout with LayerNorms, longrope and a router of two masked softmaxes
// (sparsemixer). Abdin et al. 2024, section 2; Liu et al. 2024 (GRIN).
#include "core/error.h"
#include "models/architectures.h"
#include "models/expert_config.h"
#include "models/layer_types.h"

namespace llmserve {

void configure_phimoe(const JsonNode& json, ModelConfig& config) {
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 8;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 131072;
  config.norm = read_layer_norm(json["rms_norm_eps"]);
  config.attention_bias = json["attention_bias"].as_bool_or(false);
  config.output_bias = config.attention_bias;
  config.lm_head_bias = json["lm_head_bias"].as_bool_or(false);
  config.rope_defaults = {.theta = 1e6, .has_mscales = true};
  const int32_t window = read_window(json, 0);
  for (LayerTraits& layer : config.layers) layer.window = window;
  read_experts(json,
               {.num_experts = {"num_local_experts", "num_experts"},
                .width = {"intermediate_size"},
                .default_num_experts = 16,
                .default_top_k = 2,
                .default_width = 6400},
               config);
  ExpertSpec& experts = config.experts;
  if (experts.top_k != 2)
    throw NotSupported(concat(json["num_experts_per_tok"].where(),
                              ": expected 2, for which this "
                              "family's router is defined, got ",
                              experts.top_k));
  experts.router.score = RouterScore::kSparsemixer;
  experts.router.jitter =
      static_cast<float>(json["router_jitter_noise"].as_number_or(0.01, 0.0, 1e3));
  experts.names.router = "block_sparse_moe.gate";
  experts.names.gate = "block_sparse_moe.experts.{}.w1";
  experts.names.up = "block_sparse_moe.experts.{}.w3";
  experts.names.down = "block_sparse_moe.experts.{}.w2";
  set_expert_layers([](int64_t) { return true; }, config);
}

}  // namespace llmserve
