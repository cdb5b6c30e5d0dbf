// The feed-forward layer: down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a
// gate.
#pragma once

#include <string>

#include "layers/forward_context.h"
#include "layers/linear.h"
#include "layers/tensor_names.h"
#include "layers/weight_loader.h"

namespace llmserve {

struct MlpSpec {
  int64_t hidden_size = 0;        // E
  int64_t intermediate_size = 0;  // F
  bool has_bias = false;
  bool is_transposed = false;  // weights are stored [in, out]
  Activation activation = Activation::kSilu;
};

class Mlp {
 public:
  // Weights "<prefix><names.gate>" and so on.
  Mlp(WeightLoader& weights, const TensorNames& names, const std::string& prefix,
      const MlpSpec& spec);

  // out [T, E] = the layer's output for x [T, E], added to what `out` holds if `accumulate`; then
  // out may be x, or what x is the norm of.
  void forward(const ForwardContext& context, const LinearInput& x, const Tensor& out,
               bool accumulate) const;
  int64_t workspace_bytes(int64_t num_tokens) const;

 private:
  // gate_up [T, 2 F] is working memory.
  void forward_gated(const ForwardContext& context, const LinearInput& x, const Tensor& gate_up,
                     const Tensor& out, bool accumulate) const;

  MlpSpec spec_;
  int64_t max_rows_;  // at a time; rows do not affect each other, so that the cut changes no bit
  bool is_gated_;
  Linear up_;  // gate and up side by side, if gated
  Linear down_;
};

}  // namespace llmserve
