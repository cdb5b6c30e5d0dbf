// Packing of weights of integers into the panels that kernel_table.h describes.
#pragma once

#include "kernels/cpu/cpu_workers.h"

namespace llmserve::cpu {

QuantizedLayout layout_of(const LinearFormat& format, int64_t in_features);

// From one row of x to the next: whole cache lines of integers, or of floats, which have a line
// more, so that rows of a power of two do not fall into the same sets of the L1.
inline int64_t row_stride(const QuantizedLayout& layout) {
  const int64_t padded = (layout.num_groups * layout.group_size + 63) / 64 * 64;
  return layout.has_float_products ? padded + 32 : padded;
}

// Bytes of a packed weight [N, K].
int64_t quantized_bytes(const LinearFormat& format, int64_t out_features, int64_t in_features);

// As Backend::pack_quantized.
LinearWeight pack_quantized(CpuWorkers& workers, const LinearFormat& format, int64_t out_features,
                            int64_t in_features, const QuantizedRowReader& read);

}  // namespace llmserve::cpu
