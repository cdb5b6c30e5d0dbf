// A non-owning view of up to four dimensions. Strides are in elements; data belongs to a Buffer, an
// Arena or a mapping.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "core/dtype.h"

namespace llmserve {

inline constexpr int kMaxRank = 4;

// `Void` is `void` for a view that may be written through and `const void` for one that may not.
template <class Void>
struct BasicTensor {
  Void* data = nullptr;
  DType dtype = DType::kF32;
  int rank = 0;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> strides{};

  BasicTensor() = default;

  // A contiguous, row-major view.
  BasicTensor(Void* data_in, DType dtype_in, std::initializer_list<int64_t> dims)
      : data(data_in), dtype(dtype_in), rank(static_cast<int>(dims.size())) {
    int i = 0;
    for (const int64_t dim : dims) shape[i++] = dim;
    int64_t stride = 1;
    for (int d = rank - 1; d >= 0; --d) {
      strides[d] = stride;
      stride *= shape[d];
    }
  }

  // A writable view is usable wherever a read-only one is expected.
  template <class Other>
    requires(std::is_const_v<Void> && !std::is_const_v<Other>)
  BasicTensor(const BasicTensor<Other>& other)  // NOLINT: implicit on purpose
      : data(other.data),
        dtype(other.dtype),
        rank(other.rank),
        shape(other.shape),
        strides(other.strides) {}

  // The elements as T; the caller has checked dtype.
  template <class T>
  auto* as() const {
    using Element = std::conditional_t<std::is_const_v<Void>, const T, T>;
    return static_cast<Element*>(data);
  }

  explicit operator bool() const { return data != nullptr; }

  int64_t num_elements() const {
    int64_t n = 1;
    for (int d = 0; d < rank; ++d) n *= shape[d];
    return n;
  }
  int64_t num_bytes() const { return num_elements() * size_bytes(dtype); }

  bool is_contiguous() const {
    int64_t stride = 1;
    for (int d = rank - 1; d >= 0; --d) {
      if (shape[d] != 1 && strides[d] != stride) return false;
      stride *= shape[d];
    }
    return true;
  }

  // [begin, begin + length) of one dimension; shares the data.
  BasicTensor slice(int dim, int64_t begin, int64_t length) const {
    using Byte = std::conditional_t<std::is_const_v<Void>, const std::byte, std::byte>;
    BasicTensor view = *this;
    view.data = static_cast<Byte*>(data) + begin * strides[dim] * size_bytes(dtype);
    view.shape[dim] = length;
    return view;
  }
};

using Tensor = BasicTensor<void>;
using ConstTensor = BasicTensor<const void>;

// "float32 [2, 64]", for messages.
std::string describe(const ConstTensor& tensor);

}  // namespace llmserve
