// Multi-head latent attention: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.
//
// A token keeps a latent c and a rotated key k_r, which all heads share; a head's key is W_k c
// beside k_r, its value W_v c. Prefill, chunks and decode alike multiply the query by W_k instead
// of the latents, attend to the latents themselves, and multiply what comes out by W_v
// ("absorbed"): one definition, so that a token's bits do not depend on how it came.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "layers/attention_layer.h"
#include "layers/context_cut.h"
#include "layers/head_linear.h"
#include "layers/latent_dims.h"
#include "layers/norm.h"
#include "layers/output_linear.h"
#include "layers/tensor_names.h"

namespace llmserve {

struct LatentAttentionSpec {
  int64_t hidden_size = 0;  // E
  int64_t num_heads = 0;    // H
  LatentDims dims;
  bool is_interleaved = false;  // the rotation pairs neighbours, not halves
  float scale = 1.0f;           // of the scores
  QueryScaling query_scaling;   // of the part that is not rotated; the other's is in its table
  int32_t window = 0;           // 0: unlimited
  int32_t kv_group = 0;         // the cache group whose blocks have the layer's rows
};

// Ranks share it by heads; each keeps the latents, or some keep them together, and makes them and
// the low-rank queries whole.
class LatentAttention final : public AttentionLayer {
 public:
  // Weights "<prefix><names.q_a>" and so on.
  LatentAttention(WeightLoader& weights, const TensorNames& names, const std::string& prefix,
                  const LatentAttentionSpec& spec);

  void forward(const ForwardContext& context, const LinearInput& x, const RotaryTables& angles,
               const PagedKvCache& cache, const Output& to) const override;
  int64_t workspace_bytes(int64_t num_tokens) const override;

 private:
  // Below, H is of this rank's heads. The queries [T, H, query_dim], and into `row` [T, row_dim]
  // latents and rotated keys.
  Tensor project(const ForwardContext& context, const LinearInput& x, const RotaryTables& angles,
                 Tensor& row) const;
  // Queries [T, H, row_dim] of the latents.
  Tensor absorb(const ForwardContext& context, const Tensor& queries,
                const RotaryTables& angles) const;
  // The part of queries [T, H, plain_dim] that is not rotated, scaled by positions.
  void scale_queries(const ForwardContext& context, const Tensor& plain) const;

  LatentAttentionSpec spec_;
  HeadCut cut_;
  ContextCut context_;
  Linear first_;  // q_a and kv_a, or kv_a alone
  std::optional<Norm> query_norm_;
  Norm latent_norm_;
  Linear query_;       // q_b, or q
  HeadLinear keys_;    // W_k, transposed
  HeadLinear values_;  // W_v
  OutputLinear output_;
  std::vector<float> no_rotation_;         // frequencies of 0
  std::vector<std::string> latent_names_;  // the tensor that multiplies latents, if it is one
};

}  // namespace llmserve
