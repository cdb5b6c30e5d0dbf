// Packing of weights of integers into the panels that kernel_table.h describes.
#pragma once

#include "kernels/cpu/cpu_workers.h"

namespace llmserve::cpu {

QuantizedLayout layout_of(const LinearFormat& format, int64_t in_features);

// Bytes from one row of x as integers to the next: whole cache lines.
inline int64_t integer_stride(int64_t in_features) { return (in_features + 63) / 64 * 64; }

// Bytes of a packed weight [N, K].
int64_t quantized_bytes(const LinearFormat& format, int64_t out_features, int64_t in_features);

// As Backend::pack_quantized.
LinearWeight pack_quantized(CpuWorkers& workers, const LinearFormat& format, int64_t out_features,
                            int64_t in_features, const QuantizedRowReader& read);

}  // namespace llmserve::cpu
