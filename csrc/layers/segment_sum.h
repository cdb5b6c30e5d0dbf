// Sums of products over segments of K, among ranks.
//
// A tree of n segments is one segment, or the sum of a tree of its first m and one of the others,
// with m the largest power of two below n: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). A rank adds
// up the largest trees that it has whole, those of all ranks are brought together, and each rank
// adds them up likewise. Which rank has which segments thus changes no bit: the tree-based
// invariant kernels of arXiv 2511.17826.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "layers/forward_context.h"
#include "layers/rank_cut.h"

namespace llmserve {

// to [M, N] = from [M, N], by the op that copies rows on every backend.
void copy_rows(const ForwardContext& context, const Tensor& from, const Tensor& to);

// Whether ranks with this backend exchange in host memory, which says how much room they need.
bool is_on_host(const Backend& backend);

class SegmentSum {
 public:
  // Products [M, width].
  SegmentSum(const TensorRank& rank, const ProductShare& share, int64_t width, bool is_on_host);

  // Where this rank's sums and those of others go, in the arena.
  Tensor allocate(const ForwardContext& context, int64_t num_rows) const;
  // Writes the product of this rank's segment `idx`, in order from 0, to `out` [M, width], or adds
  // it to what `out` holds.
  using Multiply = std::function<void(int64_t idx, const Tensor& out, bool accumulate)>;
  // Into `sums` of allocate().
  void run(const ForwardContext& context, const Tensor& sums, const Multiply& multiply) const;
  // Brings the ranks' sums together; what is returned is a view of `sums`, [M, width].
  Tensor finish(const ForwardContext& context, const Tensor& sums) const;

  // Whether run() is one product, which then goes to own_sum().
  bool is_one_product() const { return own_.size() == 1 && own_[0].size == 1; }
  Tensor own_sum(const Tensor& sums) const;
  // Whether the ranks bring one sum each, so that what is added to them is added to the result.
  bool is_in_rank_order() const { return is_in_rank_order_; }
  // Of allocate(), and beside it of run().
  int64_t workspace_bytes(int64_t num_rows) const;

 private:
  void run_tree(const ForwardContext& context, const IndexRange& tree, const Tensor& out,
                const Tensor& spare, int64_t depth, const Multiply& multiply) const;
  // The place in trees_ whose sum is then that of `tree`.
  int64_t add_trees(const ForwardContext& context, const IndexRange& tree,
                    const Tensor& sums) const;

  int64_t width_;
  bool is_in_rank_order_;  // one sum a rank, added one after another
  bool is_reduced_;        // by whom the ranks exchange through, which keeps that order
  bool is_exchanged_;
  int64_t num_segments_;
  int64_t first_ = 0;              // segment of this rank
  int64_t num_spare_ = 0;          // sums that run() has beside the result
  std::vector<IndexRange> trees_;  // that the ranks bring, in order: segments
  std::vector<IndexRange> own_;    // of them
  int64_t first_own_ = 0;          // in trees_
  std::vector<int64_t> counts_;    // [W] trees of each rank
};

}  // namespace llmserve
