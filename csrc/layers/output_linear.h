// The linear layer that ends a branch of a decoder's layer, o_proj or down_proj, whose input the
// ranks have made in parts; with what they exchange before and after it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "layers/linear.h"
#include "layers/segment_sum.h"

namespace llmserve {

struct OutputLinearSpec {
  std::string name;          // of the module, whose weight is [N, K]
  int64_t out_features = 0;  // N
  bool has_bias = false;
  bool is_transposed = false;  // the file has W as [K, N]
};

class OutputLinear {
 public:
  // `input` is of K.
  OutputLinear(WeightLoader& weights, WeightGroup group, const OutputLinearSpec& spec,
               InputCut input);

  // At multiples of how many elements K of such a layer can be cut: activation_input().
  static int64_t input_unit(WeightLoader& weights, const OutputLinearSpec& spec,
                            int64_t in_features);

  // What a step multiplies, in the arena: [M, K], or what this rank has of it.
  struct Input {
    Tensor rows;
    Tensor own;  // of them what this rank makes, to be written before run()
  };
  Input allocate_input(const ForwardContext& context, int64_t num_rows) const;

  // Where the product of this rank goes.
  struct Target {
    Tensor out;
    bool accumulate = false;
  };
  // Target of a step whose result is to be in `out` [M, N], added to what it holds if `accumulate`:
  // `out`, or memory of the arena, in the caller's scope. `out` may be what x comes from.
  Target begin(const ForwardContext& context, const Tensor& out, bool accumulate) const;
  // The op that run() comes to, where it is one and nothing is exchanged before it.
  std::optional<LinearArgs> as_one(const ForwardContext& context, const Input& x,
                                   const Target& target) const;
  // Brings the rest of x, and multiplies.
  void run(const ForwardContext& context, const Input& x, const Target& target) const;
  // Brings the rest of the result.
  void finish(const ForwardContext& context, const Target& target, const Tensor& out,
              bool accumulate) const;

  // Whether the result is the sum of one product a rank, in their order, which somebody else may
  // bring together with other sums: then run_part() in the place of begin() to finish().
  bool has_parts() const;
  std::optional<LinearArgs> part_as_one(const ForwardContext& context, const Input& x,
                                        const Tensor& out) const;
  // out [M, N] = this rank's product.
  void run_part(const ForwardContext& context, const Input& x, const Tensor& out) const;

  // Arena bytes of input and target.
  int64_t workspace_bytes(int64_t num_rows) const;

 private:
  bool has_sum() const { return sum_.has_value(); }
  int64_t width() const;  // of Input::rows

  InputCut input_;
  ProductShare share_;
  int64_t in_features_;
  int64_t out_features_;
  std::optional<ColumnCut> columns_;  // of the output, where segments are shared so
  std::vector<Linear> products_;      // [segments]
  std::optional<SegmentSum> sum_;     // where there are partial sums
};

}  // namespace llmserve
