#include "layers/output_linear.h"

#include <numeric>
#include <utility>

#include "core/error.h"

namespace llmserve {
namespace {

int64_t total(const InputCut& input) {
  const auto counts = input.given.counts();
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

}  // namespace

int64_t OutputLinear::input_unit(WeightLoader& weights, const OutputLinearSpec& spec,
                                 int64_t in_features) {
  // Nobody asks where nothing is cut along K.
  if (weights.rank().cut == LinearCut::kColumns) return 0;
  return weights.input_unit({.name = spec.name + ".weight", .size = spec.out_features}, in_features,
                            spec.is_transposed);
}

OutputLinear::OutputLinear(WeightLoader& weights, WeightGroup group, const OutputLinearSpec& spec,
                           InputCut input)
    : input_(std::move(input)), in_features_(total(input_)), out_features_(spec.out_features) {
  const TensorRank& rank = weights.rank();
  share_ = share_products(rank, input_, input_unit(weights, spec, in_features_));
  WeightPart part{.name = spec.name, .size = spec.out_features};
  LinearSpec product{.has_bias = spec.has_bias, .is_transposed = spec.is_transposed};
  if (share_.num_segments == 1) {
    product.is_gathered = true;
    products_.emplace_back(weights, group, std::vector{part}, in_features_, product);
    return;
  }
  if (!share_.shares_products && rank.size > 1) {
    const std::string what = concat("outputs of ", spec.name);
    columns_.emplace(rank, out_features_, what.c_str());
    part.of = part.size;
    part.begin = columns_->begin();
    part.size = columns_->size();
  }
  for (const IndexRange& segment : share_.segments) {
    product.shard = {.axis = ShardAxis::kInput, .range = segment};
    products_.emplace_back(weights, group, std::vector{part}, in_features_, product);
  }
  sum_.emplace(rank, share_, part.size, is_on_host(weights.backend()));
}

int64_t OutputLinear::width() const {
  return has_sum() && share_.shares_products ? input_.made.size : in_features_;
}

OutputLinear::Input OutputLinear::allocate_input(const ForwardContext& context,
                                                 int64_t num_rows) const {
  const Tensor rows = context.arena.allocate(DType::kF32, {num_rows, width()});
  if (width() == input_.made.size) return {rows, rows};
  return {rows, rows.slice(1, input_.made.begin, input_.made.size)};
}

OutputLinear::Target OutputLinear::begin(const ForwardContext& context, const Tensor& out,
                                         bool accumulate) const {
  if (!has_sum()) return {out, accumulate};
  return {sum_->allocate(context, out.shape[0]), false};
}

std::optional<LinearArgs> OutputLinear::as_one(const ForwardContext& context, const Input& x,
                                               const Target& target) const {
  if (!has_sum()) return products_[0].as_one(context, x.rows, target.out, target.accumulate);
  if (products_.size() > 1 || !share_.shares_products || !sum_->is_one_product())
    return std::nullopt;
  return products_[0].as_one(context, x.rows, sum_->own_sum(target.out), /*accumulate=*/false);
}

void OutputLinear::run(const ForwardContext& context, const Input& x, const Target& target) const {
  if (!has_sum() || !share_.shares_products) input_.given.gather(context, x.rows);
  if (!has_sum()) return products_[0].forward(context, {x.rows}, target.out, target.accumulate);
  const int64_t first = share_.shares_products ? input_.made.begin : 0;
  sum_->run(context, target.out, [&](int64_t idx, const Tensor& out, bool accumulate) {
    const IndexRange& segment = share_.segments[static_cast<size_t>(idx)];
    const ConstTensor part = x.rows.slice(1, segment.begin - first, segment.size);
    products_[static_cast<size_t>(idx)].forward(context, {part}, out, accumulate);
  });
}

void OutputLinear::finish(const ForwardContext& context, const Target& target, const Tensor& out,
                          bool accumulate) const {
  if (!has_sum()) return;
  const Tensor sum = sum_->finish(context, target.out);
  const Tensor own = columns_ ? columns_->own(out) : out;
  if (accumulate)
    context.backend.add({.out = own, .x = sum});
  else
    copy_rows(context, sum, own);
  if (columns_) columns_->gather(context, out);
}

bool OutputLinear::has_parts() const {
  return has_sum() && share_.shares_products && products_.size() == 1 && sum_->is_in_rank_order();
}

std::optional<LinearArgs> OutputLinear::part_as_one(const ForwardContext& context, const Input& x,
                                                    const Tensor& out) const {
  return products_[0].as_one(context, x.rows, out, /*accumulate=*/false);
}

void OutputLinear::run_part(const ForwardContext& context, const Input& x,
                            const Tensor& out) const {
  products_[0].forward(context, {x.rows}, out, /*accumulate=*/false);
}

int64_t OutputLinear::workspace_bytes(int64_t num_rows) const {
  return Arena::footprint_bytes(DType::kF32, {num_rows, width()}) +
         (has_sum() ? sum_->workspace_bytes(num_rows) : 0);
}

}  // namespace llmserve
