// Experts that stand whole on ranks: which rank has which, and how the rows that they make come
// together.
//
// Every rank has all tokens and the same routes, so that nothing is sent to the experts. A rank
// runs its own, and what they make goes to all ranks, which add it up in the order of each token's
// choices. No row is dropped, however many an expert has.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "layers/rank_cut.h"

namespace llmserve {

class ExpertDispatch {
 public:
  // Ranks have consecutive experts, as many each or one more. Throws NotSupported where there are
  // fewer than ranks.
  ExpertDispatch(const TensorRank& rank, int64_t num_experts);

  IndexRange own() const { return own_; }

  // The routes of a step as this rank runs them. Its tensors are the arena's, in the scope of the
  // caller. R = T k.
  struct Rows {
    Tensor experts;                // [R] i32 what a row's expert is here; -1: another rank's row
    std::span<const int32_t> own;  // [n] this rank's rows, in their order
    std::span<int64_t> counts;     // [W] rows of each rank
    // [R] where a row is when the ranks' rows stand one behind another, in the ranks' order.
    std::span<const int32_t> places;
  };
  // ids [T, k] i32 in host memory. A row runs where its expert is, and experts count from own(); or
  // on ranks[row], where that is given [R], and experts are all's.
  Rows dispatch(const ForwardContext& context, const ConstTensor& ids,
                std::span<const int32_t> ranks = {}) const;
  int64_t workspace_bytes(int64_t num_rows) const;

 private:
  int32_t owner(int64_t expert) const { return owners_[static_cast<size_t>(expert)]; }

  TensorRank rank_;
  IndexRange own_;
  std::vector<int32_t> owners_;  // [X]
};

}  // namespace llmserve
