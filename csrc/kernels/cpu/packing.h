// Packing of weights of floats into the panels that kernel_table.h describes.
#pragma once

#include <span>
#include <vector>

#include "core/tensor.h"
#include "kernels/cpu/cpu_workers.h"

namespace llmserve::cpu {

// Panels of a packed weight.
inline int64_t num_panels(int64_t out_features) {
  return (out_features + kPanelWidth - 1) / kPanelWidth;
}

// Bytes of a packed weight [N, K] in f32 or bf16.
int64_t panels_bytes(int64_t out_features, int64_t in_features, DType dtype);

// The rows of all parts [N_i, K], one after another.
struct StackedRows {
  std::span<const ConstTensor> parts;
  std::vector<int64_t> starts;  // of each part, and the end

  explicit StackedRows(std::span<const ConstTensor> parts);
  // One row as a tensor of its own; none past the end.
  ConstTensor row(int64_t idx) const;
};

// Writes one panel of the stacked rows, converted to `dtype`.
void pack_panel(const KernelTable& kernels, const StackedRows& rows, int64_t panel_idx, int64_t k,
                DType dtype, std::byte* panel);

// Writes all panels, on all threads.
void pack_panels(CpuWorkers& workers, std::span<const ConstTensor> parts, DType dtype,
                 std::byte* to);

}  // namespace llmserve::cpu
