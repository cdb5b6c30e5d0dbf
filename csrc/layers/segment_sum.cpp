#include "layers/segment_sum.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>

#include "core/error.h"

namespace llmserve {
namespace {

constexpr int64_t kCopiedRows = 1024;

IndexRange left_of(const IndexRange& tree) {
  return {tree.begin, static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(tree.size - 1)))};
}
IndexRange right_of(const IndexRange& tree) {
  const IndexRange left = left_of(tree);
  return {left.begin + left.size, tree.size - left.size};
}

bool is_within(const IndexRange& tree, const IndexRange& run) {
  return run.begin <= tree.begin && tree.begin + tree.size <= run.begin + run.size;
}

// The largest trees of `tree` that lie within the run.
void cover(const IndexRange& tree, const IndexRange& run, std::vector<IndexRange>& trees) {
  if (is_within(tree, run)) return trees.push_back(tree);
  const bool is_apart = tree.begin + tree.size <= run.begin || run.begin + run.size <= tree.begin;
  if (is_apart) return;
  cover(left_of(tree), run, trees);
  cover(right_of(tree), run, trees);
}

// Sums that a tree's branches need beside its own.
int64_t num_spare(const IndexRange& tree) {
  if (tree.size == 1) return 0;
  const IndexRange right = right_of(tree);
  return std::max(num_spare(left_of(tree)), right.size == 1 ? 0 : 1 + num_spare(right));
}

// Sum `idx` of [n, M, width] as [M, width].
Tensor sum_at(const Tensor& sums, int64_t idx) {
  return {sums.slice(0, idx, 1).data, DType::kF32, {sums.shape[1], sums.shape[2]}};
}

}  // namespace

void copy_rows(const ForwardContext& context, const Tensor& from, const Tensor& to) {
  static constexpr auto kPlaces = [] {
    std::array<int32_t, kCopiedRows> places{};
    std::iota(places.begin(), places.end(), 0);
    return places;
  }();
  for (int64_t begin = 0; begin < from.shape[0]; begin += kCopiedRows) {
    const int64_t count = std::min(kCopiedRows, from.shape[0] - begin);
    context.backend.gather_rows({.x = from.slice(0, begin, count),
                                 .rows = std::span(kPlaces).first(static_cast<size_t>(count)),
                                 .out = to.slice(0, begin, count)});
  }
}

bool is_on_host(const Backend& backend) { return backend.name() != "cuda"; }

SegmentSum::SegmentSum(const TensorRank& rank, const ProductShare& share, int64_t width,
                       bool is_on_host)
    : width_(width),
      is_in_rank_order_(rank.cut == LinearCut::kRows),
      is_reduced_(is_in_rank_order_ && is_on_host),
      is_exchanged_(share.shares_products && rank.size > 1),
      num_segments_(share.num_segments) {
  if (is_in_rank_order_) {
    check_internal(is_exchanged_ && std::ssize(share.segments) == 1, "a rank has one product");
    own_ = {{0, 1}};
    trees_.assign(is_reduced_ ? 1 : static_cast<size_t>(rank.size), own_.front());
    first_own_ = is_reduced_ ? 0 : rank.rank;
    return;
  }
  const IndexRange all{0, num_segments_};
  if (!is_exchanged_) {
    trees_ = own_ = {all};
    num_spare_ = num_spare(all);
    return;
  }
  check_internal(rank.size <= kTreeSegments, "each rank has a segment");
  for (int32_t r = 0; r < rank.size; ++r) {
    std::vector<IndexRange> own;
    cover(all, share.runs[static_cast<size_t>(r)], own);
    if (r == rank.rank) {
      first_ = own.front().begin;
      first_own_ = std::ssize(trees_);
      own_ = own;
    }
    counts_.push_back(std::ssize(own));
    trees_.insert(trees_.end(), own.begin(), own.end());
  }
  for (const IndexRange& tree : own_) num_spare_ = std::max(num_spare_, num_spare(tree));
}

Tensor SegmentSum::allocate(const ForwardContext& context, int64_t num_rows) const {
  return context.arena.allocate(DType::kF32, {std::ssize(trees_), num_rows, width_});
}

Tensor SegmentSum::own_sum(const Tensor& sums) const { return sum_at(sums, first_own_); }

void SegmentSum::run(const ForwardContext& context, const Tensor& sums,
                     const Multiply& multiply) const {
  if (is_in_rank_order_) return multiply(0, own_sum(sums), /*accumulate=*/false);
  const Arena::Scope scope(context.arena);
  const Tensor spare =
      num_spare_ == 0 ? Tensor()
                      : context.arena.allocate(DType::kF32, {num_spare_, sums.shape[1], width_});
  for (size_t i = 0; i < own_.size(); ++i)
    run_tree(context, own_[i], sum_at(sums, first_own_ + static_cast<int64_t>(i)), spare, 0,
             multiply);
}

// A product that is added to a sum has the bits of one that is computed by itself first.
void SegmentSum::run_tree(const ForwardContext& context, const IndexRange& tree, const Tensor& out,
                          const Tensor& spare, int64_t depth, const Multiply& multiply) const {
  if (tree.size == 1) return multiply(tree.begin - first_, out, /*accumulate=*/false);
  run_tree(context, left_of(tree), out, spare, depth, multiply);
  const IndexRange right = right_of(tree);
  if (right.size == 1) return multiply(right.begin - first_, out, /*accumulate=*/true);
  const Tensor sum = sum_at(spare, depth);
  run_tree(context, right, sum, spare, depth + 1, multiply);
  context.backend.add({.out = out, .x = sum});
}

Tensor SegmentSum::finish(const ForwardContext& context, const Tensor& sums) const {
  if (!is_exchanged_) return sum_at(sums, 0);
  Communicator& ranks = context.groups.tp;
  if (is_reduced_) {
    ranks.all_reduce(sums, Reduction::kSum);
    return sum_at(sums, 0);
  }
  if (is_in_rank_order_) {  // which a library among devices does not keep to
    ranks.all_gather(own_sum(sums), sums);
    for (int64_t rank = 1; rank < sums.shape[0]; ++rank)
      context.backend.add({.out = sum_at(sums, 0), .x = sum_at(sums, rank)});
    return sum_at(sums, 0);
  }
  std::array<int64_t, kTreeSegments> counts{};
  for (size_t r = 0; r < counts_.size(); ++r) counts[r] = counts_[r] * sums.shape[1] * width_;
  ranks.all_gather(sums.slice(0, first_own_, std::ssize(own_)), sums,
                   std::span(counts).first(counts_.size()));
  return sum_at(sums, add_trees(context, {0, num_segments_}, sums));
}

int64_t SegmentSum::add_trees(const ForwardContext& context, const IndexRange& tree,
                              const Tensor& sums) const {
  const auto found = std::ranges::find_if(trees_, [&](const IndexRange& brought) {
    return brought.begin == tree.begin && brought.size == tree.size;
  });
  if (found != trees_.end()) return found - trees_.begin();
  const int64_t left = add_trees(context, left_of(tree), sums);
  const int64_t right = add_trees(context, right_of(tree), sums);
  context.backend.add({.out = sum_at(sums, left), .x = sum_at(sums, right)});
  return left;
}

int64_t SegmentSum::workspace_bytes(int64_t num_rows) const {
  const int64_t spare =
      num_spare_ == 0 ? 0 : Arena::footprint_bytes(DType::kF32, {num_spare_, num_rows, width_});
  return Arena::footprint_bytes(DType::kF32, {std::ssize(trees_), num_rows, width_}) + spare;
}

}  // namespace llmserve
