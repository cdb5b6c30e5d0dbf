#include "layers/lm_head.h"

namespace llmserve {
namespace {

// Whether these are all rows in their order, as in each recorded step: they need not be gathered.
bool are_all(std::span<const int32_t> rows, const ConstTensor& hidden) {
  if (static_cast<int64_t>(rows.size()) != hidden.shape[0]) return false;
  for (size_t i = 0; i < rows.size(); ++i)
    if (rows[i] != static_cast<int32_t>(i)) return false;
  return true;
}

}  // namespace

Tensor LmHead::forward(const ForwardContext& context, const ConstTensor& hidden,
                       std::span<const int32_t> rows) const {
  const int64_t num_rows = static_cast<int64_t>(rows.size());
  const Tensor logits = context.arena.allocate(DType::kF32, {num_rows, width()});
  const Tensor own = has_all() ? cut_.own(logits) : logits;
  const Arena::Scope scope(context.arena);
  // Taken in any case, so that what a step takes is what is planned.
  const Tensor gathered = context.arena.allocate(DType::kF32, {num_rows, weight_.in_features});
  const bool is_gathered = !are_all(rows, hidden);
  if (is_gathered) context.backend.gather_rows({.x = hidden, .rows = rows, .out = gathered});
  const ConstTensor x = is_gathered ? ConstTensor(gathered) : hidden;
  context.backend.linear({.x = x, .weight = &weight_, .bias = bias_.view(), .out = own});
  if (spec_.scale != 1.0f || spec_.soft_cap > 0) {
    context.backend.cap_logits({.logits = own, .scale = spec_.scale, .soft_cap = spec_.soft_cap});
  }
  cut_.gather(context, own, logits, /*to=*/0);
  return has_all() ? logits : Tensor();
}

int64_t LmHead::workspace_bytes(int64_t num_rows) const {
  return Arena::footprint_bytes(DType::kF32, {num_rows, width()}) +
         Arena::footprint_bytes(DType::kF32, {num_rows, weight_.in_features});
}

}  // namespace llmserve
