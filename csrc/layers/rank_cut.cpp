#include "layers/rank_cut.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "core/error.h"

namespace llmserve {
namespace {

// Columns that stay together. Backends pack columns in strips of 16 to 64, and a strip that is cut
// has empty room on both ranks: units are as large as leaves no rank more than a sixteenth above
// the others.
int64_t unit_of(int64_t num_columns, int64_t num_ranks) {
  constexpr std::array<int64_t, 7> kUnits{64, 32, 16, 8, 4, 2, 1};
  for (const int64_t unit : kUnits) {
    const int64_t units = num_columns / unit;
    const bool is_even = units % num_ranks == 0 || units >= 16 * num_ranks;
    if (num_columns % unit == 0 && units >= num_ranks && is_even) return unit;
  }
  return 1;
}

Shard shard_of(const TensorRank& rank, int64_t num_columns) {
  return {.rank = rank.rank,
          .size = rank.size,
          .num_units = num_columns / unit_of(num_columns, rank.size)};
}

}  // namespace

ColumnCut::ColumnCut(const TensorRank& rank, int64_t num_columns, const char* what)
    : rank_(rank.rank), shard_(shard_of(rank, num_columns)) {
  if (num_columns < rank.size)
    throw NotSupported(concat("tensor_parallel_size=", rank.size, ": the model has ", num_columns,
                              " ", what, ", fewer than ranks; use ", num_columns, " or less"));
  Shard shard = shard_;
  for (shard.rank = 0; shard.rank < rank.size; ++shard.rank)
    counts_.push_back(shard.of(num_columns).size);
  begin_ = shard_.of(num_columns).begin;
}

ColumnCut::ColumnCut(const TensorRank& rank, const std::vector<int64_t>& counts, int64_t width)
    : rank_(rank.rank) {
  for (const int64_t count : counts) counts_.push_back(count * width);
  begin_ = std::accumulate(counts_.begin(), counts_.begin() + rank.rank, int64_t{0});
}

HeadCut::HeadCut(const TensorRank& rank, int64_t all_heads, int64_t all_kv_heads) {
  const int64_t group = all_heads / all_kv_heads;
  for (int32_t r = 0; r < rank.size; ++r) {
    IndexRange kv;
    IndexRange heads;
    int64_t num_given = 0;
    int64_t num_given_kv = 0;
    if (rank.size <= all_kv_heads) {
      kv = Shard{.rank = r, .size = rank.size}.of(all_kv_heads);
      heads = {kv.begin * group, kv.size * group};
      num_given = heads.size;
      num_given_kv = kv.size;
    } else {
      // KV head k is of the ranks from ceil(k W / K) on.
      const auto first_rank = [&](int64_t k) {
        return (k * rank.size + all_kv_heads - 1) / all_kv_heads;
      };
      kv = {r * all_kv_heads / rank.size, 1};
      const int64_t sharing = first_rank(kv.begin + 1) - first_rank(kv.begin);
      const int64_t idx = r - first_rank(kv.begin);
      const auto parts = static_cast<int32_t>(std::min(sharing, group));
      heads = Shard{.rank = static_cast<int32_t>(idx) % parts, .size = parts}.of(group);
      heads.begin += kv.begin * group;
      num_given = idx < parts ? heads.size : 0;
      num_given_kv = idx == 0 ? 1 : 0;
    }
    given.push_back(num_given);
    given_kv.push_back(num_given_kv);
    if (r != rank.rank) continue;
    first_head = heads.begin;
    num_heads = heads.size;
    first_kv_head = kv.begin;
    num_kv_heads = kv.size;
  }
}

}  // namespace llmserve
