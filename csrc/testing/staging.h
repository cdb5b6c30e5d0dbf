// NumPy arrays as operands of any backend, for tests and benchmarks: those of a device are copied
// to it before an op and back after. Those of a host backend stay where they are, or go between
// guard pages and back (guard_operands()).
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <list>
#include <optional>
#include <string>
#include <vector>

#include "core/buffer.h"
#include "core/tensor.h"
#include "kernels/backend.h"

namespace llmserve {

// A NumPy array (float32, float16, uint16 for bfloat16, uint8, int32 or int64) as a view of host
// memory. Throws InvalidArgument.
ConstTensor host_view(const pybind11::array& array);
Tensor host_view(pybind11::array& array);

// An array that stays in a backend's memory, so that a benchmark times the op and no copies. Bound
// as `testing.DeviceArray`; the backend must outlive it.
struct DeviceArray {
  Buffer data;
  Tensor view;
};

// From now on the operands of host backends lie between pages that nobody may touch: "end" has them
// end at the second, "begin" has them begin after the first, "" stops it. Throws InvalidArgument.
void guard_operands(const std::string& side);

// The operands of one call: NumPy arrays or DeviceArrays.
class Staging {
 public:
  explicit Staging(Backend& backend);

  // What the op reads; none for None.
  ConstTensor in(const pybind11::handle& operand);
  // What it reads and writes; finish() brings it back.
  Tensor out(const pybind11::handle& operand);
  // The same of keys or values of a cache, in f8 if they are bytes (cache_part_of).
  Tensor cache(const pybind11::handle& operand) { return cache_part_of(out(operand)); }
  // `given`, or a new float32 NumPy array of the shape. result() is what to return to Python.
  Tensor make_out(const pybind11::object& given, std::vector<pybind11::ssize_t> shape);
  const pybind11::object& result() const { return result_; }

  // A copy between guard pages, or `data` itself.
  const void* guarded(const void* data, int64_t num_bytes);

  // Working memory of the op: as given, or [rows, columns] of NaN, so that nobody takes it for
  // zeros.
  Tensor make_work(const pybind11::object& given, int64_t rows, int64_t columns);

  // Copies every output back to its array; call it with the GIL released or not.
  void finish();

 private:
  struct Copy {
    Buffer data;
    std::byte* host;
  };
  // The array's memory from its first element to its last, on the device.
  Tensor stage(const Tensor& host, bool is_output);

  Memory& memory_;  // of the backend, or guarded
  const bool is_in_place_;
  std::list<Buffer> inputs_;
  std::list<Copy> outputs_;
  std::vector<pybind11::object> work_;
  pybind11::object result_;
};

}  // namespace llmserve
