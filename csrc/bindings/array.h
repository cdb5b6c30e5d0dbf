// Tensors that cross between Python and C++ without a copy: `Array` goes out, `ImportedArray` came
// in. No array library is linked; everything but NumPy, which has an API of its own, crosses by
// DLPack (dlpack.h).
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <span>
#include <string>

#include "bindings/dlpack.h"
#include "core/tensor.h"

namespace llmserve {

// Memory with a shape, bound as `llmserve.Array`. Copies and everybody who got it by DLPack or
// NumPy share the memory, which lives as long as the last of them.
class Array {
 public:
  // `owner` keeps the tensor's data alive; it is let go of on any thread, without the GIL.
  Array(Tensor tensor, std::shared_ptr<const void> owner, bool is_read_only = false)
      : tensor_(tensor), owner_(std::move(owner)), is_read_only_(is_read_only) {}
  // New memory, not initialised, aligned to a cache line. Throws ResourceExhausted.
  static Array empty(DType dtype, std::span<const int64_t> shape);

  const Tensor& tensor() const { return tensor_; }
  const std::shared_ptr<const void>& owner() const { return owner_; }
  bool is_read_only() const { return is_read_only_; }
  static Array empty_like(const ConstTensor& tensor, DType dtype);
  // New memory with the same elements, contiguous.
  static Array copy_of(const ConstTensor& tensor);
  // Likewise in another dtype: float32 or bfloat16, rounded to nearest even, of any float.
  static Array convert(const ConstTensor& tensor, DType dtype);

 private:
  Tensor tensor_;
  std::shared_ptr<const void> owner_;
  bool is_read_only_ = false;
};

// Where the arrays of a call are to be: in host memory, or on a CUDA device, whose work goes to a
// stream that the arrays' owner is told of, so that it can make theirs come first.
struct ArrayPlace {
  bool is_cuda = false;
  int32_t device = 0;
  uint64_t stream = 0;  // as DLPack counts them: a cudaStream_t, or 1 for the legacy default stream
};

// Whether an array, by its `__dlpack_device__`, is on a CUDA device.
bool is_on_cuda(pybind11::handle object);

// How DLPack calls an element type. Throws NotSupported for the 8-bit floats.
dlpack::DataType dlpack_type(DType dtype);

// A NumPy array or any object with `__dlpack__` at a place, held until this goes. To be made and
// destroyed with the GIL; the view may be used without, as long as the work that reads it is in the
// place's stream: owners give memory back in its order.
class ImportedArray {
 public:
  // `name` is the argument's, for messages. Throws InvalidArgument for what is no array, has an
  // element type that llmserve lacks, more than kMaxRank dimensions, a shape that is none, or
  // elements that are not aligned, and for one in host memory that is to be on a device;
  // NotSupported for one on another device.
  ImportedArray(std::string name, pybind11::handle object, const ArrayPlace& place = {});

  const ConstTensor& view() const { return view_; }
  // The same memory to write to. Throws InvalidArgument if it is read-only or if elements share
  // memory.
  Tensor writable() const;

 private:
  void import_numpy(const pybind11::array& array);
  void import_dlpack(pybind11::handle object, const ArrayPlace& place);
  void take(const dlpack::Tensor& tensor, const ArrayPlace& place);
  void check_extent() const;
  void check_alignment() const;

  std::string name_;
  pybind11::object numpy_;               // of NumPy's arrays
  std::shared_ptr<const void> managed_;  // of the others: its deleter is DLPack's
  ConstTensor view_;
  bool is_read_only_ = false;
};

}  // namespace llmserve
