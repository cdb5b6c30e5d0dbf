// The one normalised description of a decoder, which config_reader.h makes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/ops.h"
#include "layers/expert_spec.h"
#include "layers/head_norm.h"
#include "layers/kv_place.h"
#include "layers/latent_dims.h"
#include "layers/norm.h"
#include "layers/tensor_names.h"
#include "models/rope.h"

namespace llmserve {

struct AttentionKind;
struct FeedForwardKind;

// In what the layers of one model differ.
struct LayerTraits {
  // Rows of layer_kinds.h. Where a family sets none: grouped attention, and an MLP with a gate if
  // TensorNames has one.
  const AttentionKind* attention = nullptr;
  const FeedForwardKind* feed_forward = nullptr;
  int32_t window = 0;  // tokens that the layer looks back; 0: all
  int32_t rope = 0;    // which of the model's rotary embeddings; -1: none
  bool operator==(const LayerTraits&) const = default;
};
inline constexpr size_t kMaxRopes = 2;

// How a family's config spells its rotary embeddings, and what stands for absent fields.
struct RopeDefaults {
  double theta = 10000.0;
  std::optional<double> sliding_theta;  // layers with a window have a rotary embedding of their own
  bool can_be_partial = false;          // the family rotates a part of each head
  double partial_factor = 1.0;
  bool scales_queries = false;    // by their positions
  bool has_mscales = false;       // longrope says by what cosines and sines are multiplied
  bool truncates = true;          // yarn: what stands for an absent field
  bool can_be_stretched = false;  // type dynamic with an alpha: a larger base, whatever the length
  bool operator==(const RopeDefaults&) const = default;
};

struct ModelConfig {
  std::string architecture;  // Hugging Face's name: a row of the registry
  std::string text_part_of;  // the architecture that the model was within, or empty
  std::string stored_dtype;  // as the config says ("bfloat16"), or empty

  int64_t vocab_size = 0;         // V
  int64_t hidden_size = 0;        // E
  int64_t intermediate_size = 0;  // F
  int64_t num_layers = 0;
  int64_t num_draft_layers = 0;  // behind them in files: they draft further tokens, and do not run
  int64_t num_heads = 0;         // H
  int64_t num_kv_heads = 0;      // K, divides H
  int64_t head_dim = 0;          // D

  // What the decoder is made of; parts without a name are not there.
  TensorNames names;
  NormSpec norm;
  bool is_parallel = false;  // attention and MLP of a layer read the same hidden states
  QkNorm qk_norm = QkNorm::kNone;
  bool qk_norm_bias = false;  // of norms of queries and keys, where norm is of kind kLayer
  bool has_qk_norm_after_rope = false;  // instead of before
  bool attention_bias = false;          // of q, k, v
  bool output_bias = false;             // of the projection after attention
  bool mlp_bias = false;
  bool lm_head_bias = false;
  bool has_sinks = false;               // of the attention of all layers
  LatentDims latent;                    // where layers are of kLatentAttention
  bool is_qkv_by_group = false;         // a fused qkv has each KV head's queries, key and value
  bool has_transposed_weights = false;  // linear weights are stored [in, out]
  bool is_rope_interleaved = false;     // pairs are neighbours, not halves
  Activation activation = Activation::kSilu;
  std::optional<float> attention_scale;  // of the scores, instead of 1 / sqrt(D)
  float attention_soft_cap = 0.0f;       // 0: none
  float embedding_scale = 1.0f;
  float residual_scale = 1.0f;  // of what a layer adds
  float logit_scale = 1.0f;
  float logit_soft_cap = 0.0f;  // 0: none
  bool tie_word_embeddings = false;
  std::vector<LayerTraits> layers;  // [num_layers]
  ExpertSpec experts;               // of layers of kind kExperts

  int64_t position_offset = 0;  // the row of names.positions that is position 0's
  bool has_rope = true;
  RopeDefaults rope_defaults;
  std::vector<RopeParameters> ropes;  // at most kMaxRopes
  int64_t max_position_embeddings = 0;
  int64_t max_model_len = 0;  // what this process serves; fixes the frequencies of some ropes

  std::vector<CacheGroupSpec> cache_groups;  // as in CacheConfig
  std::vector<KvPlace> kv_places;            // [num_layers]

  std::vector<int32_t> bos_token_ids;
  std::vector<int32_t> eos_token_ids;

  bool operator==(const ModelConfig&) const = default;
};

}  // namespace llmserve
