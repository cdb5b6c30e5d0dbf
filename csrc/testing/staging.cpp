#include "testing/staging.h"

#include <algorithm>
#include <limits>

#include "core/error.h"
#include "testing/guarded_memory.h"

namespace py = pybind11;

namespace llmserve {
namespace {

DType dtype_of(const py::array& array) {
  if (py::isinstance<py::array_t<float>>(array)) return DType::kF32;
  if (py::isinstance<py::array_t<uint16_t>>(array)) return DType::kBF16;
  if (py::isinstance<py::array_t<uint8_t>>(array)) return DType::kU8;
  if (py::isinstance<py::array_t<int32_t>>(array)) return DType::kI32;
  if (py::isinstance<py::array_t<int64_t>>(array)) return DType::kI64;
  if (array.dtype().kind() == 'f' && array.itemsize() == 2) return DType::kF16;
  throw InvalidArgument(
      concat("expected a float32, float16, uint16 (bfloat16), uint8, int32 or int64 array, got ",
             std::string(py::str(array.dtype()))));
}

template <class View>
View view_of(const py::array& array, decltype(View::data) data) {
  if (array.ndim() > kMaxRank)
    throw InvalidArgument(concat("expected at most 4 dimensions, got ", array.ndim()));
  View view;
  view.data = data;
  view.dtype = dtype_of(array);
  view.rank = static_cast<int>(array.ndim());
  for (int d = 0; d < view.rank; ++d) {
    view.shape[d] = array.shape(d);
    view.strides[d] = array.strides(d) / array.itemsize();
  }
  return view;
}

// Elements from the first to the last, whatever lies between; strides are positive.
int64_t extent(const Tensor& tensor) {
  if (tensor.num_elements() == 0) return 0;
  int64_t last = 0;
  for (int d = 0; d < tensor.rank; ++d) last += (tensor.shape[d] - 1) * tensor.strides[d];
  return last + 1;
}

Memory* guard = nullptr;

Memory& staging_memory(Backend& backend) {
  return guard != nullptr && backend.memory().is_host() ? *guard : backend.memory();
}

}  // namespace

void guard_operands(const std::string& side) {
  static GuardedMemory at_begin(GuardedMemory::Side::kBegin), at_end(GuardedMemory::Side::kEnd);
  if (side != "begin" && side != "end" && !side.empty())
    throw InvalidArgument(concat("side must be begin, end or empty, got ", side));
  guard = side.empty() ? nullptr : side == "end" ? &at_end : &at_begin;
}

Staging::Staging(Backend& backend)
    : memory_(staging_memory(backend)), is_in_place_(guard == nullptr && memory_.is_host()) {}

const void* Staging::guarded(const void* data, int64_t num_bytes) {
  if (guard == nullptr) return data;
  Buffer& copy = inputs_.emplace_back(num_bytes, *guard);
  guard->copy_from_host(copy.data(), data, num_bytes);
  return copy.data();
}

ConstTensor host_view(const py::array& array) { return view_of<ConstTensor>(array, array.data()); }
Tensor host_view(py::array& array) { return view_of<Tensor>(array, array.mutable_data()); }

Tensor Staging::stage(const Tensor& host, bool is_output) {
  if (is_in_place_) return host;
  const int64_t num_bytes = extent(host) * size_bytes(host.dtype);
  Buffer data(num_bytes, memory_);
  memory_.copy_from_host(data.data(), host.data, num_bytes);
  Tensor view = host;
  view.data = data.data();
  if (is_output)
    outputs_.push_back({std::move(data), static_cast<std::byte*>(host.data)});
  else
    inputs_.push_back(std::move(data));
  return view;
}

ConstTensor Staging::in(const py::handle& operand) {
  if (operand.is_none()) return {};
  if (py::isinstance<DeviceArray>(operand)) return operand.cast<const DeviceArray&>().view;
  const ConstTensor host = host_view(operand.cast<const py::array>());
  if (is_in_place_) return host;
  Tensor view(const_cast<void*>(host.data), host.dtype, {});
  view.rank = host.rank;
  view.shape = host.shape;
  view.strides = host.strides;
  return stage(view, false);
}

Tensor Staging::out(const py::handle& operand) {
  if (py::isinstance<DeviceArray>(operand)) return operand.cast<DeviceArray&>().view;
  auto array = operand.cast<py::array>();
  return stage(host_view(array), true);
}

Tensor Staging::make_work(const py::object& given, int64_t rows, int64_t columns) {
  if (!given.is_none()) return out(given);
  py::array_t<float> array({rows, columns});
  std::fill_n(array.mutable_data(), array.size(), std::numeric_limits<float>::quiet_NaN());
  work_.push_back(array);
  return out(array);
}

Tensor Staging::make_out(const py::object& given, std::vector<py::ssize_t> shape) {
  result_ = given.is_none() ? py::array_t<float>(std::move(shape)) : given;
  return out(result_);
}

void Staging::finish() {
  for (const Copy& copy : outputs_)
    memory_.copy_to_host(copy.host, copy.data.data(), copy.data.num_bytes());
}

}  // namespace llmserve
