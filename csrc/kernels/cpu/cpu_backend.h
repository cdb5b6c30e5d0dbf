// The CPU backend: partitions every op over a thread pool, never along a sum, and calls the kernels
// of one instruction set.
#pragma once

#include <span>
#include <vector>

#include "core/thread_pool.h"
#include "kernels/backend.h"
#include "kernels/cpu/cpu_features.h"

namespace llmserve {

namespace cpu {
// Panels of a packed weight.
inline int64_t num_panels(int64_t out_features) {
  return (out_features + kPanelWidth - 1) / kPanelWidth;
}
}  // namespace cpu

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const BackendOptions& options);

  std::string_view name() const override { return "cpu"; }
  std::string description() const override;

  // Panels as described in kernel_table.h.
  LinearWeight pack_linear(std::span<const ConstTensor> parts, DType dtype) override;
  LinearWeight defer_linear(std::span<const ConstTensor> parts, DType dtype) override;
  void pack_rows(LinearRows& rows) override;
  int64_t packed_bytes(int64_t out_features, int64_t in_features, DType dtype) const override;
  std::string_view packed_layout() const override { return "cpu panels 1"; }
  // Panels of integers, as in kernel_table.h.
  bool can_run(const LinearFormat&) const override { return true; }
  LinearWeight pack_quantized(const LinearFormat& format, int64_t out_features, int64_t in_features,
                              const QuantizedRowReader& read) override;
  int64_t packed_bytes(int64_t out_features, int64_t in_features,
                       const LinearFormat& format) const override;
  int64_t first_non_finite(const ConstTensor& tensor) override;
  void run_on_host_threads(int64_t count, int64_t grain,
                           const std::function<void(int64_t, int64_t)>& work) override {
    pool_.parallel_for(count, grain, [&](int64_t begin, int64_t end, int) { work(begin, end); });
  }
  int64_t scratch_bytes(const StepShape& shape, int num_threads) const override;
  void reserve_scratch(const StepShape& shape) override;

  // Panels, where paged_attention need not copy the cache to read it.
  KeyLayout key_layout(int64_t block_size, int64_t key_dim, int64_t value_dim,
                       DType dtype) const override;

  void embedding(const EmbeddingArgs& args) override;
  void rms_norm(const RmsNormArgs& args) override;
  void add_rms_norm(const AddRmsNormArgs& args) override;
  void layer_norm(const LayerNormArgs& args) override;
  void add(const AddArgs& args) override;
  void linear(const LinearArgs& args) override;
  void rotary_table(const RotaryTableArgs& args) override;
  void rotary(const RotaryArgs& args) override;
  void store_kv(const StoreKvArgs& args) override;
  void copy_blocks(const CopyBlocksArgs& args) override;
  void paged_attention(const PagedAttentionArgs& args) override;
  void gated_activation(const GatedActivationArgs& args) override;
  void activation(const ActivationArgs& args) override;
  void cap_logits(const CapLogitsArgs& args) override;
  void gather_rows(const GatherRowsArgs& args) override;
  void sample(const SampleArgs& args) override;

 private:
  // What rows multiply with at once, or a multiple of it; and of a weight in rows, what is packed
  // beside its use: at K = 2048 it is 256 KiB of bf16, which stay in the L2.
  static constexpr int64_t kPanelsAtOnce = 4;

  // A thread's own working memory of at least this many bytes; grows, and then stays.
  std::byte* scratch(int thread_idx) const { return scratch_[thread_idx].data(); }
  void reserve_scratch(int64_t bytes);
  int64_t thread_scratch_bytes(const StepShape& shape) const;
  void pack_all(std::span<const ConstTensor> parts, DType dtype, std::byte* to);
  void run_on_rows(const cpu::LinearKernel& kernel, const LinearRows& weight,
                   const cpu::LinearPart& part, std::byte* panels) const;
  void quantized_linear(const LinearArgs& args);
  // Each thread's part of a product's panels, whole, or, unless there are few, in pieces of `piece`
  // panels and more: calls fn(begin, end, thread_idx).
  template <class Fn>
  void deal_panels(int64_t num_panels, int64_t piece, Fn fn) {
    const bool are_few = num_panels < 4 * kPanelsAtOnce * pool_.num_threads();
    if (piece == 0 || are_few)
      pool_.parallel_for(num_panels, are_few ? 1 : kPanelsAtOnce, fn);
    else
      pool_.parallel_pieces(num_panels, piece, cpu::kPanelBlock / piece * piece, fn);
  }
  int64_t rounded_bytes(const StepShape& shape) const;
  const void* round_rows(const cpu::LinearKernel& kernel, const ConstTensor& x);
  int64_t attention_scratch_bytes(int64_t max_tokens, const StepShape& shape) const;
  static int64_t attention_partial_bytes(int num_threads);

  // Cuts the step's queries into items_; those that threads share into their heads or spans, too,
  // as far as partials_ holds the results of spans; and deals them out: thread i gets
  // [item_starts_[i], item_starts_[i + 1]), of nearly equal cost.
  void list_attention_items(const PagedAttentionArgs& args, int64_t group);
  void split_attention_items(int64_t window, int64_t group, int64_t value_dim);
  // split(item) appends the parts of an item of which equal shares of the cost would give parts to
  // two threads or more, or returns false.
  template <class Split>
  void replace_shared(int64_t window, int64_t group, Split split);
  void deal_attention_items(int64_t window, int64_t group);

  const CpuIsa& isa_;
  const cpu::KernelTable kernels_;
  ThreadPool pool_;
  std::vector<Buffer> scratch_;  // one a thread
  std::vector<Buffer> panels_;   // one a thread, where weights are packed later
  Buffer rounded_;               // the rows of x as integers or bf16, of all threads
  std::vector<cpu::AttentionItem> items_, whole_items_;
  struct SplitItem {
    cpu::AttentionItem item;  // its partial is that of its first span
    int64_t num_spans;
  };
  std::vector<SplitItem> split_items_;
  Buffer partials_;
  std::vector<int64_t> item_costs_;
  std::vector<int64_t> item_starts_;
};

std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options);

}  // namespace llmserve
