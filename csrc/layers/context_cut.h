// How ranks that would keep copies of the same KV head keep it once: in one pool, which all of them
// read (docs/decisions/contexts-shared-by-spans.md).
#pragma once

#include <cstdint>

#include "kernels/attention_ranks.h"
#include "layers/forward_context.h"
#include "layers/rank_cut.h"

namespace llmserve {

// Of TensorRank::context_size ranks that follow one another.
class ContextCut {
 public:
  // Query heads as HeadCut gives them to ranks.
  ContextCut(const TensorRank& rank, int64_t num_heads, int64_t num_kv_heads);

  // paged_attention of this rank's heads. Among several ranks each has stored some of the step's
  // tokens, and all are there before any is read. What long contexts take to decode is shared. What
  // it takes of the arena is of use to others until all have met again.
  void attend(const ForwardContext& context, PagedAttentionArgs args) const;
  int64_t workspace_bytes() const;
  bool is_shared() const { return !rows_.runs.empty(); }

 private:
  RankRows rows_;
  int64_t first_rank_ = 0;  // of those that share
};

// Whether each `rank.context_size` ranks keep one KV head, and the same one.
bool keeps_one_kv_head(const TensorRank& rank, int64_t num_heads, int64_t num_kv_heads);

}  // namespace llmserve
