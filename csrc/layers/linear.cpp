#include "layers/linear.h"

#include <algorithm>
#include <string_view>

namespace llmserve {
namespace {

std::vector<WeightPart> with_suffix(const std::vector<WeightPart>& parts, std::string_view suffix) {
  std::vector<WeightPart> named = parts;
  for (WeightPart& part : named) part.name += suffix;
  return named;
}

std::vector<std::string> names_of(const std::vector<WeightPart>& parts) {
  std::vector<std::string> names;
  for (const WeightPart& part : parts)
    if (std::ranges::find(names, part.name) == names.end()) names.push_back(part.name);
  return names;
}

}  // namespace

Linear::Linear(WeightLoader& weights, WeightGroup group, const std::vector<WeightPart>& parts,
               int64_t in_features, const LinearSpec& spec)
    : names_(names_of(with_suffix(parts, ".weight"))),
      weights_(weights.linear(group, with_suffix(parts, ".weight"), in_features, spec.is_transposed,
                              spec.shard)) {
  for (const LinearWeight& weight : weights_) out_features_ += weight.out_features;
  const bool has_bias =
      spec.has_bias && (spec.shard.axis == ShardAxis::kOutput || spec.shard.rank == 0);
  if (has_bias) bias_ = weights.vector(group, with_suffix(parts, ".bias"), spec.shard);
}

LinearInput LinearInput::rows(int64_t begin, int64_t count) const {
  LinearInput part{x.slice(0, begin, count), norm};
  if (norm) {
    part.norm->x = norm->x.slice(0, begin, count);
    part.norm->out = norm->out.slice(0, begin, count);
  }
  return part;
}

void Linear::forward(const ForwardContext& context, const LinearInput& x, const Tensor& out,
                     bool accumulate) const {
  run(context, x, out, accumulate, std::nullopt);
}

void Linear::forward_gated(const ForwardContext& context, const LinearInput& x,
                           const Tensor& gate_up, const Tensor& out, Activation activation) const {
  run(context, x, gate_up, /*accumulate=*/false,
      GatedActivationArgs{.gate_up = gate_up, .out = out, .activation = activation});
}

std::optional<LinearArgs> Linear::as_one(const ForwardContext& context, const ConstTensor& x,
                                         const Tensor& out, bool accumulate) const {
  if (weights_.size() != 1 || context.observer) return std::nullopt;
  return part(0, 0, x, out, accumulate);
}

LinearArgs Linear::part(size_t i, int64_t begin, const ConstTensor& x, const Tensor& out,
                        bool accumulate) const {
  const int64_t n = weights_[i].out_features;
  const ConstTensor bias = bias_.view();
  return {.x = x,
          .weight = &weights_[i],
          .bias = bias ? bias.slice(0, begin, n) : bias,
          .out = out.slice(1, begin, n),
          .accumulate = accumulate};
}

void Linear::run(const ForwardContext& context, const LinearInput& x, const Tensor& out,
                 bool accumulate, const std::optional<GatedActivationArgs>& gate) const {
  Backend& backend = context.backend;
  if (const auto whole = as_one(context, x.x, out, accumulate))
    return backend.fused_linear({.norm = x.norm, .linear = *whole, .gate = gate});
  if (x.norm) backend.rms_norm(*x.norm);
  if (context.observer) context.observer->see(names_, x.x);
  int64_t begin = 0;
  for (size_t i = 0; i < weights_.size(); ++i) {
    backend.linear(part(i, begin, x.x, out, accumulate));
    begin += weights_[i].out_features;
  }
  if (gate) backend.gated_activation(*gate);
}

}  // namespace llmserve
