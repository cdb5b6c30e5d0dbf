// Attention over the paged cache: cut into items of work, which threads share.
#pragma once

#include <vector>

#include "kernels/cpu/cpu_workers.h"
#include "kernels/cpu/rounded_rows.h"

namespace llmserve {

class CpuAttention {
 public:
  // Query rows (tokens x heads of a group) that share one walk over the KV: enough that reading it
  // is a few percent of the products, few enough that the rows' scores and outputs stay in the L2.
  static constexpr int64_t kMaxQueryRows = 96;

  explicit CpuAttention(CpuWorkers& workers)
      : workers_(workers), kernels_(workers.kernels()), pool_(workers.pool()) {}

  // Bytes of a thread's scratch that a step of at most this many tokens takes.
  int64_t scratch_bytes(int64_t max_tokens, const StepShape& shape) const;
  // Bytes for the results of spans and of shared prefixes, of all threads together.
  static int64_t partial_bytes();
  void reserve();

  // The paged_attention op. Outputs go to `rounded`, a token's heads side by side, if that has
  // rows.
  void run(const PagedAttentionArgs& args, const RoundedRows& rounded);

  // Of the last call, items of prefixes that sequences share, and spans that were walked for
  // several ranks: for tests.
  int64_t num_prefix_items() const { return static_cast<int64_t>(prefix_items_.size()); }
  int64_t num_shared_spans() const { return num_shared_spans_; }

 private:
  // Cuts the step's queries into items_, and what sequences share of their KV into prefix_items_;
  // items that threads share into their heads or spans, too. As far as partials_ holds states and
  // the results of spans.
  void list_items(const PagedAttentionArgs& args, int64_t group);
  // cpu_rank_attention.cpp: contexts whose spans ranks share. Each rank walks some spans for the
  // rows of all, and merges its own rows of all spans. First which contexts those are and who walks
  // what, the same on every rank, and the ranks meet.
  void share_spans(const PagedAttentionArgs& args);
  void choose_shared(const PagedAttentionArgs& args);
  void deal_spans(const PagedAttentionArgs& args);
  bool is_shared(size_t b) const { return b < are_shared_.size() && are_shared_[b] != 0; }
  // Of all ranks' queries, where they are walked.
  void bring_queries(const PagedAttentionArgs& args, float* to) const;
  void walk_spans(const PagedAttentionArgs& args, cpu::AttentionCall call);
  // The ranks meet again. `call` has this rank's rows.
  void merge_spans(const PagedAttentionArgs& args, const cpu::AttentionCall& call);
  // Sequences from b on, of a token each, whose KV begins in the same blocks.
  struct SharedPrefix {
    int64_t count = 1;  // sequences
    int64_t end = 0;    // positions that they share: whole tiles
  };
  static int64_t tiles_in_common(const PagedAttentionArgs& args, size_t b);
  SharedPrefix shared_prefix(const PagedAttentionArgs& args, size_t b, int64_t group) const;
  // Lists the prefix and returns the state that sequences go on from: none if there is no room.
  cpu::AttentionState list_prefix(const PagedAttentionArgs& args, size_t b, int64_t group,
                                  const SharedPrefix& shared);
  void split_items(int64_t window, int64_t group, int64_t value_dim);
  // split(item) appends the parts of an item of which equal shares of the cost would give parts to
  // two threads or more, or returns false.
  template <class Split>
  void replace_shared(int64_t window, int64_t group, Split split);
  // Of nearly equal cost: thread i gets items[starts[i]] to [starts[i + 1]].
  void deal_items(const std::vector<cpu::AttentionItem>& items, int64_t window, int64_t group,
                  std::vector<int64_t>& starts);
  // Has each thread prefetch its items_ while it runs its prefix_items_.
  void prefetch_own_later(int64_t window, int64_t tile_bytes);
  void run_items(const cpu::AttentionCall& call, DType dtype,
                 const std::vector<cpu::AttentionItem>& items, const std::vector<int64_t>& starts);

  CpuWorkers& workers_;
  const cpu::KernelTable& kernels_;
  ThreadPool& pool_;
  std::vector<cpu::AttentionItem> items_, whole_items_, prefix_items_;
  struct SplitItem {
    cpu::AttentionItem item;  // its partial is that of its first span
    int64_t num_spans;
  };
  std::vector<SplitItem> split_items_;
  Buffer partials_;
  int64_t states_end_ = 0;  // floats of partials_ that states take
  std::vector<int64_t> item_costs_;
  std::vector<int64_t> item_starts_, prefix_starts_;
  std::vector<cpu::AttentionLater> laters_;  // one a thread

  struct SharedContext {
    size_t sequence;
    int64_t first_token, num_tokens;
    size_t first_span;
    int64_t num_spans;
    bool is_walked_here;  // some of it
  };
  struct SharedSpan {
    int64_t rank;    // that walks it
    int64_t offset;  // floats of that rank's room where its result goes
  };
  // What a rank shows the others.
  struct Shown {
    const float* q;
    int64_t token_stride, head_stride;
    const float* room;
  };
  std::vector<uint8_t> are_shared_;  // [B]
  std::vector<SharedContext> shared_;
  std::vector<SharedSpan> spans_;   // of one context after another, in order
  std::vector<int64_t> room_used_;  // [ranks] floats of results
  std::vector<Shown> seen_;         // [ranks] of the step
  std::vector<cpu::AttentionItem> span_items_;
  std::vector<int64_t> span_starts_;
  Shown shown_{};
  int64_t num_shared_spans_ = 0;  // walked here
};

}  // namespace llmserve
