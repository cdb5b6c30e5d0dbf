#include "layers/linear.h"

#include <algorithm>
#include <string_view>

#include "core/error.h"

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
    : names_(names_of(with_suffix(parts, ".weight"))) {
  Shard shard = spec.shard;
  if (spec.is_gathered && weights.rank().size > 1) {
    check_internal(parts.size() == 1, "an output that is gathered is of one part");
    const std::string what = concat("outputs of ", parts[0].name);
    gathered_.emplace(weights.rank(), parts[0].size, what.c_str());
    shard = gathered_->shard();
  }
  // Parts that are cut stay apart: each is cut by itself.
  const std::vector<WeightPart> pieces = shard.is_cut() ? parts : joined(parts);
  weights_ =
      weights.linear(group, with_suffix(pieces, ".weight"), in_features, spec.is_transposed, shard);
  for (const LinearWeight& weight : weights_) out_features_ += weight.out_features;
  if (!spec.has_bias) return;
  if (shard.axis == ShardAxis::kOutput || shard.of(in_features).begin == 0)
    bias_ = weights.vector(group, with_suffix(pieces, ".bias"), shard);
  else
    weights.skip_vector(with_suffix(pieces, ".bias"));
}

std::vector<WeightPart> joined(std::vector<WeightPart> parts) {
  std::vector<WeightPart> result;
  const auto is_run = [](const WeightPart& part) {
    return part.num_runs == 1 && part.step == 1 && part.in_of == 0;
  };
  for (WeightPart& part : parts) {
    WeightPart* const last = result.empty() ? nullptr : &result.back();
    if (last && last->name == part.name && is_run(*last) && is_run(part) &&
        last->num_rows() == part.num_rows() && last->matrix == part.matrix &&
        last->begin + last->size == part.begin)
      last->size += part.size;
    else
      result.push_back(std::move(part));
  }
  return result;
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
  if (!gathered_) return run(context, x, out, accumulate, std::nullopt);
  run(context, x, gathered_->own(out), accumulate, std::nullopt);
  gathered_->gather(context, out);
}

void Linear::forward_gated(const ForwardContext& context, const LinearInput& x,
                           const Tensor& gate_up, const Tensor& out, Activation activation) const {
  run(context, x, gate_up, /*accumulate=*/false,
      GatedActivationArgs{.gate_up = gate_up, .out = out, .activation = activation});
}

std::optional<LinearArgs> Linear::as_one(const ForwardContext& context, const ConstTensor& x,
                                         const Tensor& out, bool accumulate) const {
  return gathered_ ? std::nullopt : as_one_product(context, x, out, accumulate);
}

std::optional<LinearArgs> Linear::as_one_product(const ForwardContext& context,
                                                 const ConstTensor& x, const Tensor& out,
                                                 bool accumulate) const {
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
  if (const auto whole = as_one_product(context, x.x, out, accumulate))
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
