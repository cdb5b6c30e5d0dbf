// The CPU backend: partitions every op over a thread pool, never along a sum, and calls the kernels
// of one instruction set.
#pragma once

#include <algorithm>
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
  std::string_view packed_layout() const override { return "cpu panels 4"; }
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
  void fused_linear(const FusedLinearArgs& args) override;
  void fused_mlp(const FusedMlpArgs& args) override;
  void fused_attention(const FusedAttentionArgs& args) override;
  void prepare_qkv(const PrepareQkvArgs& args) override;
  void rotary_table(const RotaryTableArgs& args) override;
  void rotary(const RotaryArgs& args) override;
  void store_kv(const StoreKvArgs& args) override;
  void copy_blocks(const CopyBlocksArgs& args) override;
  void paged_attention(const PagedAttentionArgs& args) override;
  // Of the last call, items of prefixes that sequences share: for tests.
  int64_t num_prefix_items() const { return static_cast<int64_t>(prefix_items_.size()); }
  void gated_activation(const GatedActivationArgs& args) override;
  void activation(const ActivationArgs& args) override;
  void cap_logits(const CapLogitsArgs& args) override;
  void gather_rows(const GatherRowsArgs& args) override;
  void sample(const SampleArgs& args) override;

 private:
  // What rows multiply with at once, or a multiple of it; and of a weight in rows, what is packed
  // beside its use: at K = 2048 it is 256 KiB of bf16, which stay in the L2.
  static constexpr int64_t kPanelsAtOnce = 4;

  // Sums of a gate and of what it is multiplied with that wait for the activation: 144 KiB, which
  // stay in the L2 beside the panels that make them; 256 KiB took 1% longer. They are of a multiple
  // of the rows that every kernel does at once.
  static constexpr int64_t kGatedFloats = 36864;
  static constexpr int64_t kRowTiles = 48;
  // Fewer rows are little more than the weights, and all their sums are still in a cache.
  static constexpr int64_t kGatedRows = 17;

  // A thread's own working memory of at least this many bytes; grows, and then stays.
  std::byte* scratch(int thread_idx) const { return scratch_[thread_idx].data(); }
  void reserve_scratch(int64_t bytes);
  int64_t thread_scratch_bytes(const StepShape& shape) const;
  void pack_all(std::span<const ConstTensor> parts, DType dtype, std::byte* to);
  bool turns(const cpu::LinearKernel& kernel, const LinearArgs& args, DType x_dtype) const;
  void run_turned(const cpu::LinearKernel& kernel, const LinearRows& weight,
                  const cpu::LinearPart& all, DType x_dtype);
  void run_on_rows(const cpu::LinearKernel& kernel, const LinearRows& weight,
                   const cpu::LinearPart& part, std::byte* panels) const;
  // Rows in bf16 as the products of bf16 take them.
  struct RoundedRows {
    uint16_t* data = nullptr;  // null: none
    int64_t stride = 0;        // elements

    uint16_t* row(int64_t i) const { return data + i * stride; }
  };
  // What multiplies a weight of floats.
  const cpu::LinearKernel& float_kernel(const LinearWeight& weight) const {
    return weight.dtype == DType::kBF16 ? kernels_.linear_bf16 : kernels_.linear_f32;
  }
  // What to write to the working memory of the layer's x, so that nobody has to round it; none
  // where the layer's product takes others.
  RoundedRows rounded_in(void* memory, const LinearArgs& args) const;
  // With a gate, its output goes to `gated`, if that has rows.
  void multiply(const FusedLinearArgs& args, const RoundedRows& gated);
  void multiply_quantized(const FusedLinearArgs& args, const RoundedRows& gated);
  // The product of rows x as the kernel takes them, from row to row `x_stride` elements, instead of
  // args.linear.x.
  void multiply_rows(const FusedLinearArgs& args, const void* x, int64_t x_stride,
                     const RoundedRows& gated);
  // The product of rounded_in()'s rows, or of args.x where it has none.
  void multiply_written(const LinearArgs& args, const RoundedRows& x);
  void activate_gate(const FusedLinearArgs& args, const RoundedRows& gated);
  // `width` columns of a row of the gate's output, from `column` on: `both` are these columns of
  // the gate and then of what it is multiplied with, which may be written over.
  void write_gated(const GatedActivationArgs& gate, const RoundedRows& gated, float* both,
                   int64_t width, int64_t row, int64_t column) const;
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
  // Whether run_gated is for it.
  static bool gates_pieces(const FusedLinearArgs& args);
  // A product with a gate: `run` makes some panels of the gate and then of what it is multiplied
  // with, and the activation follows while both are in the L2. `all` is the whole product, of
  // panels of `panel_bytes`; rows_of(row, count, scratch) is that of some of its rows.
  template <class Part, class RowsOf>
  void run_gated(const Part& all, const GatedActivationArgs& gate, const RoundedRows& gated,
                 int64_t panel_bytes, int64_t piece, void (*run)(const Part*), RowsOf rows_of);
  int64_t rounded_bytes(const StepShape& shape) const;
  // Row r of x, normed first if it is to be, in `room` for K floats.
  const float* normed_row(const FusedLinearArgs& args, int64_t r, float* room) const;
  // The rows of x, normed if they are to be, as products of bf16 take them.
  RoundedRows round_rows(const FusedLinearArgs& args);
  void attend(const PagedAttentionArgs& args, const RoundedRows& rounded);
  int64_t attention_scratch_bytes(int64_t max_tokens, const StepShape& shape) const;
  static int64_t attention_partial_bytes();

  // Cuts the step's queries into items_, and what sequences share of their KV into prefix_items_;
  // items that threads share into their heads or spans, too. As far as partials_ holds states and
  // the results of spans.
  void list_attention_items(const PagedAttentionArgs& args, int64_t group);
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
  void split_attention_items(int64_t window, int64_t group, int64_t value_dim);
  // split(item) appends the parts of an item of which equal shares of the cost would give parts to
  // two threads or more, or returns false.
  template <class Split>
  void replace_shared(int64_t window, int64_t group, Split split);
  // Of nearly equal cost: thread i gets items[starts[i]] to [starts[i + 1]].
  void deal_attention_items(const std::vector<cpu::AttentionItem>& items, int64_t window,
                            int64_t group, std::vector<int64_t>& starts);
  // Has each thread prefetch its items_ while it runs its prefix_items_.
  void prefetch_own_later(int64_t window, int64_t tile_bytes);
  void run_attention_items(const cpu::AttentionCall& call, DType dtype,
                           const std::vector<cpu::AttentionItem>& items,
                           const std::vector<int64_t>& starts);

  const CpuIsa& isa_;
  const cpu::KernelTable kernels_;
  ThreadPool pool_;
  std::vector<Buffer> scratch_;  // one a thread
  std::vector<Buffer> panels_;   // one a thread, where weights are packed later
  Buffer rounded_;               // the rows of x as integers or bf16, of all threads
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
};

template <class Part, class RowsOf>
void CpuBackend::run_gated(const Part& all, const GatedActivationArgs& gate,
                           const RoundedRows& gated, int64_t panel_bytes, int64_t piece,
                           void (*run)(const Part*), RowsOf rows_of) {
  const int64_t half = all.n / 2;
  const int64_t num_panels = half / cpu::kPanelWidth;
  const int64_t most_rows = kGatedFloats / (2 * piece * cpu::kPanelWidth) / kRowTiles * kRowTiles;
  const auto run_piece = [&](int64_t begin, int64_t end, int thread_idx) {
    auto* sums = reinterpret_cast<float*>(scratch(thread_idx));
    for (int64_t panel = begin; panel < end; panel += piece) {
      const int64_t count = std::min(piece, end - panel);
      const int64_t column = panel * cpu::kPanelWidth;
      const int64_t width = count * cpu::kPanelWidth;
      for (int64_t row = 0; row < all.m; row += most_rows) {
        const int64_t rows = std::min(most_rows, all.m - row);
        Part part = rows_of(row, rows, sums + kGatedFloats);
        part.n = half;
        part.panel_begin = panel;
        part.panel_end = panel + count;
        part.out_stride = 2 * width;
        part.out = sums - column;
        run(&part);
        part.out += width;
        part.weight = reinterpret_cast<const uint8_t*>(all.weight) + num_panels * panel_bytes;
        if (part.bias != nullptr) part.bias += half;
        run(&part);
        for (int64_t r = 0; r < rows; ++r)
          write_gated(gate, gated, sums + r * 2 * width, width, row + r, column);
      }
    }
  };
  deal_panels(num_panels, piece, run_piece);
}

std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options);

}  // namespace llmserve
