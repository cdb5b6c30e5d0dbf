// The kinds of attention and feed-forward layers that a decoder is made of: one row each, in
// layer_kinds.cpp. LayerTraits names the rows of a layer; a family of another kind brings a row.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "layers/attention_layer.h"
#include "layers/feed_forward.h"
#include "layers/kv_place.h"
#include "layers/weight_loader.h"
#include "models/model_config.h"

namespace llmserve {

struct AttentionKind {
  std::string_view name;
  // What such a layer keeps of a sequence, as groups of one layer: rows, a state, or both.
  std::vector<CacheGroupSpec> (*keeps)(const ModelConfig& config, const LayerTraits& layer);
  std::unique_ptr<AttentionLayer> (*make)(WeightLoader& weights, const ModelConfig& config,
                                          int64_t layer_idx);
  // Ranks keep the rows of their KV heads alone. Otherwise each keeps all.
  bool cuts_kv_heads = false;
};

struct FeedForwardKind {
  std::string_view name;
  std::unique_ptr<FeedForward> (*make)(WeightLoader& weights, const ModelConfig& config,
                                       int64_t layer_idx);
};

// Causal, grouped heads, keys and values of each KV head in a paged cache.
extern const AttentionKind kGroupedAttention;

// One latent a token, of which all heads make their keys and values: ModelConfig::latent.
extern const AttentionKind kLatentAttention;

// Two dense products: with a gate, or without.
extern const FeedForwardKind kGatedMlp;
extern const FeedForwardKind kPlainMlp;
// Experts, as ModelConfig::experts has them.
extern const FeedForwardKind kExperts;

// config.cache_groups as a rank keeps them.
std::vector<CacheGroupSpec> rank_cache_groups(const ModelConfig& config, const TensorRank& rank);

// "model.layers.3.", before the names of a layer's tensors.
std::string layer_prefix(const ModelConfig& config, int64_t layer_idx);

}  // namespace llmserve
