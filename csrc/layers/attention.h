// Causal self-attention over the paged KV cache, with grouped heads.
#pragma once

#include <optional>
#include <string>

#include "layers/forward_context.h"
#include "layers/linear.h"
#include "layers/rms_norm.h"
#include "layers/weight_loader.h"

namespace llmserve {

struct AttentionSpec {
  int64_t hidden_size = 0;   // E
  int64_t num_heads = 0;     // H
  int64_t num_kv_heads = 0;  // K
  int64_t head_dim = 0;      // D, of queries, keys and values
  bool qkv_bias = false;
  bool output_bias = false;
  bool has_qk_norm = false;  // an RMS norm on every query and key head, before the rotation
  float norm_eps = 1e-6f;
  int32_t window = 0;  // 0: unlimited
};

class Attention {
 public:
  // Weights "<prefix>.q_proj" … "<prefix>.o_proj", and "<prefix>.q_norm", ".k_norm" if any.
  Attention(WeightLoader& weights, const std::string& prefix, const AttentionSpec& spec);

  // Stores the step's keys and values in the layer's cache and adds the layer's output for x [T, E]
  // to residual [T, E].
  void forward(const ForwardContext& context, const ConstTensor& x, const ConstTensor& cos_sin,
               const PagedKvCache& cache, const Tensor& residual) const;
  int64_t workspace_bytes(int64_t num_tokens) const;

 private:
  AttentionSpec spec_;
  Linear qkv_;
  Linear output_;
  std::optional<RmsNorm> q_norm_;
  std::optional<RmsNorm> k_norm_;
};

}  // namespace llmserve
