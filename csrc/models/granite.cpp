// Granite 3: Llama's layout with factors on embeddings, scores, residuals and logits; with experts,
// or with some and one that all tokens have. IBM Granite Team 2024.
#include "models/architectures.h"
#include "models/expert_config.h"

namespace llmserve {

void configure_granite(const JsonNode& json, ModelConfig& config) {
  const auto factor = [&](const char* key) {
    return static_cast<float>(json[key].as_number_or(1.0, 1e-6, 1e6));
  };
  config.embedding_scale = factor("embedding_multiplier");
  config.attention_scale = factor("attention_multiplier");
  config.residual_scale = factor("residual_multiplier");
  config.logit_scale = 1.0f / factor("logits_scaling");
  config.attention_bias = json["attention_bias"].as_bool_or(false);
  config.output_bias = config.attention_bias;
  config.mlp_bias = json["mlp_bias"].as_bool_or(false);
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 2048;
}

void configure_granite_moe(const JsonNode& json, ModelConfig& config) {
  configure_granite(json, config);
  config.mlp_bias = false;
  read_experts(json,
               {.num_experts = {"num_local_experts", "num_experts"},
                .width = {"intermediate_size"},
                .default_num_experts = 8,
                .default_top_k = 2,
                .default_width = 11008},
               config);
  ExpertSpec& experts = config.experts;
  experts.router.score = RouterScore::kSoftmaxOfChosen;
  experts.names.router = "block_sparse_moe.router.layer";
  experts.names.gate_up = "block_sparse_moe.input_linear.weight";
  experts.names.down = "block_sparse_moe.output_linear.weight";
  set_expert_layers([](int64_t) { return true; }, config);
}

void configure_granite_moe_shared(const JsonNode& json, ModelConfig& config) {
  configure_granite_moe(json, config);
  ExpertSpec& experts = config.experts;
  experts.shared_size = json["shared_intermediate_size"].as_int_or(0, 0, 1 << 20);
  experts.names.shared_gate_up = "shared_mlp.input_linear";
  experts.names.shared_down = "shared_mlp.output_linear";
}

}  // namespace llmserve
