// y = x W^T + b.
#pragma once

#include <vector>

#include "layers/forward_context.h"
#include "layers/weight_loader.h"

namespace llmserve {

struct LinearSpec {
  bool has_bias = false;
  bool is_transposed = false;  // the file has W as [K, N]
};

class Linear {
 public:
  // The parts' weights ("<part>.weight" [N_i, K]) are stacked into one matrix, and so are their
  // biases ("<part>.bias" [N_i]) if there are any: q, k and v run as one product.
  Linear(WeightLoader& weights, WeightGroup group, const std::vector<WeightLoader::Part>& parts,
         int64_t in_features, const LinearSpec& spec);

  int64_t out_features() const { return out_features_; }

  // out [M, N] = x [M, K] W^T + b, added to what `out` holds if `accumulate`.
  void forward(const ForwardContext& context, const ConstTensor& x, const Tensor& out,
               bool accumulate = false) const;

 private:
  std::vector<LinearWeight> weights_;  // side by side along N; one, but for files of mixed blocks
  int64_t out_features_ = 0;           // N
  VectorWeight bias_;                  // [N] or empty
};

}  // namespace llmserve
