// DeepSeek-V2 and V3, and what has their attention: latents that all heads share, rotated by
// neighbours, and experts beside one that all tokens have. DeepSeek-AI 2024. Kimi K2's text is a
// DeepSeek-V3: Moonshot AI 2025. GLM-4.7-Flash: Z.ai 2026. Mistral Small 4: Mistral AI 2026.
// Youtu-LLM is the same with dense layers: Tencent 2025.
#include "core/error.h"
#include "models/architectures.h"
#include "models/config_fields.h"
#include "models/expert_config.h"
#include "models/latent_config.h"

namespace llmserve {
namespace {

constexpr int64_t kMaxDraftLayers = 64;
const std::initializer_list<std::string_view> kRouted = {"n_routed_experts", "num_local_experts",
                                                         "num_experts"};
constexpr LatentDims kV3{
    .query_rank = 1536, .rank = 512, .plain_dim = 128, .rotary_dim = 64, .value_dim = 128};

void read_draft_layers(const JsonNode& json, ModelConfig& config) {
  config.num_draft_layers = first_of(json, {"num_nextn_predict_layers", "num_mtp_layers"})
                                .as_int_or(1, 0, kMaxDraftLayers);
}

// Every layer behind the first ones has experts.
void require_every_layer(const JsonNode& json) {
  const JsonNode step = json["moe_layer_freq"];
  if (!step.is_null() && step.as_int(1, 1 << 16) != 1)
    throw NotSupported(concat(step.where(), ": ", step.describe(), " is not supported, only 1"));
}

}  // namespace

void configure_deepseek_v2(const JsonNode& json, ModelConfig& config) {
  read_latent(json, kV3, config);
  config.is_rope_interleaved = true;
  if (config.intermediate_size == 0) config.intermediate_size = 11008;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 2048;
  require(json["mlp_bias"], false);
  require_every_layer(json);
  read_experts(json, {.num_experts = kRouted, .default_num_experts = 64, .default_width = 1407},
               config);
  read_sigmoid_router(json, config);  // whose groups and scale these are, too
  RouterNumbers& router = config.experts.router;
  router.score = RouterScore::kSoftmax;
  router.group_top = 1;
  router.normalises = false;  // whatever norm_topk_prob says
  router.sum_eps = 0.0f;
  config.experts.names.choice_bias = "";
  const JsonNode method = json["topk_method"];
  const std::string name = method.is_null() ? "greedy" : method.as_string();
  if (name == "greedy")
    router.num_groups = router.top_groups = 1;
  else if (name != "group_limited_greedy")
    throw NotSupported(concat(method.where(), ": ", method.describe(),
                              " is not supported (greedy, group_limited_greedy)"));
  read_shared_experts(json["n_shared_experts"], 2, config);
  read_first_dense_layers(json, 0, config);
}

void configure_deepseek_v3(const JsonNode& json, ModelConfig& config) {
  read_latent(json, kV3, config);
  config.is_rope_interleaved = json["rope_interleave"].as_bool_or(true);
  if (config.intermediate_size == 0) config.intermediate_size = 18432;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 4096;
  require_every_layer(json);
  read_experts(json,
               {.num_experts = kRouted,
                .default_num_experts = 256,
                .default_top_k = 8,
                .default_width = 2048},
               config);
  read_sigmoid_router(json, config);
  read_shared_experts(json["n_shared_experts"], 1, config);
  read_first_dense_layers(json, 3, config);
  read_draft_layers(json, config);
}

void configure_glm4_moe_lite(const JsonNode& json, ModelConfig& config) {
  LatentDims absent = kV3;
  absent.query_rank = 768;
  absent.plain_dim = 192;
  absent.value_dim = 256;
  read_latent(json, absent, config);
  config.is_rope_interleaved = json["rope_interleave"].as_bool_or(true);
  if (json["rms_norm_eps"].is_null()) config.norm.numbers.eps = 1e-5f;
  if (config.intermediate_size == 0) config.intermediate_size = 10240;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 202752;
  read_experts(json,
               {.num_experts = kRouted,
                .default_num_experts = 64,
                .default_top_k = 4,
                .default_width = 1536},
               config);
  read_sigmoid_router(json, config);
  if (json["routed_scaling_factor"].is_null()) config.experts.router.scale = 1.8f;
  read_shared_experts(json["n_shared_experts"], 1, config);
  read_mlp_layer_types(json, 1, config);
  read_draft_layers(json, config);
}

void configure_mistral4(const JsonNode& json, ModelConfig& config) {
  constexpr LatentDims kAbsent{
      .query_rank = 1024, .rank = 256, .plain_dim = 64, .rotary_dim = 64, .value_dim = 128};
  read_latent(json, kAbsent, config);
  config.is_rope_interleaved = json["rope_interleave"].as_bool_or(true);
  if (config.intermediate_size == 0) config.intermediate_size = 12288;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 1048576;
  const LatentDims& dims = config.latent;
  if (dims.plain_dim % 2 != 0)
    json["qk_nope_head_dim"].fail(concat("expected an even number, got ", dims.plain_dim));
  config.head_dim = dims.query_dim();  // of which the rotated part is a share
  config.rope_defaults = {.can_be_partial = true,
                          .partial_factor = static_cast<double>(dims.rotary_dim) /
                                            static_cast<double>(dims.query_dim()),
                          .scales_queries = true};
  const JsonNode rope = first_of(json, {"rope_parameters", "rope_scaling"});
  const JsonNode type = first_of(rope, {"rope_type", "type"});
  if (type.as_string() != "yarn")  // without an original length queries do not grow
    throw NotSupported(concat(type.where(), ": RoPE type ", type.describe(),
                              " is not supported by Mistral Small 4 (yarn)"));
  read_experts(json,
               {.num_experts = kRouted,
                .default_num_experts = 128,
                .default_top_k = 4,
                .default_width = 2048},
               config);
  read_sigmoid_router(json, config);
  config.experts.router.score = RouterScore::kSoftmax;
  config.experts.names.choice_bias = "";
  config.experts.names.gate_up = "mlp.experts.gate_up_proj";
  config.experts.names.down = "mlp.experts.down_proj";
  read_shared_experts(json["n_shared_experts"], 1, config);
  read_first_dense_layers(json, 0, config);
}

void configure_youtu(const JsonNode& json, ModelConfig& config) {
  read_latent(json, kV3, config);
  config.is_rope_interleaved = json["rope_interleave"].as_bool_or(true);
  if (json["tie_word_embeddings"].is_null()) config.tie_word_embeddings = true;
  if (config.intermediate_size == 0) config.intermediate_size = 6144;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 131072;
}

}  // namespace llmserve
