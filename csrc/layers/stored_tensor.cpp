#include "layers/stored_tensor.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <functional>
#include <numeric>
#include <span>
#include <vector>

#include "core/error.h"
#include "core/float_types.h"

namespace llmserve {
namespace {

// Values a thread converts at once: 16 KiB of f32, which stay in the L1 for the rounding to bf16.
// Whole blocks of every format.
constexpr int64_t kChunk = 4096;

const QuantFormat* format_of(const Checkpoint& checkpoint, const TensorEntry& entry) {
  const QuantFormat* blocks = checkpoint.storage(entry).blocks;
  return blocks ? blocks : find_quant_format(entry.dtype);
}

// f32, bf16 or f16, and nothing to undo.
bool is_stored_as_is(const TensorEntry& entry) {
  const bool is_common =
      entry.dtype == DType::kF32 || entry.dtype == DType::kBF16 || entry.dtype == DType::kF16;
  return is_common && entry.storage_idx == 0;
}

bool is_aligned(const ConstTensor& tensor) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.data);
  return address % static_cast<uintptr_t>(size_bytes(tensor.dtype)) == 0;
}

// Rows, and the elements of each; a vector's rows are its elements.
struct Matrix {
  int64_t rows = 1;
  int64_t width = 1;
};

Matrix matrix_of(const TensorStorage& storage, const TensorEntry& entry) {
  Matrix out;
  const bool is_vector = entry.shape.size() == 1 && !storage.blocks;
  for (size_t d = 0; d < entry.shape.size(); ++d) {
    const bool is_row = d + 1 == entry.shape.size() && !is_vector;
    (is_row ? out.width : out.rows) *= entry.shape[d];
  }
  return out;
}

// Where the model's row lies among those of the file.
int64_t stored_row(int64_t row, int64_t head_rows) {
  if (head_rows == 0) return row;
  const int64_t within = row % head_rows;
  const int64_t half = head_rows / 2;
  return row - within + (within < half ? 2 * within : 2 * (within - half) + 1);
}

int64_t head_rows(int64_t paired_heads, const Matrix& matrix) {
  return paired_heads > 0 ? matrix.rows / paired_heads : 0;
}

class Converter {
 public:
  Converter(const Checkpoint& checkpoint, const TensorEntry& entry, DType dtype, std::byte* to)
      : format_(*format_of(checkpoint, entry)),
        matrix_(matrix_of(checkpoint.storage(entry), entry)),
        head_rows_(head_rows(checkpoint.storage(entry).paired_heads, matrix_)),
        added_(checkpoint.storage(entry).added),
        from_(checkpoint.file(entry)->bytes().data() + entry.offset),
        dtype_(dtype),
        to_(to) {}

  // Rows [begin, end) of those that begin with the model's row `first`.
  void convert_rows(int64_t first, int64_t begin, int64_t end) const {
    for (int64_t row = begin; row < end; ++row) {
      const std::byte* from =
          from_ + format_.num_bytes(stored_row(first + row, head_rows_) * matrix_.width);
      for (int64_t at = 0; at < matrix_.width; at += kChunk) {
        const int64_t count = std::min(kChunk, matrix_.width - at);
        convert(from + format_.num_bytes(at), count,
                to_ + (row * matrix_.width + at) * size_bytes(dtype_));
      }
    }
  }

 private:
  void convert(const std::byte* from, int64_t count, std::byte* to) const {
    float chunk[kChunk];
    float* values = dtype_ == DType::kF32 ? reinterpret_cast<float*>(to) : chunk;
    format_.dequantize(from, count / format_.block_elements, values);
    if (added_ != 0.0f)
      for (int64_t i = 0; i < count; ++i) values[i] -= added_;
    if (dtype_ == DType::kF32) return;
    auto* rounded = reinterpret_cast<uint16_t*>(to);
    for (int64_t i = 0; i < count; ++i) rounded[i] = f32_to_bf16(values[i]);
  }

  const QuantFormat& format_;
  const Matrix matrix_;
  const int64_t head_rows_;
  const float added_;
  const std::byte* from_;
  const DType dtype_;
  std::byte* to_;
};

bool all_finite(const float* values, int64_t count) {
  constexpr uint32_t kExponent = 0x7f800000;
  uint32_t num_bad = 0;
  for (int64_t i = 0; i < count; ++i)
    num_bad += (std::bit_cast<uint32_t>(values[i]) & kExponent) == kExponent;
  return num_bad == 0;
}

ConstTensor in_shape(std::span<const int64_t> shape, const void* data, DType dtype) {
  ConstTensor out(data, dtype, {});
  out.rank = static_cast<int>(shape.size());
  int64_t stride = 1;
  for (int d = out.rank - 1; d >= 0; --d) {
    out.shape[d] = shape[static_cast<size_t>(d)];
    out.strides[d] = stride;
    stride *= out.shape[d];
  }
  return out;
}

}  // namespace

bool has_float_values(const Checkpoint& checkpoint, const TensorEntry& entry) {
  return format_of(checkpoint, entry) != nullptr;
}

bool is_in_place(const Checkpoint& checkpoint, const TensorEntry& entry) {
  return is_stored_as_is(entry) && is_aligned(checkpoint.view(entry));
}

int64_t value_bytes(const Checkpoint& checkpoint, const TensorEntry& entry, DType dtype) {
  if (is_stored_as_is(entry)) return entry.num_bytes;
  const Matrix matrix = matrix_of(checkpoint.storage(entry), entry);
  return matrix.rows * matrix.width * size_bytes(dtype);
}

ConstTensor block_rows(const Checkpoint& checkpoint, const TensorEntry& entry) {
  const TensorStorage& storage = checkpoint.storage(entry);
  check_internal(storage.blocks && storage.paired_heads == 0 && storage.added == 0.0f,
                 "a table's blocks are as the model has them");
  return {checkpoint.file(entry)->bytes().data() + entry.offset,
          DType::kU8,
          {entry.shape[0], entry.num_bytes / entry.shape[0]}};
}

int64_t first_non_finite_row(const Checkpoint& checkpoint, const TensorEntry& entry,
                             Backend& backend) {
  const ConstTensor blocks = block_rows(checkpoint, entry);
  const QuantFormat& format = *checkpoint.storage(entry).blocks;
  const int64_t width = entry.shape[1];
  const auto is_finite = [&](int64_t row) {
    const std::byte* from = blocks.as<std::byte>() + row * blocks.strides[0];
    float values[kChunk];
    for (int64_t at = 0; at < width; at += kChunk) {
      const int64_t count = std::min(kChunk, width - at);
      format.dequantize(from + format.num_bytes(at), count / format.block_elements, values);
      if (!all_finite(values, count)) return false;
    }
    return true;
  };
  std::atomic<int64_t> first{blocks.shape[0]};
  backend.run_on_host_threads(
      blocks.shape[0], std::max<int64_t>(1, kChunk / width), [&](int64_t begin, int64_t end) {
        int64_t row = begin;
        while (row < end && is_finite(row)) ++row;
        int64_t known = first;
        while (row < end && row < known && !first.compare_exchange_weak(known, row)) {
        }
      });
  return first == blocks.shape[0] ? -1 : first.load();
}

bool unpack_row(const Checkpoint& checkpoint, const TensorEntry& entry, int64_t row,
                const IndexRange& columns, const QuantizedRow& to) {
  const TensorStorage& storage = checkpoint.storage(entry);
  const Matrix matrix = matrix_of(storage, entry);
  const QuantFormat& format = *storage.blocks;
  const int64_t at = stored_row(row, head_rows(storage.paired_heads, matrix));
  const std::byte* from = checkpoint.file(entry)->bytes().data() + entry.offset;
  return format.unpack(from + format.num_bytes(at * matrix.width + columns.begin),
                       columns.size / format.block_elements, to);
}

ConstTensor host_values(const Checkpoint& checkpoint, const TensorEntry& entry, DType dtype,
                        Backend& backend, Buffer& buffer, RowRange rows) {
  check_internal(entry.shape.size() > 0 && std::ssize(entry.shape) <= kMaxRank,
                 "weights have a dimension or two");
  std::vector<int64_t> shape(entry.shape.begin(), entry.shape.end());
  if (rows.size >= 0 && shape.size() > 2)
    shape = {std::reduce(shape.begin(), shape.end() - 1, int64_t{1}, std::multiplies<>()),
             shape.back()};
  if (rows.size < 0) rows.size = shape[0] - rows.begin;
  if (is_stored_as_is(entry)) {
    const ConstTensor view =
        in_shape(shape, checkpoint.view(entry).data, entry.dtype).slice(0, rows.begin, rows.size);
    if (is_aligned(view)) return view;
    buffer = Buffer(view.num_bytes());
    std::memcpy(buffer.data(), view.data, static_cast<size_t>(view.num_bytes()));
    shape[0] = rows.size;
    return in_shape(shape, buffer.data(), entry.dtype);
  }
  const Matrix matrix = matrix_of(checkpoint.storage(entry), entry);
  const int64_t per_row = matrix.rows / shape[0];  // 1, but for all of more than two dimensions
  check_internal(per_row > 0, "checkpoints refuse vectors in blocks");
  buffer = Buffer(rows.size * per_row * matrix.width * size_bytes(dtype));
  const Converter converter(checkpoint, entry, dtype, buffer.data());
  backend.run_on_host_threads(rows.size * per_row, std::max<int64_t>(1, kChunk / matrix.width),
                              [&](int64_t begin, int64_t end) {
                                converter.convert_rows(rows.begin * per_row, begin, end);
                              });
  shape[0] = rows.size;
  return in_shape(shape, buffer.data(), dtype);
}

}  // namespace llmserve
