// A checkpoint's tensor as the model has it: in floats, in the model's own order.
#pragma once

#include "core/buffer.h"
#include "core/tensor.h"
#include "io/checkpoint.h"
#include "kernels/backend.h"
#include "layers/weight_parts.h"

namespace llmserve {

// Whether the tensor holds numbers that weights are made of: floats, or blocks of them.
bool has_float_values(const Checkpoint& checkpoint, const TensorEntry& entry);
// Whether host_values() will read it in the mapping, which takes an aligned place there, too.
bool is_in_place(const Checkpoint& checkpoint, const TensorEntry& entry);
// Bytes of its values as `dtype` (kF32 or kBF16), or in place as they are stored.
int64_t value_bytes(const Checkpoint& checkpoint, const TensorEntry& entry, DType dtype);

// A matrix in blocks, in the mapping: u8 [rows, bytes of a row].
ConstTensor block_rows(const Checkpoint& checkpoint, const TensorEntry& entry);
// The first row of such a matrix with a value that is not finite, or -1. Runs on the backend's
// threads.
int64_t first_non_finite_row(const Checkpoint& checkpoint, const TensorEntry& entry,
                             Backend& backend);

// Whole blocks `columns` of the model's row `row` of a matrix in blocks that a linear layer runs on
// (QuantFormat::unpack).
bool unpack_row(const Checkpoint& checkpoint, const TensorEntry& entry, int64_t row,
                const IndexRange& columns, const QuantizedRow& to);

// Rows of a matrix, or of several one below another; elements of a vector.
struct RowRange {
  int64_t begin = 0;
  int64_t size = -1;  // -1: to the end
};

// The tensor, or some of its rows, in host memory, aligned: in place if it can be, and otherwise in
// `buffer`, as `dtype` (rounded to nearest) where it is not stored as is. Rows of several matrices
// are one matrix. Conversion runs on the backend's threads.
ConstTensor host_values(const Checkpoint& checkpoint, const TensorEntry& entry, DType dtype,
                        Backend& backend, Buffer& buffer, RowRange rows = {});

}  // namespace llmserve
