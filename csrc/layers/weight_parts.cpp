#include "layers/weight_parts.h"

#include <algorithm>

#include "core/error.h"

namespace llmserve {

IndexRange Shard::of(int64_t count) const {
  if (range.size > 0) {
    check_internal(range.begin >= 0 && range.begin + range.size <= count, "a rank has what is");
    return range;
  }
  const int64_t units = num_units == 0 ? count : num_units;
  check_internal(0 <= rank && rank < size && size <= units && count % units == 0,
                 "a rank has whole units");
  const int64_t fewest = units / size;
  const int64_t num_larger = units % size;
  const int64_t unit = count / units;
  const int64_t first = rank * fewest + std::min<int64_t>(rank, num_larger);
  return {first * unit, (fewest + (rank < num_larger ? 1 : 0)) * unit};
}

std::vector<WeightPart> rows_of(std::span<const WeightPart> parts, const Shard& shard) {
  std::vector<WeightPart> rows;
  for (const WeightPart& part : parts) {
    const int64_t count = part.size * part.num_runs;
    const IndexRange taken =
        shard.axis == ShardAxis::kOutput ? shard.of(count) : IndexRange{0, count};
    for (int64_t run = 0; run < part.num_runs; ++run) {
      const int64_t begin = std::max(taken.begin, run * part.size);
      const int64_t end = std::min(taken.begin + taken.size, (run + 1) * part.size);
      if (begin >= end) continue;
      rows.push_back(
          {.name = part.name,
           .size = end - begin,
           .begin = part.begin + run * part.stride + (begin - run * part.size) * part.step,
           .of = part.num_rows(),
           .width = part.width,
           .in_begin = part.in_begin,
           .in_of = part.in_of,
           .step = part.step,
           .is_vector = part.is_vector,
           .num_matrices = part.num_matrices,
           .matrix = part.matrix});
    }
  }
  return rows;
}

}  // namespace llmserve
