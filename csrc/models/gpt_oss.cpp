// gpt-oss: every other layer behind a window, sinks beside the scores, biases everywhere, and
// experts with a clamped gate. OpenAI 2025.
#include "core/error.h"
#include "models/architectures.h"
#include "models/expert_config.h"
#include "models/layer_types.h"

namespace llmserve {
namespace {

// The activation has these numbers built in.
void expect_number(const JsonNode& node, double expected) {
  if (node.is_null() || node.as_number(-1e6, 1e6) == expected) return;
  throw NotSupported(
      concat(node.where(), ": ", node.describe(), " is not supported, only ", expected));
}

}  // namespace

void configure_gpt_oss(const JsonNode& json, ModelConfig& config) {
  if (json["num_key_value_heads"].is_absent()) config.num_kv_heads = 8;
  if (json["head_dim"].is_absent()) config.head_dim = 64;
  if (json["rms_norm_eps"].is_null()) config.norm.numbers.eps = 1e-5f;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 131072;
  config.attention_bias = json["attention_bias"].as_bool_or(true);
  config.output_bias = config.attention_bias;
  config.has_sinks = true;
  config.rope_defaults = {.theta = 150000.0, .truncates = false};  // as files that do not say
  set_windows(json, read_window(json, 128), [](int64_t i) { return i % 2 == 0; }, config);
  config.activation = Activation::kSwigluOai;
  expect_number(json["swiglu_alpha"], 1.702);
  expect_number(json["swiglu_limit"], 7.0);
  read_experts(json,
               {.num_experts = {"num_local_experts", "num_experts"},
                .top_k = {"num_experts_per_tok", "experts_per_token"},
                .width = {"intermediate_size"},
                .default_num_experts = 128,
                .default_top_k = 4,
                .default_width = 2880},
               config);
  ExpertSpec& experts = config.experts;
  experts.router.score = RouterScore::kSoftmaxOfChosen;
  experts.has_router_bias = true;
  experts.is_transposed = experts.is_interleaved = true;
  experts.names.router = "mlp.router";
  experts.names.gate_up = "mlp.experts.gate_up_proj";
  experts.names.down = "mlp.experts.down_proj";
  experts.names.gate_up_bias = "mlp.experts.gate_up_proj_bias";
  experts.names.down_bias = "mlp.experts.down_proj_bias";
  set_expert_layers([](int64_t) { return true; }, config);
}

}  // namespace llmserve
