// OLMoE: Llama's layout with norms over all queries and all keys, and experts in every layer.
// Muennighoff et al. 2024.
#include "core/error.h"
#include "models/architectures.h"
#include "models/expert_config.h"

namespace llmserve {

void configure_olmoe(const JsonNode& json, ModelConfig& config) {
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 4096;
  if (json["rms_norm_eps"].is_null()) config.norm.numbers.eps = 1e-5f;
  config.qk_norm = QkNorm::kProjection;
  config.attention_bias = json["attention_bias"].as_bool_or(false);
  config.output_bias = config.attention_bias;
  if (!json["clip_qkv"].is_null())
    throw NotSupported(concat(json["clip_qkv"].where(), ": ", json["clip_qkv"].describe(),
                              " is not supported, only null"));
  read_experts(json,
               {.width = {"intermediate_size"},
                .default_num_experts = 64,
                .default_top_k = 8,
                .default_width = 2048},
               config);
  config.experts.router.normalises = json["norm_topk_prob"].as_bool_or(false);
  set_expert_layers([](int64_t) { return true; }, config);
}

}  // namespace llmserve
