// The linear layers of the cpu backend: weights in panels, products over them, and what is fused
// with a product. A part of columns is one thread's, never a part of K.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "kernels/cpu/cpu_workers.h"
#include "kernels/cpu/packing.h"
#include "kernels/cpu/rounded_rows.h"

namespace llmserve {

class CpuLinear {
 public:
  explicit CpuLinear(CpuWorkers& workers)
      : workers_(workers), kernels_(workers.kernels()), pool_(workers.pool()) {}

  // As the backend's methods of these names.
  LinearWeight pack_linear(std::span<const ConstTensor> parts, DType dtype);
  LinearWeight defer_linear(std::span<const ConstTensor> parts, DType dtype);
  void pack_rows(LinearRows& rows);

  // Floats of a thread's scratch, and bytes of all threads together, that such a step takes.
  int64_t scratch_floats(const StepShape& shape) const;
  static int64_t gated_floats(const StepShape& shape);  // beside those
  int64_t rounded_bytes(const StepShape& shape) const;
  int64_t grouped_bytes(const StepShape& shape) const;  // cpu_grouped_linear.cpp
  void reserve(const StepShape& shape);

  void linear(const LinearArgs& args) { multiply({.norm = {}, .linear = args, .gate = {}}, {}); }
  void grouped_linear(const GroupedLinearArgs& args);  // cpu_grouped_linear.cpp
  void fused_experts(const FusedExpertsArgs& args);
  void fused_linear(const FusedLinearArgs& args) { multiply(args, {}); }
  void fused_mlp(const FusedMlpArgs& args);

  // Where somebody else may write the layer's x as rounded rows: within `memory`, the working
  // memory of x. None where the layer's product takes other rows.
  RoundedRows rounded_in(void* memory, const LinearArgs& args) const;
  // The layer over rounded_in()'s rows, or over args.x where there are none.
  void multiply_written(const LinearArgs& args, const RoundedRows& x);

 private:
  // Panels that rows multiply with at once, or a multiple of that. Of a weight in rows, as many are
  // packed beside their use: at K = 2048 they are 256 KiB of bf16, which stay in the L2.
  static constexpr int64_t kPanelsAtOnce = 4;

  // Sums of a gate and of what it is multiplied with that wait for the activation: 144 KiB, which
  // stay in the L2 beside the panels that make them; 256 KiB took 1% longer. They are of a multiple
  // of the rows that every kernel does at once.
  static constexpr int64_t kGatedFloats = 36864;
  static constexpr int64_t kRowTiles = 48;
  // Fewer rows are little more than the weights, and all their sums are still in a cache.
  static constexpr int64_t kGatedRows = 17;

  const cpu::LinearKernel& float_kernel(const LinearWeight& weight) const {
    return weight.dtype == DType::kBF16 ? kernels_.linear_bf16 : kernels_.linear_f32;
  }
  // Row r of x, normed first if it is to be, in `room` for K floats.
  const float* normed_row(const FusedLinearArgs& args, int64_t r, float* room) const;
  // The rows of x, normed if they are to be, as products of bf16 take them.
  RoundedRows round_rows(const FusedLinearArgs& args);

  // With a gate, its output goes to `gated`, if that has rows.
  void multiply(const FusedLinearArgs& args, const RoundedRows& gated);
  void multiply_quantized(const FusedLinearArgs& args, const RoundedRows& gated);
  // Of rows x as the kernel takes them, `x_stride` elements apart, instead of args.linear.x.
  void multiply_rows(const FusedLinearArgs& args, const void* x, int64_t x_stride,
                     const RoundedRows& gated);
  bool transposes(const cpu::LinearKernel& kernel, const LinearArgs& args, DType x_dtype) const;
  void run_transposed(const cpu::LinearKernel& kernel, const LinearRows& weight,
                      const cpu::LinearPart& all, DType x_dtype);
  void run_on_rows(const cpu::LinearKernel& kernel, const LinearRows& weight,
                   const cpu::LinearPart& part, std::byte* panels) const;

  // Rows side by side that multiply with one weight.
  struct RowGroup {
    int64_t weight, begin, count;
  };
  // The rows of a grouped product, those of one weight side by side, as they came: the row in place
  // i is order[i], and row r is in place places[r].
  struct RowGroups {
    const RowGroup* groups;  // of the weights that have rows
    int64_t num_groups;
    const int32_t* order;   // [num_rows]
    const int32_t* places;  // [R]
    int64_t num_rows;
    std::span<const RowGroup> all() const { return {groups, static_cast<size_t>(num_groups)}; }
  };
  // Good until the next call.
  RowGroups group_rows(const GroupedLinearArgs& args);
  // The row of x in place i.
  static auto rows_of(const GroupedLinearArgs& args, const RowGroups& groups) {
    return [&args, order = groups.order,
            each = args.weight_ids.shape[0] / std::max<int64_t>(1, args.x.shape[0])](int64_t i) {
      return args.x.as<float>() + order[i] / each * args.x.strides[0];
    };
  }
  static const float* bias_of(const GroupedLinearArgs& args, const RowGroup& group) {
    return args.bias ? args.bias.as<float>() + group.weight * args.bias.strides[0] : nullptr;
  }
  // The groups' products, of rows in places [0, num_rows), to `out` [num_rows, N] in the same
  // places. row_of(i) gives the row of x in place i, on some thread and once.
  template <class RowOf>
  void multiply_groups(const GroupedLinearArgs& args, const RowGroups& groups, float* out,
                       RowOf row_of);
  template <class RowOf>
  void multiply_float_groups(const GroupedLinearArgs& args, const RowGroups& groups, float* out,
                             RowOf row_of);
  template <class RowOf>
  void multiply_quantized_groups(const GroupedLinearArgs& args, const RowGroups& groups, float* out,
                                 RowOf row_of);
  // Deals the panels of all groups to threads: calls fn(group, panel_begin, panel_end, thread_idx).
  template <class Fn>
  void deal_groups(const RowGroups& groups, int64_t out_features, Fn fn);
  static int64_t group_bytes(int64_t num_weights);
  // Of a row as the kernels take it.
  int64_t grouped_row_bytes(const GroupedShape& grouped, DType dtype) const;
  int64_t grouped_rounded_bytes(const StepShape& shape) const;
  void reserve_grouped(const StepShape& shape);

  void activate_gate(const FusedLinearArgs& args, const RoundedRows& gated);
  // `width` columns of a row of the gate's output, from `column` on: `both` are these columns of
  // the gate and then of what it is multiplied with, which may be written over.
  void write_gated(const GatedActivationArgs& gate, const RoundedRows& gated, float* both,
                   int64_t width, int64_t row, int64_t column) const;
  // Whether run_gated is for it.
  static bool gates_pieces(const FusedLinearArgs& args);
  // A product with a gate: `run` makes some panels of the gate and then of what it is multiplied
  // with, and the activation follows while both are in the L2. `all` is the whole product, of
  // panels of `panel_bytes`; rows_of(row, count, scratch) is that of some of its rows.
  template <class Part, class RowsOf>
  void run_gated(const Part& all, const GatedActivationArgs& gate, const RoundedRows& gated,
                 int64_t panel_bytes, int64_t piece, void (*run)(const Part*), RowsOf rows_of);

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

  CpuWorkers& workers_;
  const cpu::KernelTable& kernels_;
  ThreadPool& pool_;
  std::vector<Buffer> panels_;  // one a thread, where weights are packed later
  Buffer rounded_;              // the rows of x as integers or bf16, of all threads
  // Of grouped products: the order of rows, their places, the groups and their ends.
  Buffer row_order_;
  Buffer row_places_;
  Buffer groups_;
  Buffer grouped_out_;
};

}  // namespace llmserve
