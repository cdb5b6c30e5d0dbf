#include "layers/linear.h"

#include <string_view>

namespace llmserve {
namespace {

std::vector<WeightLoader::Part> with_suffix(const std::vector<WeightLoader::Part>& parts,
                                            std::string_view suffix) {
  std::vector<WeightLoader::Part> named = parts;
  for (WeightLoader::Part& part : named) part.name += suffix;
  return named;
}

}  // namespace

Linear::Linear(WeightLoader& weights, WeightGroup group,
               const std::vector<WeightLoader::Part>& parts, int64_t in_features,
               const LinearSpec& spec)
    : weights_(
          weights.linear(group, with_suffix(parts, ".weight"), in_features, spec.is_transposed)) {
  for (const LinearWeight& weight : weights_) out_features_ += weight.out_features;
  if (spec.has_bias) bias_ = weights.vector(group, with_suffix(parts, ".bias"));
}

void Linear::forward(const ForwardContext& context, const ConstTensor& x, const Tensor& out,
                     bool accumulate) const {
  int64_t begin = 0;
  for (const LinearWeight& weight : weights_) {
    const int64_t n = weight.out_features;
    const ConstTensor bias = bias_.view();
    context.backend.linear({.x = x,
                            .weight = &weight,
                            .bias = bias ? bias.slice(0, begin, n) : bias,
                            .out = out.slice(1, begin, n),
                            .accumulate = accumulate});
    begin += n;
  }
}

}  // namespace llmserve
