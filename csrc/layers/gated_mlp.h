// The gated feed-forward layer: down(activation(gate(x)) * up(x)).
#pragma once

#include <string>

#include "layers/forward_context.h"
#include "layers/linear.h"
#include "layers/weight_loader.h"

namespace llmserve {

struct GatedMlpSpec {
  int64_t hidden_size = 0;        // E
  int64_t intermediate_size = 0;  // F
  bool has_bias = false;
  Activation activation = Activation::kSilu;
};

class GatedMlp {
 public:
  // Weights "<prefix>.gate_proj", ".up_proj" and ".down_proj".
  GatedMlp(WeightLoader& weights, const std::string& prefix, const GatedMlpSpec& spec);

  // Adds the layer's output for x [T, E] to residual [T, E].
  void forward(const ForwardContext& context, const Tensor& x, const Tensor& residual) const;
  int64_t workspace_bytes(int64_t num_tokens) const;

 private:
  GatedMlpSpec spec_;
  Linear gate_up_;
  Linear down_;
};

}  // namespace llmserve
