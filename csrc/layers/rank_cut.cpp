#include "layers/rank_cut.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

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

// What some of `num_units` units, of about equal size, have of `count` elements.
IndexRange units_of(int64_t count, int64_t num_units, const IndexRange& units) {
  const auto begin = [&](int64_t unit) {
    return unit * (count / num_units) + std::min(unit, count % num_units);
  };
  return {begin(units.begin), begin(units.begin + units.size) - begin(units.begin)};
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
  if (is_cut()) shard_.range = {begin_, size()};
}

HeadCut::HeadCut(const TensorRank& rank, int64_t all_heads, int64_t all_kv_heads) {
  const int64_t group = all_heads / all_kv_heads;
  const bool is_tree = rank.cut == LinearCut::kTree;
  // Parts that the queries of a KV head may be cut in.
  const int64_t max_parts =
      is_tree ? std::clamp<int64_t>(kTreeSegments / all_kv_heads, 1, group) : group;
  // Runs of KV heads that stay together.
  const bool has_runs = is_tree && all_kv_heads > kTreeSegments;
  const int64_t num_runs = has_runs && rank.size <= kTreeSegments ? kTreeSegments : all_kv_heads;
  for (int32_t r = 0; r < rank.size; ++r) {
    IndexRange kv;
    IndexRange heads;
    int64_t num_given = 0;
    int64_t num_given_kv = 0;
    if (rank.size <= all_kv_heads) {
      kv = units_of(all_kv_heads, num_runs, Shard{.rank = r, .size = rank.size}.of(num_runs));
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
      const auto parts = static_cast<int32_t>(std::min(sharing, max_parts));
      heads =
          units_of(group, max_parts,
                   Shard{.rank = static_cast<int32_t>(idx) % parts, .size = parts}.of(max_parts));
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
  if (!is_tree) return;
  const int64_t runs = has_runs ? kTreeSegments : all_kv_heads;
  for (int64_t run = 0; run < runs; ++run)
    for (int64_t part = 0; part < max_parts; ++part)
      segments.push_back(has_runs ? units_of(all_kv_heads, runs, {run, 1}).size * group
                                  : units_of(group, max_parts, {part, 1}).size);
}

InputCut head_input(const TensorRank& rank, const HeadCut& heads, int64_t width) {
  InputCut input{.given = ColumnCut(rank, heads.given, width),
                 .made = {heads.first_head * width, heads.num_heads * width},
                 .segments = heads.segments};
  for (int64_t& segment : input.segments) segment *= width;
  return input;
}

InputCut activation_input(const TensorRank& rank, int64_t num_elements, int64_t unit,
                          const char* what) {
  const bool is_tree = rank.cut == LinearCut::kTree;
  const int64_t num_units = unit == 0 || num_elements % unit != 0 ? 0 : num_elements / unit;
  // Segments, or ranks' parts, of about equal length.
  const int64_t num_parts = is_tree ? std::min(kTreeSegments, num_units) : rank.size;
  const bool is_along_k =
      rank.cut != LinearCut::kColumns && num_parts > 1 && num_units >= num_parts;
  if (!is_along_k) {
    ColumnCut cut(rank, num_elements, what);
    return {cut, {cut.begin(), cut.size()}, {}};
  }
  std::vector<int64_t> parts;
  const int64_t num_runs = num_units / unit_of(num_units, num_parts);
  for (int64_t part = 0; part < num_parts; ++part)
    parts.push_back(
        units_of(
            num_elements, num_runs,
            Shard{.rank = static_cast<int32_t>(part), .size = static_cast<int32_t>(num_parts)}.of(
                num_runs))
            .size);
  if (!is_tree) {
    ColumnCut cut(rank, parts, 1);
    return {cut, {cut.begin(), cut.size()}, {}};
  }
  if (rank.size > num_parts) {
    ColumnCut cut(rank, num_elements, what);
    return {cut, {cut.begin(), cut.size()}, std::move(parts)};
  }
  std::vector<int64_t> counts;
  for (int32_t r = 0; r < rank.size; ++r) {
    const IndexRange own = Shard{.rank = r, .size = rank.size}.of(num_parts);
    counts.push_back(std::accumulate(parts.begin() + own.begin,
                                     parts.begin() + own.begin + own.size, int64_t{0}));
  }
  ColumnCut cut(rank, counts, 1);
  return {cut, {cut.begin(), cut.size()}, std::move(parts)};
}

ProductShare share_products(const TensorRank& rank, const InputCut& input, int64_t unit) {
  const std::span<const int64_t> given = input.given.counts();
  const int64_t k = std::accumulate(given.begin(), given.end(), int64_t{0});
  const ProductShare whole{.segments = {{0, k}}};
  // Of ranks that add in their own order each has one segment.
  const std::span<const int64_t> sizes =
      rank.cut == LinearCut::kRows ? given : std::span<const int64_t>(input.segments);
  const bool can_cut = unit > 0 && sizes.size() > 1 &&
                       std::ranges::none_of(sizes, [&](int64_t n) { return n % unit != 0; });
  if (rank.cut == LinearCut::kColumns || !can_cut) return whole;
  ProductShare share{.shares_products = true, .num_segments = std::ssize(sizes)};
  int64_t next = 0;  // segment
  int64_t begin = 0;
  for (size_t r = 0; r < given.size(); ++r) {
    IndexRange run{next, 0};
    int64_t taken = 0;
    for (; taken < given[r] && next < std::ssize(sizes); ++next, ++run.size) {
      const int64_t size = sizes[static_cast<size_t>(next)];
      if (r == static_cast<size_t>(rank.rank)) share.segments.push_back({begin + taken, size});
      taken += size;
    }
    share.shares_products &= run.size > 0 && taken == given[r];
    begin += taken;
    share.runs.push_back(run);
  }
  if (share.shares_products) return share;
  if (rank.cut == LinearCut::kRows) return whole;
  share = {.num_segments = std::ssize(sizes)};
  begin = 0;
  for (const int64_t size : sizes) {
    share.segments.push_back({begin, size});
    begin += size;
  }
  return share;
}

}  // namespace llmserve
