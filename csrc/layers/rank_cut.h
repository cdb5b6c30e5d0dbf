// How the ranks of a tensor-parallel group share a layer. Every linear layer is cut by columns of
// its output, never along K: each output is the chain of multiply-adds that one rank alone would
// run, so that the bits are those of one rank, at any number of ranks
// (docs/decisions/ranks-cut-by-output-columns.md).
//
// A layer that does not ask for a cut runs whole on every rank, and all ranks have its output.
#pragma once

#include <cstdint>
#include <vector>

#include "layers/forward_context.h"
#include "layers/weight_parts.h"

namespace llmserve {

// A place among the ranks that share a model's layers.
struct TensorRank {
  int32_t rank = 0;
  int32_t size = 1;                // W
  bool has_whole_experts = false;  // experts are not cut: each stands on one rank
  int32_t context_size = 1;        // so many ranks that follow one another keep one KV cache
};

// Columns of rows [R, N], of which each rank has a run, in the ranks' order.
class ColumnCut {
 public:
  // N columns in runs of about equal length, cut where a backend packs them. Throws NotSupported
  // where there are fewer than ranks; `what` names them.
  ColumnCut(const TensorRank& rank, int64_t num_columns, const char* what);
  // counts[r] runs of `width` columns on rank r.
  ColumnCut(const TensorRank& rank, const std::vector<int64_t>& counts, int64_t width);

  bool is_cut() const { return counts_.size() > 1; }
  int64_t begin() const { return begin_; }
  int64_t size() const { return counts_[static_cast<size_t>(rank_)]; }  // of this rank
  // This rank's columns of the weights of such a layer.
  const Shard& shard() const { return shard_; }
  // This rank's columns of rows [R, N].
  Tensor own(const Tensor& rows) const { return rows.slice(1, begin_, size()); }
  // Brings the other ranks' columns of `rows` [R, N], of which this rank's are written. With one
  // rank nothing happens.
  void gather(const ForwardContext& context, const Tensor& rows) const {
    gather(context, own(rows), rows, Communicator::kAll);
  }
  // rows [R, N] = the ranks' `own` [R, size()] side by side; on rank `to` alone, unless that is
  // all.
  void gather(const ForwardContext& context, const Tensor& own, const Tensor& rows, int to) const {
    if (is_cut()) context.groups.tp.gather_columns(own, rows, counts_, to);
  }

 private:
  int32_t rank_;
  std::vector<int64_t> counts_;  // [W] columns
  int64_t begin_ = 0;
  Shard shard_;
};

// Query heads in groups, each with the KV head that it reads. Ranks have whole groups. Where there
// are fewer groups than ranks, several ranks keep the same KV head and share its queries, and where
// there are fewer heads, some ranks compute a head that another gives.
struct HeadCut {
  HeadCut(const TensorRank& rank, int64_t num_heads, int64_t num_kv_heads);

  int64_t first_head = 0;
  int64_t num_heads = 0;  // at least 1
  int64_t first_kv_head = 0;
  int64_t num_kv_heads = 0;       // at least 1
  std::vector<int64_t> given;     // [W] query heads whose results each rank gives
  std::vector<int64_t> given_kv;  // [W] likewise
};

}  // namespace llmserve
