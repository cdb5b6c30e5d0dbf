// Dense feed-forward layers: two products with an activation between them.
#pragma once

#include <algorithm>
#include <string>

#include "layers/feed_forward.h"
#include "layers/output_linear.h"
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

// down(activation(gate(x)) * up(x)).
class GatedMlp final : public FeedForward {
 public:
  // Weights "<prefix><names.gate>" and so on.
  GatedMlp(WeightLoader& weights, const TensorNames& names, const std::string& prefix,
           const MlpSpec& spec);

  void forward(const ForwardContext& context, const LinearInput& x, const Tensor& out,
               bool accumulate) const override;
  int64_t workspace_bytes(int64_t num_tokens) const override;

  // Whether ranks give parts that add up to the result.
  bool has_parts() const { return down_.has_parts(); }
  // out = this rank's part, of as many rows as go at a time.
  void forward_part(const ForwardContext& context, const LinearInput& x, const Tensor& out) const;

 private:
  // Of at most max_rows_.
  void forward_rows(const ForwardContext& context, const LinearInput& x, const Tensor& out,
                    bool accumulate) const;

  MlpSpec spec_;
  int64_t max_rows_;  // at a time; rows do not affect each other, so that the cut changes no bit
  InputCut cut_;      // of what is activated
  Linear gate_up_;    // side by side
  OutputLinear down_;
};

// down(activation(up(x))).
class PlainMlp final : public FeedForward {
 public:
  // Weights "<prefix><names.up>" and so on.
  PlainMlp(WeightLoader& weights, const TensorNames& names, const std::string& prefix,
           const MlpSpec& spec);

  void forward(const ForwardContext& context, const LinearInput& x, const Tensor& out,
               bool accumulate) const override;
  int64_t workspace_bytes(int64_t num_tokens) const override;

 private:
  MlpSpec spec_;
  int64_t max_rows_;  // as of GatedMlp
  InputCut cut_;      // likewise
  Linear up_;
  OutputLinear down_;
};

}  // namespace llmserve
