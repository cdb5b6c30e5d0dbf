// What the bindings of ops do with their arguments before and after the kernel runs.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bindings/array.h"

namespace llmserve {

// Where an op writes: the caller's array, or a new one that is returned as what `like` is: a NumPy
// array for a NumPy array, a tensor for a torch tensor, else an Array. On a device a new one comes
// from torch, whose memory is in the order of its streams; what is no torch tensor there needs a
// given one (NotSupported).
class OutputArray {
 public:
  OutputArray(const std::string& name, const pybind11::object& given, DType dtype,
              std::span<const int64_t> shape, const ArrayPlace& place = {},
              pybind11::handle like = {});
  OutputArray(const std::string& name, const pybind11::object& given, DType dtype,
              std::initializer_list<int64_t> shape, const ArrayPlace& place = {},
              pybind11::handle like = {})
      : OutputArray(name, given, dtype, std::span(shape.begin(), shape.size()), place, like) {}

  const Tensor& tensor() const { return tensor_; }
  // Throws InvalidArgument if it shares memory with one of the inputs, unless it is that very view
  // and the first of them, and the op may work in place.
  void check_apart(std::span<const ConstTensor> inputs, bool can_be_first = false) const;
  void check_apart(std::initializer_list<ConstTensor> inputs, bool can_be_first = false) const {
    check_apart(std::span(inputs.begin(), inputs.size()), can_be_first);
  }
  pybind11::object result(pybind11::handle like) const;

 private:
  std::string name_;
  pybind11::object given_;
  std::optional<ImportedArray> imported_;
  std::optional<Array> made_;
  Tensor tensor_;
};

// Whether two views share a byte; both may have any strides.
bool overlap(const ConstTensor& a, const ConstTensor& b);

// Where arrays for CUDA device 0 are: with torch's current stream if torch uses CUDA, else the
// legacy default stream.
ArrayPlace cuda_place();

// A list of integers, or an int32 or int64 array of one dimension; one on a device is copied to the
// host, which waits for it. Throws InvalidArgument, also for what does not fit.
std::vector<int64_t> import_int64s(const std::string& name, const pybind11::object& given);
std::vector<int32_t> import_int32s(const std::string& name, const pybind11::object& given);

// Row-major [B, M].
struct BlockTables {
  std::vector<int32_t> blocks;
  int64_t num_rows = 0;
  int64_t max_blocks = 0;
};
// An integer array [B, M], or a list of B lists, filled up with zeros to the longest.
BlockTables import_block_tables(const std::string& name, const pybind11::object& given);

// One value for all rows, or a list or array of one a row (of any length if num_rows is -1).
template <class T>
std::vector<T> import_row_values(const std::string& name, const pybind11::object& values,
                                 int64_t num_rows);

}  // namespace llmserve
