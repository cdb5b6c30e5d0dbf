// What families with experts read alike from config.json.
#pragma once

#include <functional>
#include <initializer_list>
#include <string_view>

#include "io/json.h"
#include "models/model_config.h"

namespace llmserve {

// How a family spells the sizes of its experts, the first spelling that is there, and what stands
// for an absent one; 0: it has to be given.
struct ExpertFields {
  std::initializer_list<std::string_view> num_experts = {"num_experts", "num_local_experts"};
  std::initializer_list<std::string_view> top_k = {"num_experts_per_tok"};
  std::initializer_list<std::string_view> width = {"moe_intermediate_size"};
  int64_t default_num_experts = 0;
  int64_t default_top_k = 0;
  int64_t default_width = 0;
};

// Sizes of config.experts; the MLP of dense layers is as wide as an expert unless the config says
// more. A size may be a list of one number for each layer, all alike. Throws CorruptFile, naming
// the field, for more experts a token than there are; NotSupported where layers differ.
void read_experts(const JsonNode& json, const ExpertFields& fields, ModelConfig& config);

// The router of DeepSeek-V3 and kin: sigmoids, groups, a bias by which experts are chosen. Fields:
// n_group, topk_group, norm_topk_prob, routed_scaling_factor. DeepSeek-AI 2024, section 2.1.2.
void read_sigmoid_router(const JsonNode& json, ModelConfig& config);

// The width of the expert that all tokens have: `field` experts as wide as the others.
void read_shared_experts(const JsonNode& field, int64_t fallback, ModelConfig& config);

// Which layers have experts; the others are dense.
void set_expert_layers(const std::function<bool(int64_t layer_idx)>& has_experts,
                       ModelConfig& config);
// All but the first ones, of which there are first_k_dense_replace.
void read_first_dense_layers(const JsonNode& json, int64_t fallback, ModelConfig& config);
// By mlp_layer_types, a list of "dense" and "sparse"; where it is absent, as above.
void read_mlp_layer_types(const JsonNode& json, int64_t fallback, ModelConfig& config);
// As Qwen's families have them: every decoder_sparse_step-th layer that mlp_only_layers does not
// name.
void read_qwen_expert_layers(const JsonNode& json, ModelConfig& config);

// Of files (GGUF) whose converter gave all families the same names and stacked the experts.
void expect_stacked_experts(ExpertSpec& experts);

}  // namespace llmserve
