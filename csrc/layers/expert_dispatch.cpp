#include "layers/expert_dispatch.h"

#include <algorithm>

#include "core/error.h"

namespace llmserve {

ExpertDispatch::ExpertDispatch(const TensorRank& rank, int64_t num_experts) : rank_(rank) {
  if (num_experts < rank.size)
    throw NotSupported(concat("enable_expert_parallel: the model has ", num_experts,
                              " experts, fewer than the ", rank.size,
                              " ranks; use fewer ranks, or leave it out: then ranks share each"));
  Shard shard{.size = rank.size};
  for (; shard.rank < shard.size; ++shard.rank) {
    const IndexRange range = shard.of(num_experts);
    owners_.insert(owners_.end(), static_cast<size_t>(range.size), shard.rank);
    if (shard.rank == rank.rank) own_ = range;
  }
}

ExpertDispatch::Rows ExpertDispatch::dispatch(const ForwardContext& context, const ConstTensor& ids,
                                              std::span<const int32_t> ranks) const {
  const int64_t num_rows = ids.num_elements();
  const auto* experts = ids.as<int32_t>();
  const auto rank_of = [&](int64_t row) {
    return ranks.empty() ? owner(experts[row]) : ranks[static_cast<size_t>(row)];
  };
  const int32_t first = ranks.empty() ? static_cast<int32_t>(own_.begin) : 0;
  const auto indices = [&] {
    const Tensor tensor = context.arena.allocate(DType::kI32, {num_rows});
    return std::span(tensor.as<int32_t>(), static_cast<size_t>(num_rows));
  };
  const Tensor local = context.arena.allocate(DType::kI32, {num_rows});
  const std::span<int32_t> own = indices();
  const std::span<int32_t> places = indices();
  const Tensor counted = context.arena.allocate(DType::kI64, {2, rank_.size});
  const std::span<int64_t> counts(counted.as<int64_t>(), static_cast<size_t>(rank_.size));
  const std::span<int64_t> next(counts.data() + rank_.size, static_cast<size_t>(rank_.size));
  std::ranges::fill(counts, 0);
  for (int64_t r = 0; r < num_rows; ++r) ++counts[static_cast<size_t>(rank_of(r))];
  int64_t begin = 0;
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    next[rank] = begin;
    begin += counts[rank];
  }
  size_t num_own = 0;
  for (int64_t r = 0; r < num_rows; ++r) {
    const int32_t of = rank_of(r);
    places[static_cast<size_t>(r)] = static_cast<int32_t>(next[static_cast<size_t>(of)]++);
    const bool is_own = of == rank_.rank;
    local.as<int32_t>()[r] = is_own ? experts[r] - first : -1;
    if (is_own) own[num_own++] = static_cast<int32_t>(r);
  }
  return {.experts = local, .own = own.first(num_own), .counts = counts, .places = places};
}

int64_t ExpertDispatch::workspace_bytes(int64_t num_rows) const {
  return 3 * Arena::footprint_bytes(DType::kI32, {num_rows}) +
         Arena::footprint_bytes(DType::kI64, {2, rank_.size});
}

}  // namespace llmserve
