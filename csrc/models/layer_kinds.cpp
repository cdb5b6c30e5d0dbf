#include "models/layer_kinds.h"

#include <cmath>

#include "core/error.h"
#include "layers/attention.h"
#include "layers/latent_attention.h"
#include "layers/mlp.h"
#include "layers/moe.h"

namespace llmserve {
namespace {

// The norms of queries and keys are of the model's kind.
NormSpec qk_norm_spec(const ModelConfig& config) {
  NormSpec spec = config.norm;
  spec.has_bias = config.qk_norm_bias;
  return spec;
}

AttentionSpec attention_spec(const ModelConfig& config, int64_t layer_idx) {
  const auto idx = static_cast<size_t>(layer_idx);
  return {.hidden_size = config.hidden_size,
          .num_heads = config.num_heads,
          .num_kv_heads = config.num_kv_heads,
          .head_dim = config.head_dim,
          .qkv_bias = config.attention_bias,
          .output_bias = config.output_bias,
          .has_sinks = config.has_sinks,
          .is_transposed = config.has_transposed_weights,
          .is_qkv_by_group = config.is_qkv_by_group,
          .qk_norm = config.qk_norm,
          .norm = qk_norm_spec(config),
          .has_norm_after_rope = config.has_qk_norm_after_rope,
          .is_interleaved = config.is_rope_interleaved,
          .scale = config.attention_scale.value_or(1.0f /
                                                   std::sqrt(static_cast<float>(config.head_dim))),
          .soft_cap = config.attention_soft_cap,
          .window = config.layers[idx].window,
          .kv_group = config.kv_places[idx].group};
}

std::vector<CacheGroupSpec> grouped_keeps(const ModelConfig& config, const LayerTraits& layer) {
  return {{.window = layer.window,
           .num_kv_heads = config.num_kv_heads,
           .key_dim = config.head_dim,
           .value_dim = config.head_dim}};
}

std::unique_ptr<AttentionLayer> make_grouped(WeightLoader& weights, const ModelConfig& config,
                                             int64_t layer_idx) {
  return std::make_unique<Attention>(weights, config.names, layer_prefix(config, layer_idx),
                                     attention_spec(config, layer_idx));
}

// YaRN's factor of the scores, squared, since queries and keys are both to have it.
float yarn_score_scale(const ModelConfig& config) {
  if (config.ropes.empty() || config.ropes[0].type == RopeType::kDefault) return 1.0f;
  const RopeParameters& rope = config.ropes[0];
  if (rope.mscale_all_dim == 0.0 || rope.factor <= 1.0) return 1.0f;
  const double scale = 0.1 * rope.mscale_all_dim * std::log(rope.factor) + 1.0;
  return static_cast<float>(scale * scale);
}

LatentAttentionSpec latent_spec(const ModelConfig& config, int64_t layer_idx) {
  const auto idx = static_cast<size_t>(layer_idx);
  const float scale = config.attention_scale.value_or(
      1.0f / std::sqrt(static_cast<float>(config.latent.query_dim())));
  LatentAttentionSpec spec{.hidden_size = config.hidden_size,
                           .num_heads = config.num_heads,
                           .dims = config.latent,
                           .is_interleaved = config.is_rope_interleaved,
                           .scale = scale * yarn_score_scale(config),
                           .window = config.layers[idx].window,
                           .kv_group = config.kv_places[idx].group};
  if (!config.ropes.empty())
    spec.query_scaling = {
        .growth = static_cast<float>(config.ropes[0].query_growth),
        .period = static_cast<int32_t>(config.ropes[0].original_max_position_embeddings)};
  return spec;
}

std::vector<CacheGroupSpec> latent_keeps(const ModelConfig& config, const LayerTraits& layer) {
  return {{.window = layer.window,
           .num_kv_heads = 1,
           .key_dim = config.latent.row_dim(),
           .value_dim = config.latent.rank,
           .values_in_keys = true}};
}

std::unique_ptr<AttentionLayer> make_latent(WeightLoader& weights, const ModelConfig& config,
                                            int64_t layer_idx) {
  return std::make_unique<LatentAttention>(weights, config.names, layer_prefix(config, layer_idx),
                                           latent_spec(config, layer_idx));
}

MlpSpec mlp_spec(const ModelConfig& config) {
  return {.hidden_size = config.hidden_size,
          .intermediate_size = config.intermediate_size,
          .has_bias = config.mlp_bias,
          .is_transposed = config.has_transposed_weights,
          .activation = config.activation};
}

template <class SomeMlp>
std::unique_ptr<FeedForward> make_mlp(WeightLoader& weights, const ModelConfig& config,
                                      int64_t layer_idx) {
  return std::make_unique<SomeMlp>(weights, config.names, layer_prefix(config, layer_idx),
                                   mlp_spec(config));
}

std::unique_ptr<FeedForward> make_experts(WeightLoader& weights, const ModelConfig& config,
                                          int64_t layer_idx) {
  return std::make_unique<Experts>(weights, layer_prefix(config, layer_idx), layer_idx,
                                   config.experts, mlp_spec(config));
}

}  // namespace

const AttentionKind kGroupedAttention{
    .name = "grouped", .keeps = &grouped_keeps, .make = &make_grouped, .cuts_kv_heads = true};

const AttentionKind kLatentAttention{
    .name = "latent", .keeps = &latent_keeps, .make = &make_latent};

const FeedForwardKind kGatedMlp{.name = "gated", .make = &make_mlp<GatedMlp>};
const FeedForwardKind kPlainMlp{.name = "plain", .make = &make_mlp<PlainMlp>};
const FeedForwardKind kExperts{.name = "experts", .make = &make_experts};

std::vector<CacheGroupSpec> rank_cache_groups(const ModelConfig& config, const TensorRank& rank) {
  std::vector<CacheGroupSpec> groups = config.cache_groups;
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const int32_t group = config.kv_places[i].group;
    if (group < 0 || !config.layers[i].attention->cuts_kv_heads) continue;
    groups[static_cast<size_t>(group)].num_kv_heads =
        HeadCut(rank, config.num_heads, config.num_kv_heads).num_kv_heads;
  }
  return groups;
}

std::string layer_prefix(const ModelConfig& config, int64_t layer_idx) {
  return concat(config.names.layers, layer_idx, ".");
}

}  // namespace llmserve
