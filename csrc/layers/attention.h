// Causal self-attention over the paged KV cache, with grouped heads.
#pragma once

#include <optional>
#include <string>

#include "layers/attention_layer.h"
#include "layers/context_cut.h"
#include "layers/head_norm.h"
#include "layers/output_linear.h"
#include "layers/tensor_names.h"
#include "layers/weight_loader.h"

namespace llmserve {

struct AttentionSpec {
  int64_t hidden_size = 0;   // E
  int64_t input_size = 0;    // of x, where it is not E; 0: it is
  int64_t num_heads = 0;     // H
  int64_t num_kv_heads = 0;  // K
  int64_t head_dim = 0;      // D, of queries, keys and values
  bool qkv_bias = false;
  bool output_bias = false;
  bool has_sinks = false;        // a score of each head that has no value
  bool is_transposed = false;    // weights are stored [in, out]
  bool is_qkv_by_group = false;  // a fused qkv has, for each KV head, its queries, key and value
  QkNorm qk_norm = QkNorm::kNone;
  NormSpec norm;                     // of queries and keys
  bool has_norm_after_rope = false;  // instead of before
  bool is_interleaved = false;       // the rotation pairs neighbours, not halves
  float scale = 1.0f;                // of the scores
  float soft_cap = 0.0f;             // of the scores; 0: none
  int32_t window = 0;                // 0: unlimited
  int32_t kv_group = 0;  // the cache group whose blocks have the layer's keys and values
};

// Ranks share it by heads: each projects, and attends with, its own, and keeps the keys and values
// of its KV heads alone, which ranks with the same one may keep together.
class Attention final : public AttentionLayer {
 public:
  // Weights "<prefix><names.q>" and so on.
  Attention(WeightLoader& weights, const TensorNames& names, const std::string& prefix,
            const AttentionSpec& spec);

  void forward(const ForwardContext& context, const LinearInput& x, const RotaryTables& angles,
               const PagedKvCache& cache, const Output& to) const override;
  int64_t workspace_bytes(int64_t num_tokens) const override;

 private:
  // What is still to be done with this rank's heads of qkv [T, N] before attention: norms and
  // rotations that prepare_qkv does not know are done.
  PrepareQkvArgs to_prepare(const ForwardContext& context, const Tensor& qkv,
                            const RotaryTables& angles, const PagedKvCache& cache) const;
  void normalise_heads(const ForwardContext& context, PrepareQkvArgs& args) const;
  // The own heads of what all ranks' heads [T, n, D] are with the norm over all `num_heads` of
  // them.
  Tensor norm_over_ranks(const ForwardContext& context, const Tensor& heads, const HeadNorm& norm,
                         int64_t num_heads, int64_t first, const ColumnCut& given) const;
  bool has_norm_over_ranks() const {
    return given_.is_cut() && spec_.qk_norm == QkNorm::kProjection;
  }
  // The rotation by itself, which is then no more to be done.
  void rotate(const ForwardContext& context, PrepareQkvArgs& args) const;

  AttentionSpec spec_;
  HeadCut cut_;
  ContextCut context_;
  ColumnCut given_;     // query heads' columns
  ColumnCut given_kv_;  // KV heads' columns
  Linear qkv_;
  OutputLinear output_;
  std::optional<HeadNorm> q_norm_;
  std::optional<HeadNorm> k_norm_;
  VectorWeight sinks_;  // [H] or empty
};

}  // namespace llmserve
