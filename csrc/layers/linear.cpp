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
    : weight_(
          weights.linear(group, with_suffix(parts, ".weight"), in_features, spec.is_transposed)) {
  if (spec.has_bias) bias_ = weights.vector(group, with_suffix(parts, ".bias"));
}

void Linear::forward(const ForwardContext& context, const ConstTensor& x, const Tensor& out,
                     bool accumulate) const {
  context.backend.linear(
      {.x = x, .weight = &weight_, .bias = bias_.view(), .out = out, .accumulate = accumulate});
}

}  // namespace llmserve
