// y = x W^T + b.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "layers/forward_context.h"
#include "layers/rank_cut.h"
#include "layers/weight_loader.h"

namespace llmserve {

struct LinearSpec {
  bool has_bias = false;
  bool is_transposed = false;  // the file has W as [K, N]
  // The rank's share of W. Of ranks that share K the one with its beginning has the bias.
  Shard shard;
  // Of one part: ranks compute columns of the output, and all have all of it.
  bool is_gathered = false;
};

// What a linear layer reads: x, once `norm`, if there is one, has written it.
struct LinearInput {
  ConstTensor x;                    // [M, K]
  std::optional<RmsNormArgs> norm;  // its out is x

  int64_t num_rows() const { return x.shape[0]; }
  // Rows [begin, begin + count).
  LinearInput rows(int64_t begin, int64_t count) const;
};

class Linear {
 public:
  // The parts' weights ("<part>.weight" [N_i, K]) are stacked into one matrix, and so are their
  // biases ("<part>.bias" [N_i]) if there are any: q, k and v run as one product.
  Linear(WeightLoader& weights, WeightGroup group, const std::vector<WeightPart>& parts,
         int64_t in_features, const LinearSpec& spec);

  int64_t out_features() const { return out_features_; }  // N, of a share its own

  // out [M, N] = x [M, K] W^T + b, added to what `out` holds if `accumulate`.
  void forward(const ForwardContext& context, const LinearInput& x, const Tensor& out,
               bool accumulate = false) const;
  // The op of forward() without a norm, where it is one op: none if weights are of several kinds,
  // if the output is gathered, or if the context's observer has to see x.
  std::optional<LinearArgs> as_one(const ForwardContext& context, const ConstTensor& x,
                                   const Tensor& out, bool accumulate = false) const;
  // out [M, N / 2] = activation of the first half of x W^T + b, times the second half. gate_up
  // [M, N] is working memory.
  void forward_gated(const ForwardContext& context, const LinearInput& x, const Tensor& gate_up,
                     const Tensor& out, Activation activation) const;

 private:
  std::optional<LinearArgs> as_one_product(const ForwardContext& context, const ConstTensor& x,
                                           const Tensor& out, bool accumulate) const;
  // Weight i's columns, which begin at `begin`, of out.
  LinearArgs part(size_t i, int64_t begin, const ConstTensor& x, const Tensor& out,
                  bool accumulate) const;
  void run(const ForwardContext& context, const LinearInput& x, const Tensor& out, bool accumulate,
           const std::optional<GatedActivationArgs>& gate) const;

  std::vector<std::string> names_;     // of the parts' tensors, each once
  std::vector<LinearWeight> weights_;  // side by side along N; one, but for files of mixed blocks
  int64_t out_features_ = 0;           // N
  VectorWeight bias_;                  // [N] or empty
  std::optional<ColumnCut> gathered_;  // among several ranks
};

// One part after another, of one tensor in one piece, are a part.
std::vector<WeightPart> joined(std::vector<WeightPart> parts);

}  // namespace llmserve
