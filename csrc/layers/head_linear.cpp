#include "layers/head_linear.h"

#include <utility>

#include "core/error.h"

namespace llmserve {
namespace {

// Head h of [T, H, D] as rows [T, D].
Tensor rows_of_head(const Tensor& heads, int64_t h) {
  Tensor rows = heads.slice(1, h, 1);
  rows.rank = 2;
  rows.shape[1] = heads.shape[2];
  rows.strides[1] = 1;
  return rows;
}

}  // namespace

HeadLinear::HeadLinear(WeightLoader& weights, WeightGroup group,
                       const std::vector<WeightPart>& parts, int64_t in_features,
                       bool is_transposed) {
  for (const WeightPart& part : parts) {
    std::vector<LinearWeight> loaded = weights.linear(group, {part}, in_features, is_transposed);
    check_internal(loaded.size() == 1, "one part is one weight");
    weights_.push_back(std::move(loaded[0]));
  }
}

void HeadLinear::forward(const ForwardContext& context, const Tensor& x, const Tensor& out) const {
  for (size_t h = 0; h < weights_.size(); ++h)
    context.backend.linear({.x = rows_of_head(x, static_cast<int64_t>(h)),
                            .weight = &weights_[h],
                            .out = rows_of_head(out, static_cast<int64_t>(h))});
}

}  // namespace llmserve
