// How the ranks of a tensor-parallel group share a layer. Linear layers are cut by columns of their
// output: each output is the chain of multiply-adds that one rank alone would run, so that the bits
// are those of one rank, at any number of ranks
// (docs/decisions/ranks-cut-by-output-columns.md). Those that end a branch may be cut along K
// instead (docs/decisions/ranks-cut-along-k.md).
//
// A layer that does not ask for a cut runs whole on every rank, and all ranks have its output.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "layers/forward_context.h"
#include "layers/weight_parts.h"

namespace llmserve {

// How ranks share the linear layers that end a branch of a decoder's layer, o_proj and down_proj.
// The order is that of kTensorParallelCuts of api/engine_config.h.
enum class LinearCut : uint8_t {
  kColumns,  // by columns of the output, like all others
  kRows,     // along K, a part a rank; the products are added in the order of the ranks
  // Along K in segments, of which the model alone says how many there are. Their products are added
  // in one binary tree, so that the bits are the same at any number of ranks, one included.
  kTree,
};
// Of K where it is cut as a tree, if it has as many units.
inline constexpr int64_t kTreeSegments = 8;

// A place among the ranks that share a model's layers.
struct TensorRank {
  int32_t rank = 0;
  int32_t size = 1;                // W
  bool has_whole_experts = false;  // experts are not cut: each stands on one rank
  int32_t context_size = 1;        // so many ranks that follow one another keep one KV cache
  LinearCut cut = LinearCut::kColumns;
};

// Columns of rows [R, N], of which each rank has a run, in the ranks' order.
class ColumnCut {
 public:
  // N columns in runs of about equal length, cut where a backend packs them. Throws NotSupported
  // where there are fewer than ranks; `what` names them.
  ColumnCut(const TensorRank& rank, int64_t num_columns, const char* what);
  // counts[r] runs of `width` columns on rank r. shard() is of them where this rank has some.
  ColumnCut(const TensorRank& rank, const std::vector<int64_t>& counts, int64_t width);

  bool is_cut() const { return counts_.size() > 1; }
  int64_t begin() const { return begin_; }
  int64_t size() const { return counts_[static_cast<size_t>(rank_)]; }  // of this rank
  std::span<const int64_t> counts() const { return counts_; }           // [W]
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
  std::vector<int64_t> segments;  // query heads of each segment of a tree
};

// The input of a linear layer that ends a branch: K elements, which the ranks make in parts.
struct InputCut {
  ColumnCut given;  // of K, by the ranks
  IndexRange made;  // what this rank makes, at least what it gives
  // Runs of K that are multiplied by themselves where the layer is cut as a tree.
  std::vector<int64_t> segments;
};
// Heads of `width` elements.
InputCut head_input(const TensorRank& rank, const HeadCut& heads, int64_t width);
// K activations, which the layer can be cut at multiples of `unit` of; 0: it cannot be cut along K.
// `what` names them. Errors are ColumnCut's.
InputCut activation_input(const TensorRank& rank, int64_t num_elements, int64_t unit,
                          const char* what);

// Which products of a linear layer that ends a branch a rank has.
struct ProductShare {
  // Ranks share the products, and sums pass between them. Otherwise they share the columns of the
  // output, or there is one rank.
  bool shares_products = false;
  std::vector<IndexRange> segments;  // of K: this rank's, in order
  // All of the layer's are numbered; [W] the runs of the ranks, where they share them.
  std::vector<IndexRange> runs;
  int64_t num_segments = 1;  // of the layer
};
// The one place that says what is cut along K and what is not: a layer whose K has no cut at
// multiples of `unit` (0: none at all), or has ranks that give nothing, is cut by columns.
ProductShare share_products(const TensorRank& rank, const InputCut& input, int64_t unit);

}  // namespace llmserve
